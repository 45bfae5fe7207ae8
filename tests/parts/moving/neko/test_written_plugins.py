"""Plugins as authors of N.E.K.O. write them: the forms of an entry, what they import, and what they only hand on.

What `toolbus dev check` promises of a folder, a run keeps: each folder here is checked and loaded.
"""

import logging
import textwrap
import tomllib
from pathlib import Path

import pytest

from tests.parts.moving.neko.folders import loaded
from toolbus.errors import SetupError
from toolbus.functions.runner import run_handler
from toolbus.parts.moving.check.neko_rules import NEKO
from toolbus.parts.moving.check.source_file import check
from toolbus.parts.moving.neko.plugin_folder import use_sdk
from toolbus.parts.moving.neko.plugin_lifecycle import start_plugin
from toolbus.sdk import ToolScope

SDK_NAMES = tomllib.loads((Path(__file__).parent / "sdk_names.toml").read_text(encoding="utf-8"))
HEAD = "from plugin.sdk.plugin import NekoPluginBase, lifecycle, llm_tool, neko_plugin\n"
CLASS = """
@neko_plugin
class Dice(NekoPluginBase):
{body}
    @llm_tool
    async def roll(self, *, sides: int = 6) -> int:
        "Rolls a die."
        return sides + PIPS
"""
PIPS = "PIPS = 0\n"


async def run_sync(job: object) -> object:
    raise AssertionError("these plugins have no plain functions")


def _folder(
    place: Path,
    *,
    entry: str = "plugins.dice:Dice",
    head: str = PIPS,
    body: str = "",
    file: str = "__init__.py",
    name: str = "dice",
    **others: str,
) -> Path:
    """Returns the folder of a plugin with the id `dice`.

    Args:
        head: what its module begins with.
        body: of its class, beside its tool.
        file: of its class.
        others: further modules by name.
    """
    folder = place / name
    (folder / "inner").mkdir(parents=True)
    (folder / "plugin.toml").write_text(f'[plugin]\nid = "dice"\nname = "Dice"\nentry = "{entry}"\n')
    (folder / file).write_text(HEAD + head + CLASS.format(body=textwrap.indent(textwrap.dedent(body), "    ")))
    for module, text in others.items():
        (folder / f"{module}.py").write_text(text)
    return folder


async def _rolls(folder: Path) -> object:
    """Starts a plugin and returns the output of its tool for the number 6."""
    with loaded(folder) as plugin:
        assert plugin.owner is not None
        assert plugin.tools is not None
        await start_plugin(plugin.owner, run_sync)
        spec = plugin.tools.get("roll")
        assert spec is not None
        return (await run_handler(spec, {"sides": 6}, ToolScope(), run_sync)).output


@pytest.mark.parametrize(
    ("entry", "file", "name"),
    [
        ("plugins.dice:Dice", "__init__.py", "dice"),  # what the generator, the guide and the market write
        ("plugin.plugins.dice:Dice", "__init__.py", "dice"),
        ("dice:Dice", "__init__.py", "dice"),
        ("main:Dice", "main.py", "dice"),
        ("plugins.dice.main:Dice", "main.py", "dice"),
        ("plugins.dice.inner.main:Dice", "inner/main.py", "dice"),
        ("plugins.dice.__init__:Dice", "__init__.py", "dice"),
        ("plugins.dice:Dice", "__init__.py", "n.e.k.o_plugin_dice-1.2"),  # as a repository of one is cloned
        ("main:Dice", "main.py", "n.e.k.o_plugin_dice-1.2"),
    ],
)
async def test_every_form_of_an_entry_starts(tmp_path: Path, entry: str, file: str, name: str) -> None:
    folder = _folder(tmp_path, entry=entry, file=file, name=name)
    assert check(folder, NEKO).runs
    assert await _rolls(folder) == 6


@pytest.mark.parametrize("name", ["dice", "n.e.k.o_plugin_dice-1.2"])
@pytest.mark.parametrize("entry", ["plugins.dice:Dice", "plugin.plugins.dice:Dice", "main:Dice"])
@pytest.mark.parametrize(
    "head",
    [
        "from plugins.dice.pips import PIPS\n",
        "from plugin.plugins.dice.pips import PIPS\n",
        "from .pips import PIPS\n",
        "import plugins.dice.pips as pips\nPIPS = pips.PIPS\n",
        "from plugins.dice import pips\nimport plugin.plugins.dice.pips as it\nassert pips is it\nPIPS = it.PIPS\n",
    ],
)
async def test_the_modules_of_a_plugin_have_one_object_under_each_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str, entry: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path.parent)
    file = "main.py" if entry.startswith("main") else "__init__.py"
    folder = _folder(tmp_path / "plugins", entry=entry, head=head, file=file, name=name, pips="PIPS = 1")
    assert check(folder, NEKO).runs
    assert await _rolls(folder) == 7


