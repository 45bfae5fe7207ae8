"""Tests what a plugin finds in itself: logger, configuration, store, texts, results, and what stands for what is
missing."""

import asyncio
import importlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import within
from toolbus.parts.moving.neko.absences import IGNORED, OBJECTS, RAISING
from toolbus.parts.moving.neko.plugin_base import NekoPluginBase, PluginRouter
from toolbus.parts.moving.neko.plugin_config import JsonFile, PluginConfig, PluginStore
from toolbus.parts.moving.neko.plugin_context import PluginContext, describe_message
from toolbus.parts.moving.neko.plugin_folder import use_sdk
from toolbus.parts.moving.neko.plugin_i18n import PluginI18n, tr
from toolbus.parts.moving.neko.plugin_lifecycle import start_plugin, stop_plugin, timer_interval
from toolbus.parts.moving.neko.plugin_logger import plugin_logger
from toolbus.parts.moving.neko.sdk_errors import (
    EntryConflictError,
    ModuleNotProvided,
    NotProvided,
    PluginCallError,
    ResultError,
    SdkError,
    TransportError,
    ValidationError,
)
from toolbus.parts.moving.neko.sdk_names import NAMES, OLDER_MODULES
from toolbus.parts.moving.neko.sdk_results import (
    Err,
    Ok,
    capture,
    is_err,
    is_ok,
    map_result,
    raise_for_err,
    unwrap,
    unwrap_or,
)


