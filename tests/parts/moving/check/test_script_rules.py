"""`dev check --from synchronet` and `--from spindle`: each rule finds its line, and what runs has no finding."""

from pathlib import Path

import pytest

from toolbus.parts.moving.check.source_file import Effect, Report, System, check
from toolbus.parts.moving.check.spindle_rules import SPINDLE
from toolbus.parts.moving.check.synchronet_rules import SYNCHRONET

STOPS, DIFFERS, NOTE = Effect.STOPS, Effect.DIFFERS, Effect.NOTE
SEEDS = Path(__file__).parents[2] / "dropin" / "seed_scripts"
TOOL = "\nspindle.registerTool({name: 't'})"


def _checked(folder: Path, system: System, text: str) -> Report:
    (folder / "a.js").write_text(f"// a comment\n{text}\n")
    return check(folder / "a.js", system)


def test_the_documents_examples_have_nothing_to_change() -> None:
    assert check(SEEDS / "my_tool.js", SYNCHRONET).findings == ()
    assert check(SEEDS / "search_knowledge_base.js", SPINDLE).findings == ()


@pytest.mark.parametrize(
    ("text", "effect", "what", "remedy"),
    [
        ("var a = system.stats", STOPS, "uses system,", "`env`"),
        ("var f = new File('x')", STOPS, "uses File,", "var DATA"),
        ("var a = = 1", STOPS, "is not valid: ", "Correct the file"),
        ("llm_tool_register({ name: 'a b' })", STOPS, "the tool name 'a b' breaks", "Rename it"),
        ("msg_area.grp[0]", STOPS, "uses msg_area,", "`env`"),
        ("js.exec_dir", STOPS, "uses js,", "`env`"),
        ("fetch('http://x')", STOPS, "uses fetch,", "plugin"),
        ("load('other.js')", STOPS, "loads other.js", "_common.js"),
        ('require("http.js", "HTTPRequest")', STOPS, "loads http.js", "_common.js"),
        ("load(system_dir + name)", STOPS, "loads a file", "_common.js"),
        ("if (typeof system !== 'undefined') a = system.name", DIFFERS, "uses system,", "`env`"),
        ("var a = typeof File === 'function' ? new File('x') : null", DIFFERS, "uses File,", "var DATA"),
        ("try { a = { b: { c: system.name } } } catch (e) { a = null }", DIFFERS, "; the code goes on", "`env`"),
        ("try { a = new File('x') } catch { if (b) { a = 1 } }", DIFFERS, "; the code goes on", "var DATA"),
        ("try { a = system.name } catch (e) { if (b) { throw e } }", STOPS, "uses system,", "`env`"),
        ("try { a = 1 } catch (e) { a = system.name }", STOPS, "uses system,", "`env`"),
        ("try { a = 1 } finally { a = 2 } a = system.name", STOPS, "uses system,", "`env`"),
        ("var x = typeof systems; system.name", STOPS, "uses system,", "`env`"),
        ("for each (var x in y) print(x)", STOPS, "SpiderMonkey", "for (var x of list)"),
        ("try { a() } catch (e if e.b) { }", STOPS, "SpiderMonkey", "catch (error)"),
        (
            "llm_tool_register({ name: 'a', execute: f, def: { function: { name: 'b', parameters: {} } } })",
            STOPS,
            "is called 'a' and, in its definition, 'b'",
            "same name",
        ),
        (
            "llm_tool_register({ execute: function (a) { return { name: 'a' }; }, def: { name: 'b' }, 'name': 'a' })",
            STOPS,
            "is called 'a' and, in its definition, 'b'",
            "same name",
        ),
    ],
)
def test_each_rule_for_synchronet_finds_its_line(
    tmp_path: Path, text: str, effect: Effect, what: str, remedy: str
) -> None:
    (found,) = _checked(tmp_path, SYNCHRONET, text).findings
    assert (found.effect, found.line) == (effect, 2)
    assert what in found.what
    assert remedy in found.remedy