async def test_a_package_plugins_of_the_folder_itself_comes_first(tmp_path: Path) -> None:
    folder = _folder(tmp_path, entry="main:Dice", head="from plugins.pips import PIPS\n", file="main.py")
    (folder / "plugins").mkdir()
    (folder / "plugins" / "pips.py").write_text("PIPS = 2")
    assert await _rolls(folder) == 8


@pytest.mark.parametrize(
    "head",
    [
        "from .pips import PIPS\nfrom plugins import dice\nassert dice.pips.PIPS == 1\n",
        "from plugins.other.pips import PIPS\n",  # of another plugin, which is beside this one
        "from ..other.pips import PIPS\n",
        "import os, sys\nsys.path.append(os.path.dirname(__file__) + '/lib')\nfrom vendored_pips import PIPS\n",
        "from plugin.sdk.plugin import *\nfrom .pips import PIPS\nassert Ok and PluginStore\n",
        "import plugin.sdk.plugin as sdk\nfrom .pips import PIPS\nassert sdk.NekoPluginBase is NekoPluginBase\n",
        "from plugin.sdk import plugin as sdk\nfrom .pips import PIPS\nassert sdk.NekoPluginBase is NekoPluginBase\n",
    ],
)
async def test_imports_that_a_run_finds_are_found_by_the_check(tmp_path: Path, head: str) -> None:
    folder = _folder(tmp_path, head=head, pips="PIPS = 1")
    (folder / "lib").mkdir()
    for place in (folder / "lib" / "vendored_pips.py", tmp_path / "other" / "pips.py"):
        place.parent.mkdir(exist_ok=True)
        place.write_text("PIPS = 1")
    assert check(folder, NEKO).findings == ()
    assert await _rolls(folder) == 7


async def test_the_context_has_what_its_protocol_names(tmp_path: Path) -> None:
    body = """
    @lifecycle(id='startup')
    async def begin(self, **_):
        ctx = self._host_ctx
        assert ctx is self.ctx and self._plugin_id == 'dice' and ctx.run_id is None
        assert (await ctx.get_own_config(timeout=2.0))['config'] == {'plugin': self.metadata, 'table': {'sides': 6}}
        await self.config.set('table.color', 'green')
        await ctx.update_own_config({'table': {'sides': 8}})
        assert (await ctx.get_own_effective_config())['config'] == await self.config.dump()
        assert (await self.config.dump())['table'] == {'sides': 8, 'color': 'green'}
        assert (await ctx.get_own_base_config())['config']['table'] == {'sides': 6}
        assert await ctx.finish(data=1) == 1
        part = await ctx.images.upload(b'GIF8-', timeout=8.0)
        assert part == {'type': 'image', 'data': b'GIF8-', 'mime': 'image/gif'}
        assert self.push_message(source='dice', parts=[part])['submitted']
        await ctx.run_progress(progress=0.5)
        await ctx.export_push_text_async(text='x')
        ctx.run_update_sync(progress=1.0)
    """
    folder = _folder(tmp_path, body=body)
    (folder / "config.example.toml").write_text("[table]\nsides = 6\n")
    assert check(folder, NEKO).runs
    assert await _rolls(folder) == 6


HELPER = "class Helper:\n    def __init__(self, bus): self.bus = bus\n"


@pytest.mark.parametrize(
    "line",
    [
        *("self.helper = Helper(self.bus)", "self.helper = Helper(ctx.bus)", "self.helper = Helper(bus=self.ctx.bus)"),
        *("self.helper = Helper(self.plugins)", "self.helper = Helper([self.memory, self.db, self.state])"),
        "self.helper = Helper(self.bus if self.bus else None)",
        "self.helper = Helper(self.bus or self.system_info)",
    ],
)
async def test_what_is_only_handed_on_stops_nothing(tmp_path: Path, line: str) -> None:
    body = f"def __init__(self, ctx):\n    super().__init__(ctx)\n    {line}\n"
    folder = _folder(tmp_path, head=PIPS + HELPER, body=body)
    assert check(folder, NEKO).runs
    assert await _rolls(folder) == 6


