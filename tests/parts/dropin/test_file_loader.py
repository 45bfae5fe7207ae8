"""Loading a folder: order, helpers, broken files, duplicates, the manifest, and no effect on the program."""

import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.parts.dropin.loaded_files import REGISTERED, call, load, load_one, names, skipped, write
from tests.support.examples import examples
from tests.support.other_user import refuse_entry
from toolbus.dropin import FileProblem, load_files, load_folder, tool_files


def tool(name: str, output: Any = None, more: str = "") -> str:
    """Returns a file with one tool."""
    flat = {"description": "Does it."}
    return f"{more}\nregister_tool(name={name!r}, execute=lambda: {output!r}, definition={flat!r})\n"


def test_files_load_helpers_first_and_then_by_name(tmp_path: Path) -> None:
    files = ["b.py", "A.py", "_z.py", "a.py", "Z.py", "_common.py", "1.py"]
    loaded = load(tmp_path, {file: tool(file.removesuffix(".py")) for file in files})
    assert names(loaded) == ["_common", "_z", "1", "A", "Z", "a", "b"]
    assert tool_files(tmp_path) == ["_common.py", "_z.py", "1.py", "A.py", "Z.py", "a.py", "b.py"]


def test_a_folder_that_this_user_may_not_enter_does_not_keep_the_files_beside_it_from_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lost+found").mkdir()
    refuse_entry(tmp_path / "lost+found", monkeypatch)
    assert names(load(tmp_path, {"a.py": tool("a")})) == ["a"]


def test_only_visible_python_files_of_the_folder_itself_load(tmp_path: Path) -> None:
    for inner in ("inner", "__pycache__"):
        (tmp_path / inner).mkdir()
        write(tmp_path / inner, {"x.py": tool("x")})
    others: dict[str, str | bytes] = {
        ".hidden.py": tool("x"),
        "__init__.py": tool("x"),
        "notes.txt": "x",
        "x.pyc": b"\0",
        "x.py~": tool("x"),
    }
    assert names(load(tmp_path, {**others, "a.py": tool("a")})) == ["a"]


async def test_a_helper_is_imported_by_its_name_and_shared(tmp_path: Path) -> None:
    loaded = load(
        tmp_path,
        {
            "_common.py": "seen = []\ndef shout(text): return text.upper()",
            "_more.py": "from _common import shout\ndef greet(): return shout('hello')",
            "a.py": tool("a", more="import _common\n_common.seen.append('a')"),
            "b.py": tool("b", more="import _common as c\nc.seen.append('b')"),
            "c.py": """
                from _more import *

                def late():
                    from _common import seen, shout
                    return [greet(), shout("x"), seen]

                register_tool(name="c", execute=late, definition={"description": "Greets."})
                """,
        },
    )
    assert loaded.problems == ()
    assert (await call(loaded, "c")).output == ["HELLO", "X", ["a", "b"]]


def test_a_helper_is_not_a_module_of_the_program_and_the_path_stays_as_it_is(tmp_path: Path) -> None:
    before, path = set(sys.modules), list(sys.path)
    helpers = {"_json.py": "own = True", "_common.py": "", "a.py": tool("a", more="import _json\n_json.own")}
    assert load(tmp_path, helpers).problems == ()
    assert sys.path == path
    assert "_common" not in sys.modules
    assert not hasattr(sys.modules["_json"], "own")  # the standard library's
    assert all(name.startswith("toolbus_dropin_") for name in set(sys.modules) - before)
    with pytest.raises(ModuleNotFoundError):
        __import__("_common")


def test_loading_a_file_writes_no_bytecode_and_changes_no_builtins(tmp_path: Path) -> None:
    load_one(tmp_path, REGISTERED)
    assert os.listdir(tmp_path) == ["one.py"]
    with pytest.raises(NameError):
        eval("register_tool")


async def test_two_folders_with_the_same_names_do_not_mix(tmp_path: Path) -> None:
    both = []
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        files = {
            "_common.py": f"word = {folder!r}",
            "a.py": "import _common\ndef run(): return _common.word\nTOOL_NAME = 'a'",
        }
        both.append(load(tmp_path / folder, files))
    assert [(await call(each, "a")).output for each in both] == ["first", "second"]


async def test_a_file_finds_its_data_by_its_own_path(tmp_path: Path) -> None:
    write(tmp_path, {"words.txt": "data"})
    text = (
        "from pathlib import Path\nTOOL_NAME = 'a'\ndef run(): return Path(__file__).with_name('words.txt').read_text()"
    )
    assert (await call(load_one(tmp_path, text), "a")).output == "data"