@pytest.mark.parametrize(
    "text",
    [
        "// system.stats, new File('x')",
        "/* load('other.js')\n for each (var x in y) */ var s = 'system.stats', r = /system.x'/, t = `fetch(${1})`;",
        "load('sbbsdefs.js'); load('a.js'); var a = env.system.x, b = { fetch: 1 };",
        "function f(user) { return user.name } var client = {}; client.a = 1; (server => server.x)({})",
        "llm_tool_register({ name: 'a', execute: f, def: { function: { name: 'a', parameters: "
        "{ properties: { x: { name: 'b' } } } } } })",
        "llm_tool_register({ name: 'a', execute: function (args) { return { name: 'x' }; }, def: { name: 'a' } })",
        "llm_tool_register({ execute: f, 'def': { 'type': 'function', 'function': { 'name': 'a', 'parameters': "
        "{ properties: { name: { type: 'string' } } } } }, 'name': 'a' })",
        "llm_tool_register({ name: 'a', execute: f, def: { function: { name: 'a' } } }); var t = [{ name: 'q' }];",
        "var NAME = 'a'; llm_tool_register({ name: NAME, execute: f, def: { name: NAME, x: [{ name: 'z' }] } })",
        "llm_tool_register({ name: 'a', env: [{ name: 'b' }], execute: function () { var o = {}; o.name = 'c'; },"
        " def: makeDef({ name: 'd' }) })",
    ],
)
def test_what_works_for_synchronet_is_not_found(tmp_path: Path, text: str) -> None:
    assert _checked(tmp_path, SYNCHRONET, text).findings == ()


def test_names_that_a_helper_declares_are_there_and_the_order_of_files_is_compared(tmp_path: Path) -> None:
    (tmp_path / "_common.js").write_text("var system = { stats: 1 }")
    (tmp_path / "B.js").write_text("system.stats")
    (found,) = check(tmp_path, SYNCHRONET).findings
    assert (found.path.name, found.effect) == ("B.js", DIFFERS)
    assert "loads after the helpers here" in found.what


@pytest.mark.parametrize(
    ("text", "effect", "what", "remedy"),
    [
        ("spindle.registerMacro({})", DIFFERS, "spindle.registerMacro has no effect", "tools of the extension work"),
        ("spindle.oauth.onCallback(f)", DIFFERS, "spindle.oauth.onCallback has no effect", "work"),
        ("spindle.on('MESSAGE_SENT', f)", DIFFERS, "the event MESSAGE_SENT, which never comes", "work"),
        ("await spindle.storage.getJson('x')", DIFFERS, "spindle.storage.getJson needs a grant", '{"write": ["/a/'),
        (
            "await spindle.cors('http://x')",
            DIFFERS,
            "spindle.cors needs a grant",
            '{"connect": ["api.example.org:443"]}',
        ),
        ("await fetch('http://x')", DIFFERS, "fetch needs a grant", '{"connect": ["api.example.org:443"]}'),
        ("spindle.toast?.success?.('x')", DIFFERS, "spindle.toast.success has no effect", "work"),
        ("spindle.commands.onInvoked(f)", DIFFERS, "spindle.commands.onInvoked has no effect", "work"),
        ("await spindle.enclave.put('a', 'b')", STOPS, "spindle.enclave.put throws", "operator sets secrets"),
        ("await spindle.enclave.delete('a')", STOPS, "spindle.enclave.delete throws", "operator sets secrets"),
        ("try { await spindle.memories.list() } catch { f() }", DIFFERS, "throws an error; the code goes", "context"),
        (
            "if (typeof Buffer === 'function') Buffer.from('x')",
            DIFFERS,
            "uses Buffer, which does not exist here",
            "atob",
        ),
        ("spindle . generate\n.batch({})", STOPS, "spindle.generate.batch throws", "quiet or raw"),
        ("await spindle.chats?.update(1)", STOPS, "spindle.chats.update throws", "contextMessages"),
        ("import { x } from './y.js'", STOPS, "imports another file", "Each file is complete"),
        ("const y = await import('./y.js')", STOPS, "imports another file", "Each file is complete"),
        ("Buffer.from('x')", STOPS, "uses Buffer", "Uint8Array"),
        ("new Headers()", STOPS, "uses Headers", "plain objects"),
        ("await f( }", STOPS, "is not valid: ", "Correct the file"),
        ("spindle.registerTool({ name: 'a:b' })", STOPS, "the tool name 'a:b' breaks", "Rename it"),
    ],
)
def test_each_rule_for_spindle_finds_its_line(
    tmp_path: Path, text: str, effect: Effect, what: str, remedy: str
) -> None:
    (found,) = _checked(tmp_path, SPINDLE, text + TOOL).findings
    assert (found.effect, found.line) == (effect, 2)
    assert what in found.what
    assert remedy in found.remedy