@pytest.mark.parametrize(
    "line",
    [
        *("self.bus.messages.get()", "self.bus()", "self.bus['events']", "list(self.bus)", "await self.bus"),
        *(
            "async with self.bus: pass",
            "for each in self.bus: ...",
            "len(self.memory)",
            "await self.plugins.call_entry('a:b')",
        ),
    ],
)
async def test_its_use_raises_and_says_what_to_do(tmp_path: Path, line: str) -> None:
    body = f"@lifecycle(id='startup')\nasync def begin(self, **_):\n    {line}\n"
    folder = _folder(tmp_path, body=body)
    assert not check(folder, NEKO).runs
    with pytest.raises(SetupError, match=r"toolbus has no self\.\w+: in N\.E\.K\.O\. it "):
        await _rolls(folder)


NOTIFIES = ("_notify_static_ui_registered({})", "_notify_list_actions_updated([])", "_notify_host_comm({'type': 'X'})")


@pytest.mark.parametrize("call", [*NOTIFIES, "_notify_dynamic_entry_unregistered('x')"])
async def test_a_notice_to_its_windows_has_no_effect_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    body = f"@lifecycle(id='startup')\nasync def begin(self, **_):\n    self.{call}\n    self.{call}\n"
    folder = _folder(tmp_path, body=body)
    assert check(folder, NEKO).runs
    with caplog.at_level(logging.WARNING):
        assert await _rolls(folder) == 6
    assert caplog.text.count(f"{call.partition('(')[0]}() has no effect") == 1


@pytest.mark.parametrize("module", list(SDK_NAMES))
def test_every_public_name_of_the_sdk_is_imported(module: str) -> None:
    undo = use_sdk()
    try:
        for name in SDK_NAMES[module]:
            space: dict[str, object] = {}
            exec(f"from {module} import {name}", space)
            assert name in space
    finally:
        undo()


def test_a_module_named_like_a_decorator_does_not_hide_it() -> None:
    undo = use_sdk()
    try:
        exec("import plugin.sdk.plugin.llm_tool\nfrom plugin.sdk.plugin import llm_tool\n@llm_tool\ndef f(): ...", {})
        exec("import plugin.sdk.plugin.ui\nfrom plugin.sdk.plugin import ui\n@ui.action()\ndef f(): ...", {})
    finally:
        undo()


async def test_texts_of_a_folder_are_loaded_by_its_own_path(tmp_path: Path) -> None:
    head = PIPS + (
        "from pathlib import Path\nfrom plugin.sdk.shared.i18n import load_plugin_i18n_from_dir\n"
        "TEXTS = load_plugin_i18n_from_dir(Path(__file__).parent / 'i18n', default_locale='zh-CN')\n"
        "assert TEXTS.t('die', sides=6) == '骰子 6'\n"
    )
    folder = _folder(tmp_path, head=head)
    (folder / "i18n").mkdir()
    (folder / "i18n" / "zh-CN.json").write_text('{"die": "骰子 {sides}"}', encoding="utf-8")
    (folder / "i18n" / "en.json").write_text("[", encoding="utf-8")
    assert check(folder, NEKO).runs
    assert await _rolls(folder) == 6


@pytest.mark.parametrize(
    ("head", "body", "entry"),
    [
        ("from plugins.dice.none import PIPS\n", "", "plugins.dice:Dice"),
        ("from plugin.plugins.dice.none import PIPS\n", "", "plugins.dice:Dice"),
        ("from .none import PIPS\n", "", "plugins.dice:Dice"),
        (PIPS, "def __init__(self, ctx):\n    super().__init__(ctx)\n    self._prepare()\n", "plugins.dice:Dice"),
        (PIPS, "", "plugins.dice.none:Dice"),
        (PIPS, "", "plugins.dice:None_"),
        ("from plugins.none import PIPS\n", "", "plugins.dice:Dice"),
        ("from ..none import PIPS\n", "", "plugins.dice:Dice"),
        ("import plugin.sdk.plugin as sdk\nPIPS = sdk.none\n", "", "plugins.dice:Dice"),
        (f"{PIPS}class Other: ...\n", "", "plugins.dice:Other"),
        (f"{PIPS}def other(ctx): ...\n", "", "plugins.dice:other"),
        (PIPS, "@llm_tool(name='more')\nasync def more(self, *sides: int): ...\n", "plugins.dice:Dice"),
        (PIPS, "@llm_tool(name='more')\nasync def more(self, sides: int, /): ...\n", "plugins.dice:Dice"),
        (PIPS, "def __init__(self, ctx):\n    super().__init__(ctx)\n    self.x = ctx.none\n", "plugins.dice:Dice"),
    ],
)
async def test_what_does_not_start_is_not_said_to_run(tmp_path: Path, head: str, body: str, entry: str) -> None:
    folder = _folder(tmp_path, head=head, body=body, entry=entry)
    assert not check(folder, NEKO).runs
    with pytest.raises(SetupError):
        await _rolls(folder)
