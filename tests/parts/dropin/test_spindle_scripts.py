# ruff: noqa: F401, F811  # fixtures are imported and requested by name

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.parts.dropin.loaded_files import call, names, skipped, write
from tests.parts.dropin.script_cases import MEMBER, Load, load, seed
from tests.support.waiting import until
from toolbus.dropin import Loaded
from toolbus.functions.call_context import ContextMessage
from toolbus.functions.tool_spec import ToolSpec
from toolbus.parts.dropin.script_group import ScriptGroup
from toolbus.protocol.tool import Result
from toolbus.sdk import CallContext, GenerationRequest, Host, Plugin, ToolScope
from toolbus.testing import running_bus


def extension(load: Load, text: str) -> Loaded:
    return load({"kb.js": text}, is_extension=True)


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
        spindle.toast?.success?.('loaded'); spindle.commands.register([]);
        spindle.on('MESSAGE_SENT', () => {});
        spindle.oauth.onCallback(async () => {});
        spindle.onFrontendMessage(() => {})();
        """,
    )
    assert (await call(loaded, "t")).output == "works"
    announced = [problem.reason.partition(" has no effect")[0] for problem in loaded.problems]
    assert announced == [
        "spindle.registerMacro",
        "spindle.toast.success",
        "spindle.commands.register",
        'spindle.on("MESSAGE_SENT")',
        "spindle.oauth.onCallback",
        "spindle.onFrontendMessage",
    ]
    assert not any(problem.skipped for problem in loaded.problems)


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        ("await spindle.generate.batch({})", "quiet or raw"),
        ("await spindle.chats.update('c', {})", "contextMessages"),
        ("new spindle.Window()", "registerTool"),
        ("await new WebSocket('http://x')", "plugin"),
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
    for file, manifest in (
        ("kb/a.js", '{"identifier":"lore","version":"1.2.3"}'),
        ("other.js", '{"identifier":"other"}'),
    ):
        group = ScriptGroup(tmp_path, [file], is_extension=True)
        assert (await call(group.load(), "t")).output == manifest
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
        for source in ("kb", "other"):
            async with Plugin(source, address=bus.grpc_addresses[0]) as plugin:
                plugin.add_tool(loaded.specs[0])
                group.attach(plugin)
                await plugin.ready()
                ann = CallContext(user_id="ann")
                result = await host.call("t", {"ask": "hi", "mode": "quiet", "most": 20}, context=ann)
                if source == "other":
                    assert result.error is not None
                    assert "toolbus access grant other generation" in result.error.message
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
