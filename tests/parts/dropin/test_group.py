"""Grouping files by process."""

from pathlib import Path

from tests.parts.dropin.loaded_files import names, write
from toolbus.dropin import FileGrants, Group, Manifest, groups, load_files

GRANTS = FileGrants(secrets=("API_KEY",))


def test_files_without_grants_share_a_group_and_each_with_grants_is_alone() -> None:
    manifest = Manifest(files={"b.py": GRANTS, "d.py": FileGrants(memory_mb=128), "c.py": FileGrants()})
    assert groups(["a.py", "b.py", "c.py", "d.py"], manifest) == [
        Group("dropin", ("a.py", "c.py")),
        Group("dropin:b", ("b.py",), grants=GRANTS),
        Group("dropin:d", ("d.py",), grants=FileGrants(memory_mb=128)),
    ]


def test_groups_are_in_the_order_of_their_first_files() -> None:
    result = groups(["a.py", "b.py", "c.py"], Manifest(files={"a.py": GRANTS, "c.py": GRANTS}))
    assert [group.source for group in result] == ["dropin:a", "dropin", "dropin:c"]


def test_helpers_belong_to_every_group_and_are_loaded_first() -> None:
    result = groups(["_a.py", "_b.py", "c.py", "d.py"], Manifest(files={"d.py": GRANTS}))
    assert [group.order for group in result] == [("_a.py", "_b.py", "c.py"), ("_a.py", "_b.py", "d.py")]
    assert [group.helpers for group in result] == [("_a.py", "_b.py")] * 2


def test_a_helpers_own_tool_is_offered_by_the_shared_group_only(tmp_path: Path) -> None:
    text = "register_tool(name={!r}, execute=print, definition={{'description': 'x'}})"
    write(tmp_path, {"_a.py": text.format("shared"), "b.py": "import _a\n" + text.format("b")})
    result = groups(["_a.py", "b.py"], Manifest(files={"b.py": GRANTS}))
    offered = {group.source: names(load_files(tmp_path, group.order, offering=group.files)) for group in result}
    assert offered == {"dropin": ["shared"], "dropin:b": ["b"]}


def test_files_that_are_not_allowed_are_in_no_group() -> None:
    manifest = Manifest(allow=("_a.py", "c.py"), files={"b.py": GRANTS})
    assert groups(["_a.py", "_x.py", "b.py", "c.py"], manifest) == [Group("dropin", ("_a.py", "c.py"), ("_a.py",))]
    assert groups(["a.py"], Manifest(allow=())) == []
    assert groups([], Manifest()) == []


def test_scripts_share_a_group_of_their_own_with_helpers_of_their_own() -> None:
    files = ["_a.js", "_a.py", "b.js", "c.py", "d.js", "js.py", "x.js"]
    manifest = Manifest(files={"d.js": FileGrants(memory_mb=256), "js.py": GRANTS})
    assert groups(files, manifest, extensions=("x.js",)) == [
        Group("dropin:js", ("_a.js", "b.js"), ("_a.js",)),
        Group("dropin", ("_a.py", "c.py"), ("_a.py",)),
        Group("dropin:d.js", ("d.js",), ("_a.js",), FileGrants(memory_mb=256)),
        Group("dropin:js.py", ("js.py",), ("_a.py",), GRANTS),
        Group("dropin:x.js", ("x.js",), is_extension=True),
    ]