def test_the_remedies_for_an_extension_name_no_helper_files(tmp_path: Path) -> None:
    (tmp_path / "_common.js").write_text("function fetch() {}")
    findings = _checked(tmp_path, SPINDLE, "import { x } from './y.js'\nnew File('x')\nfetch('y')" + TOOL).findings
    assert sorted(each.line for each in findings if each.effect is STOPS) == [2, 3]
    assert not [
        each for each in findings if "helper" in each.remedy or "_" in each.remedy.replace("_manifest.json", "")
    ]


def test_a_script_may_begin_with_the_name_of_its_interpreter(tmp_path: Path) -> None:
    (tmp_path / "a.js").write_text("#!/sbbs/exec/jsexec\nvar a = 1;\n")
    assert check(tmp_path / "a.js", SYNCHRONET).findings == ()


def test_a_script_is_parsed_and_nothing_of_it_runs(tmp_path: Path) -> None:
    assert _checked(tmp_path, SYNCHRONET, "while (true) {}").findings == ()
    assert _checked(tmp_path, SPINDLE, f"for (;;) {{}}{TOOL}").findings == ()


def test_what_works_for_spindle_is_not_found_and_a_file_without_tools_is(tmp_path: Path) -> None:
    text = "spindle.on('TOOL_INVOCATION', f); spindle.log.warn(1); spindle.generate.quiet({}); export default {}"
    assert _checked(tmp_path, SPINDLE, f"{text}; spindle.manifest.name; spindle.unregisterTool('t')" + TOOL).runs
    assert _checked(tmp_path, SPINDLE, text + TOOL).findings == ()
    (found,) = _checked(tmp_path, SPINDLE, text).findings
    assert (found.effect, found.what) == (DIFFERS, "registers no tool, so nothing of it is used")


def test_of_an_extension_its_manifest_and_its_entry_are_checked(tmp_path: Path) -> None:
    for name in ("kb", "unbuilt", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "kb" / "dist").mkdir()
    (tmp_path / "kb" / "dist" / "backend.js").write_text("spindle.storage.read('x')" + TOOL)
    (tmp_path / "kb" / "dist" / "frontend.js").write_text("document.body")
    manifest = '{\n "identifier": "lore",\n "entry_frontend": "dist/frontend.js"\n}'
    (tmp_path / "kb" / "spindle.json").write_text(manifest)
    (tmp_path / "unbuilt" / "spindle.json").write_text('{"entry_backend": "out/main.js"}')
    (tmp_path / "broken" / "spindle.json").write_text("{\n")
    found = {
        (str(each.path.relative_to(tmp_path)), each.line, each.effect) for each in check(tmp_path, SPINDLE).findings
    }
    assert found == {
        ("kb/spindle.json", 2, NOTE),
        ("kb/spindle.json", 3, DIFFERS),
        ("kb/dist/backend.js", 1, DIFFERS),
        ("unbuilt/spindle.json", 0, STOPS),
        ("broken/spindle.json", 0, STOPS),
        ("broken/spindle.json", 2, DIFFERS),
    }