async def run_sync(job: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(job)


@pytest.fixture
def plugin(tmp_path: Path) -> NekoPluginBase:
    context = PluginContext("mine", plugin_logger("mine"), tmp_path, {"plugin": {"name": "Mine"}, "mine": {"n": 1}})
    return NekoPluginBase(context)


@pytest.fixture
def sdk() -> Iterator[Callable[[str], Any]]:
    undo = use_sdk()
    yield importlib.import_module
    undo()


@pytest.mark.parametrize(
    ("message", "args", "named", "logged"),
    [
        ("plain", (), {}, "plain"),
        ("100% of {this}", (), {}, "100% of {this}"),
        ("{} and {}", (1, "b"), {}, "1 and b"),
        ("{0!r} {name:>4}", ("a",), {"name": "x"}, "'a'    x"),
        ("%s took %.1f s", ("it", 2), {}, "it took 2.0 s"),
        ("%(a)s", ({"a": 1},), {}, "1"),
        ('{"json": %s}', (5,), {}, '{"json": 5}'),
        ("{} {} {}", (1,), {}, "{} {} {} 1"),
        ("nothing to fill", (1,), {"a": 2}, "nothing to fill 1 a=2"),
        ("{unknown.attribute}", (1,), {}, "{unknown.attribute} 1"),
        (ValueError("an exception"), (), {}, "an exception"),
    ],
)
def test_a_logger_takes_both_ways_of_writing_arguments(
    caplog: pytest.LogCaptureFixture, message: Any, args: tuple[Any, ...], named: dict[str, Any], logged: str
) -> None:
    plugin_logger("mine").warning(message, *args, **named)
    assert [(record.name, record.getMessage(), record.filename) for record in caplog.records] == [
        ("toolbus.plugin.mine", logged, Path(__file__).name)
    ]


def test_a_logger_has_the_methods_of_both_kinds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(1)
    logger = plugin_logger("mine", "part").bind(user="u").opt(lazy=True)
    logger.trace("t")
    logger.success("s {}", 1)
    logger.log("INFO", "i")
    with logger.contextualize(request=1):
        try:
            raise OSError("gone")
        except OSError:
            logger.exception("e {}", 2)
            logger.error("again", exc_info=True)
    assert [(each.levelno, each.getMessage(), bool(each.exc_info)) for each in caplog.records] == [
        *((5, "t", False), (25, "s 1", False), (20, "i", False), (40, "e 2", True), (40, "again", True))
    ]


async def test_configuration_is_read_by_paths_and_what_is_set_wins(tmp_path: Path) -> None:
    config = PluginConfig({"a": {"n": 1, "s": "x", "b": True}}, tmp_path / "deep" / "config.json")
    assert (await config.get("a.n"), await config.get("a.none", 7), await config.require("a.s")) == (1, 7, "x")
    assert (await config.get_int("a.n"), await config.get_bool("a.b")) == (1, True)
    assert await config.get_str("a.none") is None
    for read in (config.get_int, config.get_bool, config.get_str, config.require):
        path = {"get_int": "a.b", "get_bool": "a.n", "get_str": "a.n"}.get(read.__name__, "a.s.x")
        with pytest.raises(ValidationError, match=repr(path)):
            await read(path)
    await config.set("a.n", 2)
    assert await config.update({"a": {"s": "y"}, "c": [1]}) == {"a": {"n": 2, "s": "y", "b": True}, "c": [1]}
    assert (await config.base_get("a.n"), await config.base_dump()) == (1, {"a": {"n": 1, "s": "x", "b": True}})
    again = PluginConfig({"a": {"n": 1, "z": 0}}, tmp_path / "deep" / "config.json")
    assert await again.get("a") == {"n": 2, "z": 0, "s": "y"}
    with pytest.raises(ValidationError, match="empty part"):
        await again.set("a..b", 1)
    with pytest.raises(NotProvided, match=r"self\.config\.set"):
        await again.profile_activate("other")


async def test_the_store_keeps_json_and_answers_with_results(tmp_path: Path) -> None:
    store = PluginStore(tmp_path / "data" / "store.json")
    assert (await store.get("a")).unwrap() is None
    assert not (tmp_path / "data").exists()  # reading makes nothing
    assert (await store.set("b:1", {"äöü": [1, 2.5, None]})).is_ok()
    assert (await store.set("a", "\ud83d")).is_ok()
    with pytest.raises(TypeError):
        await store.get("a", 1, 2)  # type: ignore[call-arg]
    other = PluginStore(tmp_path / "data" / "store.json")
    assert (await other.dump()).unwrap() == {"b:1": {"äöü": [1, 2.5, None]}, "a": "\ud83d"}
    assert (await other.keys()).unwrap() == ["a", "b:1"]
    assert (await other.keys("b:")).unwrap() == ["b:1"]
    assert ((await other.exists("a")).unwrap(), (await other.count()).unwrap()) == (True, 2)
    assert ((await other.delete("a")).unwrap(), (await other.delete("a")).unwrap()) == (True, False)
    write, read = getattr(other, "_write_value"), getattr(other, "_read_value")  # noqa: B009  # as plugins call them
    write("c", [1])
    assert (read("c"), read("none", 2), getattr(other, "_delete_value")("c")) == ([1], 2, True)  # noqa: B009
    refused = await other.set("c", {1, 2})
    assert isinstance(refused, Err)
    assert isinstance(refused.error, ValidationError)
    assert (await other.set("", 1)).is_err()
    assert ((await other.clear()).unwrap(), (await other.dump()).unwrap()) == (1, {})
    assert [each.name for each in (tmp_path / "data").iterdir()] == ["store.json"]


async def test_a_broken_store_is_an_error_that_names_the_file_and_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "store.json"
    file.write_text("{broken")
    store = PluginStore(file)
    for result in (await store.get("a"), await store.set("a", 1)):
        assert isinstance(result, Err)
        assert isinstance(result.error, TransportError)
        assert f"{file} cannot be read" in str(result.error)
    assert file.read_text() == "{broken"


def test_a_change_that_fails_leaves_the_file_and_the_values_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = JsonFile(tmp_path / "values.json")
    file.change(lambda values: values.update(a=1))

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(TransportError, match="no space left"):
        file.change(lambda values: values.update(a=2))
    monkeypatch.undo()
    assert file.read(dict) == {"a": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["values.json"]


def test_changes_from_many_threads_are_all_kept(tmp_path: Path) -> None:
    file = JsonFile(tmp_path / "values.json")
    threads = [
        threading.Thread(target=lambda key=key: file.change(lambda values: values.update({key: 1})))
        for key in map(str, range(16))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(JsonFile(tmp_path / "values.json").read(dict)) == 16


def test_texts_are_found_in_the_language_that_is_nearest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "i18n").mkdir()
    (tmp_path / "i18n" / "en.json").write_text('{"hello": "Hello {name}", "only": "English"}')
    (tmp_path / "i18n" / "zh-CN.json").write_text('{"hello": "你好 {{ name }}"}', encoding="utf-8")
    (tmp_path / "i18n" / "fr.json").write_text("{")
    texts = PluginI18n.of_folder(tmp_path)
    assert texts.t("hello", locale="zh-CN", name="A") == "你好 A"
    assert texts.t("hello", locale="de-AT", name="A") == "Hello A"
    assert texts.t("only", locale="zh-CN") == "English"
    assert (texts.t("none"), texts.t("none", default="D {x}", x=1)) == ("none", "D 1")
    assert texts.resolve([{"label": tr("hello", name="B")}, tr("none", default="d")]) == [{"label": "Hello B"}, "d"]
    assert "fr.json cannot be read" in caplog.text
    with pytest.raises(ValueError, match="not empty"):
        tr(" ")


def test_results_have_the_methods_that_plugins_call() -> None:
    good: Ok[int] = Ok(1)
    bad: Err[Any] = Err(SdkError("no", code="NO", place="here"))
    assert (good.is_ok(), good.unwrap(), good.unwrap_or(2), good.map(str)) == (True, 1, 1, Ok("1"))
    assert (bad.is_err(), bad.unwrap_or(2), bad.map(str)) == (True, 2, bad)
    assert (bad.error.code, bad.error.place, unwrap_or(bad, 3), unwrap(good)) == ("NO", "here", 3, 1)
    assert bad.map_err(str) == Err("no")
    assert (good.is_err(), good.value_or_none(), good.map_err(str)) == (False, 1, good)
    assert (bad.is_ok(), bad.err(), bad.bind(str)) == (False, bad.error, bad)
    assert (is_ok(good), is_err(good), is_ok(bad), is_err(bad)) == (True, False, False, True)
    assert (map_result(good, str), map_result(bad, str)) == (Ok("1"), bad)
    assert (good.bind(lambda value: Ok(value + 1)), capture(lambda: 5), capture(lambda: [][0]).is_err()) == (
        *(Ok(2), Ok(5), True),
    )
    good.raise_for_err()
    raise_for_err(good)
    with pytest.raises(SdkError, match="no"):
        bad.raise_for_err()
    with pytest.raises(ResultError, match="text"):
        Err("text").unwrap()
    match good:
        case Ok(value):
            assert value == 1


def test_every_absence_raises_with_its_purpose_and_its_remedy_and_getattr_takes_its_default(
    plugin: NekoPluginBase,
) -> None:
    for name, absence in RAISING.items():
        for owner in (plugin, plugin.ctx):
            with pytest.raises(NotProvided) as caught:
                getattr(owner, name).anything  # noqa: B018  # an object raises when it is used, a method before
            assert f"self.{name}" in str(caught.value)
            assert absence.purpose in str(caught.value)
            assert absence.remedy in str(caught.value)
            assert (getattr(owner, name, "default") == "default") is (name not in OBJECTS)
            assert name not in OBJECTS or not getattr(owner, name)
            assert getattr(getattr(owner, name, None), "anything", "default") == "default"
    with pytest.raises(AttributeError, match="'NekoPluginBase' object has no attribute 'typo'"):
        plugin.typo  # noqa: B018


async def test_every_method_without_effect_returns_and_says_so_once(
    plugin: NekoPluginBase, caplog: pytest.LogCaptureFixture
) -> None:
    for name, ignored in IGNORED.items():
        for _ in range(2):
            returned = getattr(plugin, name)("anything", key=1)
            if ignored.awaited:
                returned = await returned
            assert returned == (list(ignored.returns) if isinstance(ignored.returns, tuple) else ignored.returns)
    assert len(caplog.records) == len(IGNORED)
    assert all(ignored.reason in caplog.text for ignored in IGNORED.values())


async def test_a_plugin_finds_its_folders_and_the_rest_in_itself(plugin: NekoPluginBase, tmp_path: Path) -> None:
    assert (plugin.plugin_id, plugin.plugin_dir, plugin.config_dir) == ("mine", tmp_path, tmp_path)
    assert plugin.data_path("a", "b.txt") == tmp_path / "data" / "a" / "b.txt"
    assert plugin.cache_path("c") == tmp_path / "data" / "cache" / "c"
    assert (tmp_path / "data" / "cache").is_dir()
    assert (plugin.metadata, plugin.storage_dir) == ({"name": "Mine"}, tmp_path / "data")
    assert plugin.runtime_config_path == tmp_path / "plugin.toml"
    assert await plugin.config.dump() == {"plugin": {"name": "Mine"}, "mine": {"n": 1}}
    assert plugin.logger is plugin.ctx.logger is plugin.sdk_logger is plugin.enable_file_logging(log_level="DEBUG")
    assert plugin.setup_logger(suffix="x").logger.name == plugin.logger_component("x") == "toolbus.plugin.mine.x"
    assert (
        await plugin.finish(data=1),
        await plugin.finish(data=1, message="m"),
        await plugin.finish(message="m"),
    ) == (*(1, {"message": "m", "data": 1}, "m"),)
    assert plugin.get_input_schema() == {}


def test_a_plugin_may_replace_what_it_finds_in_itself(plugin: NekoPluginBase) -> None:
    for name in ("logger", "file_logger", "sdk_logger", "config", "store", "i18n", "db", "state", "plugins", "bus"):
        setattr(plugin, name, name)
        assert getattr(plugin, name) == name
    for name in ("outlet", "context", "_context", "_send", "_tools", "_waiting"):
        setattr(plugin, name, None)
    assert plugin.push_message(content="still sent") == {"submitted": True}
    plugin.ctx.push_message = lambda **message: message
    assert plugin.push_message(text="wrapped") == {"text": "wrapped"}


def test_a_plugin_made_without_a_context_has_a_logger_and_a_store(tmp_path: Path) -> None:
    class Sent:
        plugin_id = "sent"
        config_path = str(tmp_path / "plugin.toml")

        def push_message(self, **message: Any) -> Any:
            return message

    made = NekoPluginBase(Sent())
    assert (made.plugin_id, made.data_path(), made.push_message(text="a")) == ("sent", tmp_path / "data", {"text": "a"})
    assert NekoPluginBase().logger.logger.name == "toolbus.plugin.NekoPluginBase"


def test_a_router_reaches_its_plugin(plugin: NekoPluginBase) -> None:
    router = PluginRouter(prefix="a_", tags=["t"], name="pages")
    with pytest.raises(PluginCallError, match="include_router"):
        router.store  # noqa: B018
    plugin.include_router(router, prefix="b_")
    assert (router.main_plugin, router.logger, router.store) == (plugin, plugin.logger, plugin.store)
    assert (router.plugin_id, router.prefix, router.is_bound) == ("mine", "b_", True)
    assert (router.get_dependency("i18n"), router.get_plugin_attr("none", 1)) == (plugin.i18n, 1)
    assert (plugin.list_routers(), plugin.get_router("pages")) == (["pages"], router)
    assert (plugin.exclude_router("pages"), plugin.exclude_router(router)) == (True, False)
    with pytest.raises(AttributeError, match="no attribute 'typo'"):
        router.typo  # noqa: B018


async def test_a_timer_runs_again_after_a_failure_and_ends_with_its_plugin() -> None:
    class Ticking(NekoPluginBase):
        def __init__(self) -> None:
            super().__init__()
            self.runs = 0
            self.third = asyncio.Event()

        @timer_interval(id="a", seconds=0.001)
        async def tick(self, **_: Any) -> None:
            self.runs += 1
            if self.runs >= 3:
                self.third.set()
            raise OSError("not now")

        @timer_interval(id="b", seconds=0.001, auto_start=False)
        def never(self) -> None:
            raise AssertionError

    made = Ticking()
    await start_plugin(made, run_sync)
    await within(made.third.wait())
    await stop_plugin(made, run_sync)
    await asyncio.sleep(0)  # the cancelled task ends
    runs = made.runs
    await asyncio.sleep(0.01)
    assert made.runs == runs
    with pytest.raises(ValueError, match="more than 0"):
        timer_interval(seconds=0)


@pytest.mark.parametrize(
    "module",
    [
        *("plugin.sdk", "plugin.sdk.plugin", "plugin.sdk.plugin.base", "plugin.sdk.shared.core.router"),
        *("plugin.sdk.shared.models", "plugin.sdk.shared.models.exceptions", "plugin.sdk.decorators"),
        "plugin.logging_config",
    ],
)
def test_every_module_of_the_sdk_has_every_name(sdk: Callable[[str], Any], module: str) -> None:
    imported = sdk(module)
    others = [name for name in NAMES if getattr(imported, name, None) is not NAMES[name]]
    assert others == (["NekoPluginBase"] if module in OLDER_MODULES else [])
    assert issubclass(imported.NekoPluginBase, NekoPluginBase)


def test_what_only_that_system_has_says_what_to_use_when_it_is_imported_or_used(sdk: Callable[[str], Any]) -> None:
    module = sdk("plugin.sdk.plugin")
    with pytest.raises(ImportError, match=r"no plugin\.sdk\.plugin\.Unheard.*Remove the import"):
        module.Unheard  # noqa: B018
    for name in ("plugin.server.runtime", "plugin.core.context", "utils.logger_config", "main_logic.tool_calling"):
        with pytest.raises(ModuleNotProvided, match=r"toolbus has no (plugin|utils|main_logic)"):
            sdk(name)
    with pytest.raises(ModuleNotProvided, match=r"toolbus\.tools has ToolDefinition"):
        sdk("main_logic.tool_calling")
    with pytest.raises(NotProvided, match="searches the memories"):
        module.MemoryClient(None)
    with pytest.raises(NotProvided, match=r"Plugins\.list"):
        module.Plugins.list  # noqa: B018

    derived = type("Derived", (module.NekoAdapterPlugin,), {"__annotations__": {"memory": module.MemoryClient | None}})
    with pytest.raises(NotProvided, match="turns another protocol"):  # not before
        derived(None)


def test_the_finder_goes_when_its_user_goes(sdk: Callable[[str], Any]) -> None:
    undo = use_sdk()
    sdk("plugin.sdk.plugin")
    undo()
    undo()


async def test_the_base_class_of_older_plugins_has_a_store_that_answers_at_once(
    sdk: Callable[[str], Any], tmp_path: Path
) -> None:
    context = PluginContext("older", plugin_logger("older"), tmp_path, {"a": {"n": 1}})
    older = sdk("plugin.sdk.base").NekoPluginBase(context)
    older.store.set("b", [1])
    older.store.set("a", None)
    assert (older.store.get("b"), older.store.get("none", 2), older.store.keys("b")) == ([1], 2, ["b"])
    assert (older.store.exists("a"), older.store.count(), older.store.delete("a")) == (True, 2, True)
    assert (await PluginStore(tmp_path / "data" / "store.json").dump()).unwrap() == {"b": [1]}
    assert (older.store.clear(), older.store.dump()) == (1, {})
    with pytest.raises(ValidationError, match="not empty"):
        older.store.set("", 1)
    assert await older.config.dump(timeout=5.0) == {"a": {"n": 1}}
    assert await asyncio.to_thread(lambda: older.config.get("a.n")) == 1  # where no loop runs
    with pytest.raises(NotProvided):
        older.config.profile_list()


def test_typed_settings_are_those_of_pydantic(sdk: Callable[[str], Any]) -> None:
    module = sdk("plugin.sdk.plugin")

    field = module.SettingsField(default=30, hot=True, description="How long.")
    settings: Any = type("Settings", (module.PluginSettings,), {"__annotations__": {"seconds": int}, "seconds": field})
    assert settings.model_validate({"unknown": 1}).seconds == 30


def test_a_conflict_is_an_error_of_both_systems() -> None:
    assert issubclass(EntryConflictError, SdkError)
    assert "unregister_llm_tool('a')" in str(EntryConflictError("a"))


def test_a_message_becomes_a_text_and_the_rest_of_it_data() -> None:
    text, data = describe_message(
        {
            "visibility": ["chat"],
            "ai_behavior": "read",
            "wants": "context",
            "parts": [
                {"type": "text", "text": "one"},
                {"type": "image", "data": b"png", "mime": "image/png"},
                {"type": "text", "text": "two"},
                {"type": "audio", "data": bytes(200_000)},
            ],
            "metadata": {"a": 1},
            "priority": 0,
        }
    )
    assert text == "one\ntwo"
    assert data == {
        "metadata": {"a": 1},
        "visibility": ["chat"],
        "ai_behavior": "read",
        "wants": "context",
        "parts": [
            {"type": "image", "mime": "image/png", "binary_base64": "cG5n"},
            {"type": "audio", "omitted_bytes": 200_000},
        ],
    }


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"message_type": "text", "content": "older", "description": "d"}, "older"),
        ({"description": "only this"}, "only this"),
        ({"binary_url": "http://a/b", "mime": "audio/ogg"}, "[audio]"),
        ({"binary_data": b"x"}, "[image]"),
        ({"parts": "wrong"}, "[no text]"),
        ({}, "[no text]"),
    ],
)
def test_a_message_of_an_older_version_or_without_a_text_has_one(message: dict[str, Any], text: str) -> None:
    assert describe_message(message)[0] == text


async def test_a_plugin_that_reads_its_configuration_by_its_context_gets_the_file_as_it_is_now(tmp_path: Path) -> None:
    read = iter([{"weather": {"city": "Rome"}}])
    ctx = PluginContext("p", plugin_logger("p"), tmp_path, {"weather": {"city": "Oslo"}}, read=lambda: next(read))
    assert (await ctx.get_own_config())["config"]["weather"] == {"city": "Oslo"}
    assert ctx.reload() == ({"weather": {"city": "Oslo"}}, {"weather": {"city": "Rome"}})
    assert (await ctx.get_own_config())["config"]["weather"] == {"city": "Rome"}


def test_messages_wait_for_the_connection_and_no_longer(plugin: NekoPluginBase) -> None:
    sent: list[str] = []
    for number in range(40):
        answer = plugin.push_message(parts=[{"type": "text", "text": str(number)}])
    assert answer == {"submitted": False, "reason": "backpressure"}
    plugin.__toolbus_lifecycle__.connected(lambda text, data: sent.append(text))
    assert sent == [str(number) for number in range(32)]
    assert plugin.ctx.push_message(content="later") == {"submitted": True}
    assert sent[-1] == "later"