async def test_dataclasses_and_hints_that_are_text_work_in_a_file(tmp_path: Path) -> None:
    text = """
    from __future__ import annotations
    from dataclasses import dataclass
    from toolbus import llm_tool

    @dataclass
    class Place:
        name: str
        height: int = 0

    @llm_tool
    def higher(place: Place) -> Place:
        return Place(place.name, place.height + 1)
    """
    loaded = load_one(tmp_path, text)
    result = await call(loaded, "higher", {"place": {"name": "Fuji"}})
    assert result.output == {"name": "Fuji", "height": 1}


BROKEN: dict[str, tuple[str | bytes, str]] = {
    "syntax": ("def f(:\n", "SyntaxError"),
    "indentation": ("  x = 1\n y = 2\n", "IndentationError"),
    "raise": ("x = 1\nraise ValueError('boom')", "ValueError: boom (line 2)"),
    "exit": ("import sys\nsys.exit(3)", '__name__ == "__main__"'),
    "interrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "generator exit": ("raise GeneratorExit", "GeneratorExit"),
    "cancelled": ("import asyncio\nraise asyncio.CancelledError", "CancelledError"),
    "group": ("raise BaseExceptionGroup('all', [SystemExit(1), ValueError(2)])", "BaseExceptionGroup"),
    "recursion": ("def f(): f()\nf()", "RecursionError"),
    "parentheses": ("(" * 5000, "SyntaxError"),
    "nesting": ("-" * 100_000 + "1", "Error"),
    "memory": ("raise MemoryError", "MemoryError"),
    "import": ("import no_such_module_at_all", "install no_such_module_at_all"),
    "stargazer": ("from tools import ToolRegistry", "write toolbus.tools in place of tools"),
    "no run": ("TOOL_NAME = 't'", "TOOL_NAME is set, but there is no function run: add one"),
    "helper": ("import _gone_helper", "_gone_helper"),
    "no utf-8": (b"name = '\xff\xfe'", "SyntaxError"),
    "nul": (b"x = 1\0", "null bytes"),
    "unknown coding": ("# coding: no-such-coding\n", "SyntaxError"),
    "text raises": ("class E(Exception):\n    def __str__(self): raise self\nraise E", "E (line 3)"),
    "text exits": ("class E(Exception):\n    def __str__(self): raise SystemExit\nraise E", "E (line 3)"),
    "odd syntax error": ("raise SyntaxError(5)", "SyntaxError: 5"),
    "another's name": ("__name__ = 'json'\nraise ValueError('x')", "ValueError: x"),
    "own module": (f"import sys\n{REGISTERED}\ndel sys.modules[__name__]\nraise ValueError('x')", "ValueError: x"),
    "later registers": (tool("bad") + "raise RuntimeError('after')", "RuntimeError: after"),
    "bad entry": (tool("bad") + "TOOLS = [{'name': 'x'}]", "TOOLS[0]"),
    "odd namespace": ("class D(dict):\n    def get(self, *a): raise OSError('odd')\nTOOLS = [D(name='x')]", "TOOLS[0]"),
}


