"""Files in JavaScript: those of a Synchronet BBS, which share a scope, and extensions of Spindle, each with its own."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.dropin.loaded_files import call, names, skipped, write
from tests.support.waiting import until
from toolbus.dropin import Loaded
from toolbus.dropin.javascript import EngineLimits
from toolbus.dropin.script_group import ScriptGroup
from toolbus.functions.call_context import ContextMessage
from toolbus.functions.tool_spec import ToolSpec
from toolbus.sdk import CallContext, GenerationRequest, Host, Plugin, ToolScope
from toolbus.testing import running_bus
from toolbus.tool import Result

SEEDS = Path(__file__).with_name("seed_scripts")  # the examples of both systems' documents, as they are there
MEMBER = {"memberId": "m-1", "name": "Mara", "role": "Skeptic", "chance": 50}


def registration(name: str, body: str, parameters: str = "{}") -> str:
    """Returns a file that registers one tool as for Synchronet."""
    return (
        f"llm_tool_register({{name: '{name}', execute: function (args, env) {{ {body} }}, "
        f"def: {{type: 'function', function: {{name: '{name}', description: 'D.', parameters: {parameters}}}}}}})\n"
    )


def seed(*files: str) -> str:
    return "\n".join((SEEDS / file).read_text("utf-8") for file in files)


Load = Callable[..., Loaded]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    groups: list[ScriptGroup] = []

    def load(files: Mapping[str, str | bytes], **options: Any) -> Loaded:
        write(tmp_path, files)
        options.setdefault("limits", EngineLimits(turn_seconds=0.1, load_seconds=0.25))
        group = ScriptGroup(tmp_path, list(files), **options)
        groups.append(group)
        return group.load()

    yield load
    for group in groups:
        group.close()


def extension(load: Load, text: str) -> Loaded:
    return load({"kb.js": text}, is_extension=True)


# -- files of a Synchronet BBS


async def test_the_documents_example_runs_unchanged(load: Load) -> None:
    loaded = load({"my_tool.js": seed("my_tool.js")})
    (spec,) = loaded.specs
    assert (spec.tool.name, spec.tool.description) == (
        "my_tool",
        "What this tool does and exactly when to call it.",
    )
    assert spec.tool.parameters == {
        "type": "object",
        "properties": {"topic": {"type": "string", "description": "..."}},
        "required": ["topic"],
    }
    assert loaded.problems == ()
    result = await call(loaded, "my_tool", {"topic": "boards"})
    assert (result.output, result.is_error) == ({"ok": True, "answer": "..."}, False)


async def test_helpers_are_in_the_scope_of_later_files(load: Load) -> None:
    helpers = "var UNIT = 'C'; const LIMIT = 3; function warm(x) { return x > LIMIT }"
    loaded = load(
        {
            "_common.js": helpers,
            "a.js": registration("a", "return [UNIT, LIMIT, warm(args.x)]"),
            "more.js": "function later() { return 'not a helper by its name' }",
            "z.js": registration("z", "return later()"),
        }
    )
    assert loaded.problems == ()
    assert (await call(loaded, "a", {"x": 4})).output == ["C", 3, True]
    assert (await call(loaded, "z")).output == "not a helper by its name"


async def test_a_file_that_fails_is_skipped_with_its_line_and_nothing_that_it_registered_stays(load: Load) -> None:
    loaded = load(
        {
            "a.js": registration("one", "return 'first'"),
            "b.js": registration("one", "return 'broken'") + registration("two", "return 2") + "throw new Error('no')",
            "c.js": "\n\nfunction (",
            "d.js": "while (true) {}",
            "e.js": b"\xff",
            "f.js": b"'\0'",
            "g.js": registration("three", "return 3"),
        }
    )
    assert names(loaded) == ["one", "three"]
    assert (await call(loaded, "one")).output == "first"
    reasons = skipped(loaded)
    assert reasons["b.js"] == "Error: no (line 3)"
    assert reasons["c.js"] == "SyntaxError: function name expected (line 3)"
    assert reasons["d.js"].startswith("the script computed for more than 0.25 s without a pause")
    assert (reasons["e.js"], reasons["f.js"][:21]) == ("is not UTF-8 text: save it as UTF-8", "holds a NUL character")
    assert list(reasons) == ["b.js", "c.js", "d.js", "e.js", "f.js"]


async def test_a_helper_of_several_groups_offers_its_tool_in_one_of_them(tmp_path: Path) -> None:
    files = {"_a.js": registration("shared", ""), "b.js": registration("own", "")}
    write(tmp_path, files)
    for offering, tools in ((["b.js"], ["own"]), (None, ["shared", "own"])):
        group = ScriptGroup(tmp_path, list(files))
        assert names(group.load(offering=offering)) == tools
        group.close()


async def test_a_later_duplicate_wins_in_the_place_of_the_first_with_a_warning(load: Load) -> None:
    loaded = load({f"{name}.js": registration(tool, f"return '{name}'") for name, tool in ("ax", "by", "cx")})
    assert names(loaded) == ["x", "y"]
    assert (await call(loaded, "x")).output == "c"
    (problem,) = loaded.problems
    assert (problem.file, problem.skipped) == ("c.js", False)
    assert problem.reason.startswith('tool "x" registered twice (later wins): before in a.js')


@pytest.mark.parametrize(
    "spec", ["", "{}", "{name: 't'}", "{name: 't', execute: 1, def: {}}", "{execute() {}, def: {}}"]
)
def test_an_incomplete_registration_skips_its_file_with_the_known_text(load: Load, spec: str) -> None:
    reason = skipped(load({"a.js": f"llm_tool_register({spec})"}))["a.js"]
    assert reason.startswith("Error: llm_tool_register: spec needs {name, execute, def} (line ")


async def test_a_tool_that_cannot_be_offered_is_left_out_and_the_others_of_its_file_stay(load: Load) -> None:
    loaded = load({"a.js": registration("a b", "") + registration("good", "return 1")})
    assert names(loaded) == ["good"]
    (problem,) = loaded.problems
    assert problem.reason.startswith("a tool is left out: tool name 'a b'")


async def test_keys_that_mean_nothing_here_are_ignored_with_a_warning(load: Load) -> None:
    spec = "{name: 't', execute: () => 1, cache: 5, def: {type: 'function', function: {name: 't', returns: 'x'}}}"
    loaded = load({"a.js": f"llm_tool_register({spec})"})
    assert (await call(loaded, "t")).output == 1
    assert [each.reason for each in loaded.problems] == ["of tool 't' these keys are ignored: cache, returns"]


@pytest.mark.parametrize("definition", ["1", "'text'", "{function: 5}", "{function: {name: 'other'}}"])
def test_a_definition_that_is_none_leaves_its_tool_out(load: Load, definition: str) -> None:
    loaded = load({"a.js": f"llm_tool_register({{name: 't', execute() {{}}, def: {definition}}})"})
    assert loaded.specs == ()
    (problem,) = loaded.problems
    assert problem.reason.startswith("a tool is left out: tool 't': its definition ")


@pytest.mark.parametrize(
    ("body", "output", "is_error"),
    [
        ("return 'a text'", "a text", False),
        ("return [args, undefined]", [{}, None], False),
        ("", None, False),
        ("return {error: 'unknown board'}", {"error": "unknown board"}, True),
        ("throw new Error('boom')", {"error": "tool exec: Error: boom"}, True),
        ("return Promise.resolve({later: 1})", {"later": 1}, False),
    ],
)
async def test_results_and_errors_are_what_the_documents_say(
    load: Load, body: str, output: object, is_error: bool
) -> None:
    result = await call(load({"a.js": registration("t", body)}), "t")
    assert (result.output, result.is_error) == (output, is_error)


async def test_env_has_the_context_of_the_call_as_values(load: Load) -> None:
    context = CallContext(
        user_id="u-1",
        attributes={"speaker": "Ann", "level": "30", "channel": "#main"},
        member=MEMBER,
        messages=(ContextMessage("user", "hello"),),
    )
    loaded = load({"a.js": registration("t", "return [env, typeof env.bus]")})
    env, bus = (await call(loaded, "t", scope=ToolScope("c1", "t", context=context))).output
    assert bus == "undefined"
    assert (env["speaker"], env["user_id"], env["level"], env["channel"]) == ("Ann", "u-1", 30, "#main")
    assert (env["member"]["name"], env["messages"][0]["content"], env["deadline"]) == ("Mara", "hello", None)


async def test_options_of_a_tool_are_those_of_python(load: Load) -> None:
    file = "llm_tool_register({name: 't', execute() {}, min_level: 50, read_only: true, def: {description: 'D.'}})"
    (spec,) = load({"a.js": file}).specs
    assert (spec.tool.min_level, spec.tool.annotations.read_only, spec.tool.description) == (50, True, "D.")


async def test_the_harmless_functions_of_a_bbs_work(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    body = """
        load('sbbsdefs.js'); require('_common.js', 'UNIT');
        log(LOG_WARNING, 'careful'); log('plain', {a: 1}); print('printed'); printf('%d of %s', 3, 'ten');
        console.error('wrong'); log(LOG_DEBUG, 'not shown');
        return [format('%-5s|%5.1f|%03d|%x|%%', 'ab', 3.14159, 7, 255), Math.abs(time() * 1000 - Date.now()) < 2000,
                random(5) < 5];
    """
    loaded = load({"_common.js": "var UNIT = 1", "a.js": registration("t", body)})
    assert (await call(loaded, "t")).output == ["ab   |  3.1|007|ff|%", True, True]
    captured = capsys.readouterr()
    assert captured.out.splitlines() == ['plain {"a":1}', "printed", "3 of ten"]
    assert captured.err.splitlines() == ["careful", "wrong"]


@pytest.mark.parametrize(
    ("text", "named", "remedy"),
    [
        ("system.stats", "system", "`env`"),
        ("new File('x')", "File", "_data.js"),
        ("msg_area.grp", "msg_area", "`env`"),
        ("js.exec_dir", "js", "`env`"),
        ("fetch('http://x')", "fetch", "plugin"),
        ("load('other.js')", 'load("other.js")', "_common.js"),
        ("require('fs')", 'require("fs")', "_common.js"),
        ("spindle", "spindle", "a file of its own"),
        ("sleep(1)", "sleep", "setTimeout"),
    ],
)
async def test_what_is_not_there_is_named_with_what_to_use(load: Load, text: str, named: str, remedy: str) -> None:
    loaded = load({"a.js": registration("t", f"return {text}"), "b.js": f"var x = {text}"})
    error = (await call(loaded, "t")).output["error"]
    for reason in (error, skipped(loaded)["b.js"]):
        assert named in reason
        assert remedy in reason


def test_what_only_spidermonkey_reads_is_refused_with_what_to_write(load: Load) -> None:
    loaded = load({"a.js": "for each (var x in [1]) print(x)", "b.js": "\nvar o = <a/>"})
    reasons = skipped(loaded)
    assert all("SpiderMonkey" in reason for reason in reasons.values())
    assert "(line 2)" in reasons["b.js"]


async def test_a_call_without_end_is_interrupted_and_the_next_one_runs(load: Load) -> None:
    loaded = load({"a.js": registration("t", "if (args.loop) while (true) {} return 1")})
    stuck = await call(loaded, "t", {"loop": True})
    assert stuck.output["error"].startswith("tool exec: the script computed for more than 0.1 s without a pause")
    assert (await call(loaded, "t")).output == 1


# -- extensions of Spindle


KNOWLEDGE = """
async function searchMyKnowledgeBase(query, limit) {
  return [{ summary: `${query} is known` }, { summary: `limit ${limit}` }]
}
"""


async def test_the_documents_extension_runs_unchanged(load: Load) -> None:
    text = seed("search_knowledge_base.js", "tool_invocation.js") + KNOWLEDGE
    loaded = extension(load, text)
    assert loaded.problems == ()
    (spec,) = loaded.specs
    assert (spec.tool.name, spec.tool.display_name) == ("search_knowledge_base", "Search Knowledge Base")
    assert spec.tool.council_eligible
    plain = await call(loaded, "search_knowledge_base", {"query": "bells", "limit": 5})
    assert plain.output == "bells is known\nlimit 5"
    context = CallContext(member=MEMBER, messages=(ContextMessage("assistant", "hm"),))
    council = await call(
        loaded, "search_knowledge_base", {"query": "bells"}, ToolScope("c1", "search_knowledge_base", context=context)
    )
    assert council.output == "Mara (Skeptic) reports:\nbells is known\nlimit undefined"


def test_the_documents_unregistration_withdraws_the_tool(load: Load) -> None:
    assert extension(load, seed("search_knowledge_base.js", "unregister.js")).specs == ()
    assert extension(load, seed("unregister.js")).problems == ()


def answering(body: str, name: str = "t") -> str:
    return f"spindle.registerTool({{name: '{name}'}}); spindle.on('TOOL_INVOCATION', async payload => {{ {body} }})"


async def test_a_handler_gets_the_payload_of_the_documents(load: Load) -> None:
    loaded = extension(load, answering("return payload"))
    arguments = {"query": "q", "userId": "forged", "context": "forged", "nested": {"userId": "stays"}}
    context = CallContext(
        user_id="u-1",
        member=MEMBER,
        messages=(ContextMessage("system", "You are."), ContextMessage("user", "hi", "Ann")),
    )
    scope = ToolScope("c1", "t", context=context, request_id="r-1")

    payload = json.loads((await call(loaded, "t", arguments, scope)).output)
    assert (payload["toolName"], payload["requestId"]) == ("t", "r-1")
    assert payload["args"] == {"query": "q", "nested": {"userId": "stays"}, "context": "You are.\n\nuser: hi"}
    assert payload["contextMessages"] == [
        {"role": "system", "content": "You are."},
        {"role": "user", "content": "hi", "name": "Ann"},
    ]
    assert len(payload["councilMember"]) == 12
    assert payload["councilMember"] | MEMBER == payload["councilMember"]


async def test_outside_a_council_member_and_messages_are_undefined(load: Load) -> None:
    loaded = extension(load, answering("return typeof payload.councilMember + typeof payload.contextMessages"))
    assert (await call(loaded, "t")).output == "undefinedundefined"


@pytest.mark.parametrize(
    ("body", "output"),
    [("", ""), ("return null", ""), ("return 'text'", "text"), ("return 5", "5"), ("return {a: [1]}", '{"a":[1]}')],
)
async def test_nothing_is_an_empty_text_and_an_object_is_its_json(load: Load, body: str, output: str) -> None:
    assert (await call(extension(load, answering(body)), "t")).output == output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (answering("throw new Error('no such page')"), "no such page"),
        (answering("throw new Error('')"), "Tool invocation failed"),
        ("spindle.registerTool({name: 't'})", "No TOOL_INVOCATION handler registered"),
        (answering("return missing(1)"), "missing is not defined"),
    ],
)
async def test_what_a_handler_throws_is_the_error_by_its_message(load: Load, text: str, message: str) -> None:
    result = await call(extension(load, text), "t")
    assert result.error is not None
    assert (result.error.message, result.is_error) == (message, True)


async def test_of_several_handlers_each_is_called_and_the_first_answer_counts(load: Load) -> None:
    loaded = extension(
        load,
        """
        const seen = [];
        spindle.registerTool({name: 't'});
        const off = spindle.on('TOOL_INVOCATION', () => { throw new Error('taken away') });
        spindle.on('TOOL_INVOCATION', () => { seen.push('one') });
        spindle.on('TOOL_INVOCATION', async ({args}) => { seen.push('two'); return args.ask ? seen.join() : 'two' });
        spindle.on('TOOL_INVOCATION', () => { seen.push('three'); return 'three' });
        off();
        """,
    )
    assert (await call(loaded, "t")).output == "two"
    assert (await call(loaded, "t", {"ask": True})).output == "one,two,three,one,two"


async def test_what_an_extension_only_announces_has_a_warning_and_its_tools_work(load: Load) -> None:
    loaded = extension(
        load,
        answering("spindle.sendToFrontend({}); return 'works'")
        + """
        spindle.registerMacro({ name: 'm' });
        spindle.on('MESSAGE_SENT', () => {});
        spindle.oauth.onCallback(async () => {});
        spindle.onFrontendMessage(() => {})();
        """,
    )
    assert (await call(loaded, "t")).output == "works"
    announced = [problem.reason.partition(" has no effect")[0] for problem in loaded.problems]
    assert announced == [
        "spindle.registerMacro",
        'spindle.on("MESSAGE_SENT")',
        "spindle.oauth.onCallback",
        "spindle.onFrontendMessage",
    ]
    assert not any(problem.skipped for problem in loaded.problems)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("await spindle.storage.getJson('x')", "keep it in a variable"),
        ("await spindle.userStorage.write('x', 'y')", "`write` grant"),
        ("await spindle.generate.batch({})", "quiet or raw"),
        ("await spindle.cors('http://x')", "`connect` grant"),
        ("await spindle.chats.update('c', {})", "contextMessages"),
        ("new spindle.Window()", "registerTool"),
        ("await fetch('http://x')", "plugin"),
        ("await import('./other.js')", "bundle"),
    ],
)
async def test_what_an_extension_asks_for_in_vain_is_named_with_what_to_use(load: Load, text: str, remedy: str) -> None:
    result = await call(extension(load, answering(f"return {text}")), "t")
    assert result.error is not None
    assert (
        text.removeprefix("await ").removeprefix("new ").partition("(")[0] in result.error.message or "import" in text
    )
    assert remedy in result.error.message
    assert remedy in skipped(extension(load, text))["kb.js"]


async def test_an_extension_may_wait_at_its_top_level_and_is_strict(load: Load) -> None:
    loaded = extension(load, "await new Promise(done => setTimeout(done, 5)); " + answering("undeclared = 1"))
    assert names(loaded) == ["t"]
    assert "undeclared is not defined" in str((await call(loaded, "t")).error)


async def test_each_extension_has_a_scope_of_its_own(load: Load) -> None:
    one = extension(load, "globalThis.mine = 1; Object.prototype.polluted = 1;" + answering("return 'one'"))
    other = extension(load, answering("return typeof mine + typeof ({}).polluted"))
    assert [(await call(each, "t")).output for each in (one, other)] == ["one", "undefinedundefined"]


async def test_an_extension_knows_what_its_manifest_says(tmp_path: Path) -> None:
    (tmp_path / "kb").mkdir()
    write(tmp_path / "kb", {"spindle.json": '{"identifier": "lore", "version": "1.2.3"}'})
    text = answering("return spindle.manifest")
    write(tmp_path, {"kb/a.js": text, "other.js": text})
    for file, said in (("kb/a.js", '{"identifier":"lore","version":"1.2.3"}'), ("other.js", '{"identifier":"other"}')):
        group = ScriptGroup(tmp_path, [file], is_extension=True)
        assert (await call(group.load(), "t")).output == said
        group.close()


async def test_a_bad_registration_is_left_out_and_the_others_stay(load: Load) -> None:
    loaded = extension(
        load,
        "spindle.registerTool({name: 'a:b'}); spindle.registerTool(); spindle.registerTool('x'); "
        + answering("return 1"),
    )
    assert names(loaded) == ["t"]
    assert ["colon" in problem.reason for problem in loaded.problems] == [True, False, False]


async def test_permissions_tell_an_extension_what_the_bus_decides(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "kb.js": """
            const seen = [];
            spindle.permissions.onDenied(detail => { seen.push(detail) });
            spindle.permissions.onChanged(detail => { seen.push(detail) });
            """
            + answering(
                "return { seen, has: spindle.permissions.has('tools'), all: await spindle.permissions.getGranted() }"
            )
        },
    )
    group = ScriptGroup(tmp_path, ["kb.js"], is_extension=True)
    loaded = group.load()
    hooks: dict[str, Any] = {}

    class Recorder:
        def on_permission_denied(self, function: Any) -> Any:
            hooks["denied"] = function

        def on_permission_changed(self, function: Any) -> Any:
            hooks["changed"] = function

    group.attach(Recorder())  # type: ignore[arg-type]  # its two hooks are all that is used
    hooks["denied"]("tools", "attach")
    hooks["changed"]("tools", False, ())

    answer = json.loads((await call(loaded, "t")).output)
    assert answer == {
        "seen": [
            {"permission": "tools", "operation": "registerTool"},
            {"permission": "tools", "granted": False, "allGranted": []},
        ],
        "has": False,
        "all": [],
    }
    group.close()


async def test_tools_of_an_extension_come_and_go_while_it_runs(tmp_path: Path) -> None:
    body = "if (payload.args.drop) spindle.unregisterTool('t'); else spindle.registerTool({name: 'more'})"
    write(tmp_path, {"kb.js": answering(body)})
    group = ScriptGroup(tmp_path, ["kb.js"], is_extension=True)
    loaded = group.load()
    plugin = Plugin("dropin:kb.js", address="127.0.0.1:1", qualified=True)
    for spec in loaded.specs:
        plugin.add_tool(spec)
    wrapped: list[str] = []

    def wrap(spec: ToolSpec) -> ToolSpec:
        wrapped.append(spec.tool.name)
        return spec

    group.attach(plugin, wrap)
    assert (await call(loaded, "t")).output == ""
    assert [spec.tool.name for spec in plugin.tools] == ["t", "more"]
    assert wrapped == ["more"]
    assert (await call(loaded, "t", {"drop": 1})).output == ""
    assert [spec.tool.name for spec in plugin.tools] == ["more"]
    group.close()


async def test_an_extension_asks_the_model_that_a_host_lends(tmp_path: Path) -> None:
    asks = (
        "messages: [{role: 'user', content: payload.args.ask, name: 'n'}], parameters: {max_tokens: payload.args.most}"
    )
    body = f"return (await spindle.generate[payload.args.mode]({{{asks}, signal: {{}}}})).content"
    write(tmp_path, {"kb.js": answering(body)})
    group = ScriptGroup(tmp_path, ["kb.js"], is_extension=True)
    loaded = group.load()

    async def model(request: GenerationRequest) -> str:
        content = request.messages[0]["content"]
        return f"{request.mode} {request.max_tokens} {content} for {request.scope.context.user_id or 'nobody'}"

    async with running_bus(generation=("kb",)) as bus, Host(bus.grpc_addresses[0]) as host:
        await host.lend(model, max_tokens=100)
        await until(lambda: bus.core.registry.offered_by("host"), "the model")
        for source in ("kb", "other"):
            async with Plugin(source, address=bus.grpc_addresses[0]) as plugin:
                plugin.add_tool(loaded.specs[0])
                group.attach(plugin)
                await plugin.ready()
                ann = CallContext(user_id="ann")
                result = await host.call("t", {"ask": "hi", "mode": "quiet", "most": 20}, context=ann)
                if source == "other":
                    assert result.error is not None
                    assert "toolbus grant other generation" in result.error.message
                    continue
                assert result.output == "quiet 20 hi for ann"
                assert (
                    await host.call("t", {"ask": "hi", "mode": "raw", "most": 9000})
                ).output == "raw 100 hi for nobody"
    group.close()


def test_a_model_cannot_be_asked_while_an_extension_loads(load: Load) -> None:
    reason = skipped(extension(load, "await spindle.generate.quiet({messages: []})"))["kb.js"]
    assert "a model can be asked while a tool is called: move spindle.generate into the handler" in reason


async def test_a_cancelled_call_is_forgotten_and_others_go_on(load: Load) -> None:
    loaded = extension(load, answering("return payload.args.wait ? await new Promise(() => {}) : 'now'"))
    waiting: asyncio.Task[Result] = asyncio.create_task(call(loaded, "t", {"wait": 1}))
    assert (await call(loaded, "t")).output == "now"
    waiting.cancel()
    assert (await waiting).error is not None
    assert (await call(loaded, "t")).output == "now"
