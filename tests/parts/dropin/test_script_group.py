"""Files in JavaScript: those of a Synchronet BBS, which share a scope, and extensions of Spindle, each with its own."""

# ruff: noqa: F401, F811  # fixtures are imported and requested by name

from pathlib import Path

import pytest

from tests.parts.dropin.loaded_files import call, names, skipped, write
from tests.parts.dropin.script_cases import MEMBER, Load, load, seed
from toolbus.functions.call_context import ContextMessage
from toolbus.parts.dropin.script_group import ScriptGroup
from toolbus.sdk import CallContext, ToolScope


def registration(name: str, body: str, parameters: str = "{}") -> str:
    """Returns a file that registers one tool as for Synchronet."""
    return (
        f"llm_tool_register({{name: '{name}', execute: function (args, env) {{ {body} }}, "
        f"def: {{type: 'function', function: {{name: '{name}', description: 'D.', parameters: {parameters}}}}}}})\n"
    )


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


def test_a_file_that_computes_without_end_takes_no_waiting_time_from_the_next_one(load: Load) -> None:
    tool = 'llm_tool_register({name: "fine", def: {description: "d", parameters: {}}, execute: () => "fine"});'
    loaded = load({"a.js": "while (true) {}", "b.js": tool}, wait_seconds=0.01)
    assert [spec.tool.name for spec in loaded.specs] == ["fine"]
    assert [problem.file for problem in loaded.problems] == ["a.js"]
    assert loaded.problems[0].reason.startswith("the script computed for more than 0.25 s")


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
        ("new File('x')", "File", "var DATA"),
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


async def test_the_log_names_the_file_of_a_tool_that_fails(load: Load, caplog: pytest.LogCaptureFixture) -> None:
    loaded = load({"a.js": registration("fine", "return 1"), "b.js": registration("hard", "throw new Error('kaput')")})
    await call(loaded, "hard", {})
    assert "tool hard of b.js failed: Error: kaput" in caplog.text


def test_the_entry_of_an_extension_that_is_not_built_is_named_as_missing(tmp_path: Path) -> None:
    group = ScriptGroup(tmp_path, ["kb/dist/backend.js"], is_extension=True)
    try:
        assert "is not there: build the extension" in skipped(group.load())["kb/dist/backend.js"]
    finally:
        group.close()