@pytest.mark.parametrize(("text", "words"), BROKEN.values(), ids=BROKEN.keys())
async def test_a_file_that_fails_is_skipped_with_its_reason_and_the_others_load(
    tmp_path: Path, text: str | bytes, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load(tmp_path, {"a.py": tool("first"), "m.py": text, "z.py": tool("last")})
    assert names(loaded) == ["first", "last"]
    (problem,) = loaded.problems
    assert (problem.file, problem.skipped) == ("m.py", True)
    assert words in problem.reason
    assert "\n" not in problem.reason
    (record,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert record.getMessage() == f"failed to load m.py: {problem.reason}"
    assert [name for name in sys.modules if name.startswith("toolbus_dropin_") and name.endswith("_m")] == []
    assert "json" in sys.modules


def test_the_reason_of_a_problem_is_shortened(tmp_path: Path) -> None:
    loaded = load(tmp_path, {"a.py": "raise ValueError('x' * 100_000)"})
    assert len(skipped(loaded)["a.py"]) < 600


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to nowhere"])
def test_a_path_that_is_not_a_file_is_reported_without_waiting(tmp_path: Path, kind: str) -> None:
    odd = tmp_path / "odd.py"
    match kind:
        case "folder":
            odd.mkdir()
        case "pipe":
            os.mkfifo(odd)
        case _:
            odd.symlink_to("gone")
    loaded = load(tmp_path, {"a.py": tool("a")})
    assert names(loaded) == ["a"]
    assert "not a readable file" in skipped(loaded)["odd.py"]


def test_an_unreadable_file_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_bytes

    def read_or_refuse(path: Path) -> bytes:
        if path.name == "closed.py":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_or_refuse)
    loaded = load(tmp_path, {"closed.py": tool("closed"), "open.py": tool("open")})
    assert names(loaded) == ["open"]
    assert "Permission denied" in skipped(loaded)["closed.py"]


def test_a_file_name_that_is_not_utf_8_is_reported_in_valid_utf_8(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/\xff.py", "w", encoding="utf-8") as file:
        file.write(tool("x"))
    (problem,) = load_folder(tmp_path).problems
    assert problem.file == "\\udcff.py"
    assert problem.reason.isascii()


def test_a_file_without_tools_is_not_a_problem(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded = load(tmp_path, {"_common.py": "x = 1", "words.py": "y = 2", "empty.py": "", "note.py": "# nothing yet"})
    assert (loaded.specs, loaded.problems) == ((), ())
    assert caplog.records == []


def test_an_empty_folder_offers_nothing(tmp_path: Path) -> None:
    assert load_folder(tmp_path).problems == ()


def test_a_folder_that_cannot_be_listed_is_a_problem_and_offers_nothing(tmp_path: Path) -> None:
    loaded = load_folder(tmp_path / "gone")
    assert loaded.specs == ()
    (problem,) = loaded.problems
    assert problem.file == str(tmp_path / "gone")
    assert "cannot be listed" in problem.reason


async def test_of_two_tools_with_one_name_the_later_wins_in_the_place_of_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = {"a.py": tool("x", "from a"), "b.py": tool("y"), "c.py": tool("x", "from c")}
    loaded = load(tmp_path, files)
    assert names(loaded) == ["x", "y"]
    assert (await call(loaded, "x")).output == "from c"
    assert 'tool "x" registered twice (later wins)' in [each.getMessage() for each in caplog.records]
    reason = 'tool "x" registered twice (later wins): before in a.py. Rename one of them'
    assert loaded.problems == (FileProblem("c.py", reason, skipped=False),)


async def test_a_file_that_fails_does_not_take_the_name_of_another(tmp_path: Path) -> None:
    loaded = load(tmp_path, {"a.py": tool("x", "from a"), "b.py": tool("x", "from b") + "raise ValueError"})
    assert (await call(loaded, "x")).output == "from a"
    assert list(skipped(loaded)) == ["b.py"]


def test_a_file_that_fails_does_not_reserve_a_place(tmp_path: Path) -> None:
    loaded = load(tmp_path, {"a.py": tool("x") + "raise ValueError", "b.py": tool("y"), "c.py": tool("x")})
    assert names(loaded) == ["y", "x"]


def test_an_import_of_a_decorated_helper_is_not_a_second_tool(tmp_path: Path) -> None:
    helper = "from toolbus import llm_tool\n@llm_tool\ndef shared(): ..."
    loaded = load(
        tmp_path, {"_common.py": helper, "a.py": "from _common import shared", "b.py": "from _common import *"}
    )
    assert (names(loaded), loaded.problems) == (["shared"], ())


async def test_a_helper_may_register_for_the_file_that_calls_it(tmp_path: Path) -> None:
    helper = "def word(name): register_tool(name=name, execute=lambda: name, definition={'description': 'A word.'})"
    loaded = load(
        tmp_path, {"_common.py": helper, "a.py": "from _common import word\nword('x')\nword('y')", "b.py": tool("z")}
    )
    assert names(loaded) == ["x", "y", "z"]
    assert '"file": "a.py"' in loaded.specs[0].tool.metadata_json


def test_the_import_of_a_helper_that_failed_is_an_error_that_names_it(tmp_path: Path) -> None:
    loaded = load(tmp_path, {"_a.py": "import _b", "_b.py": "raise ValueError('boom')", "c.py": "import _b"})
    assert "_b.py is not loaded" in skipped(loaded)["_a.py"]
    assert "boom" in skipped(loaded)["_b.py"]
    assert "_b.py is not loaded" in skipped(loaded)["c.py"]


def test_only_the_offering_files_offer_their_tools_and_the_others_can_be_imported(tmp_path: Path) -> None:
    folder = write(tmp_path, {"_common.py": tool("c", more="x = 1"), "a.py": tool("a", more="from _common import x")})
    loaded = load_files(folder, ["_common.py", "a.py"], offering=["a.py"])
    assert (names(loaded), loaded.problems) == (["a"], ())


def test_without_a_manifest_every_file_loads_unless_one_is_required(tmp_path: Path) -> None:
    assert names(load(tmp_path, {"a.py": tool("a")})) == ["a"]
    loaded = load_folder(tmp_path, require_manifest=True)
    assert loaded.specs == ()
    assert "has no _manifest.json" in skipped(loaded)["_manifest.json"]


def test_only_allowed_files_load_and_the_others_are_not_run(tmp_path: Path) -> None:
    manifest = '{"allow": ["a.py", "_common.py", "gone.py"]}'
    ran = tmp_path / "ran"
    stray = f"open({str(ran)!r}, 'w').close()\n" + tool("stray")
    files = {"_manifest.json": manifest, "a.py": tool("a", more="import _common"), "_common.py": "", "stray.py": stray}
    loaded = load(tmp_path, files)
    assert names(loaded) == ["a"]
    assert not ran.exists()
    assert "not on the allow list" in skipped(loaded)["stray.py"]
    assert "not in the folder" in skipped(loaded)["gone.py"]


@pytest.mark.parametrize("manifest", ["", "[]", '{"alow": []}', '{"allow": ["../a.py"]}', b"\xff"])
@pytest.mark.parametrize("require", [False, True])
def test_a_broken_manifest_loads_nothing(tmp_path: Path, manifest: str | bytes, require: bool) -> None:
    loaded = load(tmp_path, {"_manifest.json": manifest, "a.py": tool("a")}, require_manifest=require)
    assert loaded.specs == ()
    assert list(skipped(loaded)) == ["_manifest.json"]


GOOD = {
    "register": lambda name: tool(name),
    "module": lambda name: f"TOOL_NAME = {name!r}\nasync def run(**kwargs): return 'x'\n",
    "list": lambda name: f"TOOLS = [{{'name': {name!r}, 'handler': print}}]\n",
    "decorated": lambda name: f"from toolbus import llm_tool\n@llm_tool(name={name!r})\ndef f(): ...\n",
}


@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    files=st.dictionaries(
        st.from_regex(r"[_A-Za-z0-9]{1,4}\.py", fullmatch=True).filter(lambda name: name != "__init__.py"),
        st.one_of(
            st.tuples(st.sampled_from(sorted(GOOD)), st.sampled_from(["x", "y", "z", "toString", "__class__"])),
            st.sampled_from(sorted(set(BROKEN) - {"nesting", "own module"})),
        ),
        max_size=8,
    )
)
def test_any_folder_loads_exactly_what_its_good_files_register(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, tuple[str, str] | str]
) -> None:
    folder = tmp_path_factory.mktemp("tools")
    loaded = load(
        folder,
        {name: BROKEN[each][0] if isinstance(each, str) else GOOD[each[0]](each[1]) for name, each in files.items()},
    )
    order = sorted(files, key=lambda name: (not name.startswith("_"), name))
    good = [each[1] for name in order if not isinstance(each := files[name], str)]
    assert names(loaded) == list(dict.fromkeys(good))
    assert list(skipped(loaded)) == [name for name in order if isinstance(files[name], str)]
    assert sum(not problem.skipped for problem in loaded.problems) == len(good) - len(set(good))


def test_a_file_that_offers_nothing_says_what_to_do(tmp_path: Path) -> None:
    files = {
        "greet.py": "def greet(name: str) -> str:\n    return name\n\ndef _own() -> None: ...\n",
        "weather.py": "from toolbus import Plugin\nplugin = Plugin('weather')\n\ndef get_weather(city): ...\n",
        "data.py": "from json import dumps\nPLACES = ['Oslo']\n",
        "_shared.py": "def help_out() -> None: ...\n",
        "fine.py": tool("x") + "def helper() -> None: ...\n",
    }
    loaded = load(tmp_path, files)
    assert names(loaded) == ["x"]
    assert {problem.file: problem.reason for problem in loaded.problems} == {
        "greet.py": "offers no tools: put `@llm_tool` (from toolbus import llm_tool) above greet",
        "weather.py": f"is a plugin, so it offers no tools here: run it with `toolbus run {tmp_path}/weather.py`",
    }
    assert not any(problem.skipped for problem in loaded.problems)
