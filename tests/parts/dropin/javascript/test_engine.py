"""One scope of scripts: what crosses its border, what ends a turn, and what a script can reach."""

import queue
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from toolbus.parts.dropin.javascript import Engine, EngineLimits, ScriptError
from toolbus.protocol.tool import MIB

SECONDS = 60.0  # for anything here on a loaded machine; nothing waits for it to pass
LIMITS = EngineLimits(heap_bytes=16 * MIB, turn_seconds=0.05, load_seconds=0.5)


class Scope:
    """An engine with what scripts of a Synchronet BBS know, and what they posted."""

    def __init__(self, limits: EngineLimits = LIMITS) -> None:
        self.posts: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self.ended: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.engine = Engine(self.posts.put, limits, self.ended.put)
        self.engine.install("synchronet.js", ["_common.js"])

    def load(self, text: str) -> None:
        self.engine.notify("begin", {})
        self.engine.load(text).result(SECONDS)
        self.engine.notify("end", {"keep": True})

    def tool(self, body: str) -> None:
        """Loads a file with one tool, `t`."""
        self.load(f"llm_tool_register({{name: 't', def: {{}}, execute: function (args, env) {{ {body} }} }})")
        assert self.posts.get(timeout=SECONDS)[0] == "register"

    def call(self, args: object = None, deadline: float | None = None) -> Any:
        fields = {"name": "t", "args": args, "env": {"speaker": "Ann"}}
        return self.engine.request("call", fields, deadline=deadline).result(SECONDS)

    def next_line(self) -> str:
        """Waits for the next line of the log."""
        kind, _, text = self.posts.get(timeout=SECONDS)
        assert kind == "log"
        return str(text)


@pytest.fixture
def scope() -> Iterator[Scope]:
    scope = Scope()
    yield scope
    scope.engine.close()


def test_arguments_and_results_cross_the_border_as_json(scope: Scope) -> None:
    scope.tool("return {args, speaker: env.speaker, missing: undefined, not_a_number: NaN}")
    args = {"text": "\ud800 \0 ä 😀", "list": [1, 2.5, None, True]}
    assert scope.call(args) == {"args": args, "speaker": "Ann", "not_a_number": None}


@pytest.mark.parametrize(
    ("body", "value"), [("return 'text'", "text"), ("", None), ("return null", None), ("return () => 1", None)]
)
def test_a_text_stays_a_text_and_what_json_cannot_hold_is_null(scope: Scope, body: str, value: object) -> None:
    scope.tool(body)
    assert scope.call() == value


def test_a_promise_is_waited_for_while_other_calls_run(scope: Scope) -> None:
    scope.tool("return args ? new Promise(done => { globalThis.done = done }) : (done('late'), 'now')")
    waiting = scope.engine.request("call", {"name": "t", "args": 1, "env": {}})
    assert scope.call(0) == "now"
    assert waiting.result(SECONDS) == "late"


def test_timers_fire_in_their_order_and_can_be_cleared(scope: Scope) -> None:
    scope.tool(
        """
        return new Promise(done => {
          const seen = [];
          setTimeout(() => seen.push('second'), 20);
          setTimeout(() => seen.push('first'), 1);
          clearTimeout(setTimeout(() => seen.push('never'), 10));
          const again = setInterval(() => { if (seen.push('again') > 4) { clearInterval(again); done(seen) } }, 30);
        })
        """
    )
    assert scope.call() == ["first", "second", "again", "again", "again"]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("throw new TypeError('no')", "TypeError: no"),
        ("throw 'plain'", "plain"),
        ("return Promise.reject(new Error('later'))", "Error: later"),
        ("return nothing.at.all", "ReferenceError: nothing is not defined"),
        ("return 10n", "TypeError: BigInt are forbidden in JSON.stringify"),
        ("const a = {}; a.a = a; return a", "TypeError: circular reference"),
        ("return 'x'.repeat(9 * 1024 * 1024)", "RangeError: the result has 9437186 characters of JSON"),
        ("throw { toString() { throw 1 } }", "{}"),
        ("throw Object.create(null, {toJSON: {get() { throw 1 }}})", "[a value that cannot be shown]"),
        ("let a = []; for (let i = 0; i < 2e4; i++) a = [a]; return a", ""),
        ("(function f() { f() })()", "RangeError: Maximum call stack size exceeded"),
    ],
)
def test_a_call_that_throws_fails_with_its_text_and_the_scope_goes_on(body: str, text: str) -> None:
    scope = Scope(EngineLimits(heap_bytes=64 * MIB, turn_seconds=2.0))
    scope.tool(f"if (args === 'go on') return 1; {body}")
    with pytest.raises(ScriptError) as raised:
        scope.call()
    assert str(raised.value).startswith(text)
    assert scope.call("go on") == 1
    scope.engine.close()


THROWN = {
    "null": "null was thrown, by the script or since the scripts of this scope reached their limit of 64 MiB",
    "undefined": "undefined was thrown",
    "''": "an empty text was thrown",
    "0": "0",
    "NaN": "NaN",
    "-1.5": "-1.5",
    "false": "false",
    "10n": "10",
    "Symbol('here')": "Symbol(here)",
    "[1, {a: 2}]": '[1,{"a":2}]',
    "{code: 5}": '{"code":5}',
    "(() => { const a = {}; a.a = a; return a })()": "[a value that cannot be shown]",
    "function named() {}": "a function was thrown: named",
    "new Error": "Error",
    "new RangeError('far')": "RangeError: far",
    "Object.assign(new Error('x'), {name: 'Own'})": "Own: x",
    "Object.defineProperty(new Error('x'), 'message', {get() { throw 1 }})": "Error: [a message that cannot be shown]",
    "Object.defineProperty(new Error('x'), 'stack', {get() { throw 1 }})": "Error: x",
    "new AggregateError([new Error('one'), 'two'], 'all')": "AggregateError: all: Error: one: two",
    "Object.assign(new Error('x'), {cause: new TypeError('y')})": "Error: x: TypeError: y",
    "(() => { const { proxy, revoke } = Proxy.revocable({}, {}); revoke(); return proxy })()": "[a value that cannot",
    "new Proxy({}, {get() { throw 1 }})": "[a value that cannot be shown]",
    "'x'.repeat(1e6)": "x" * 8192,
    "'\\ud800'": "\ud800",
    "new Date(0)": '"1970-01-01T00:00:00.000Z"',
    "Object.create(null)": "{}",
}


@pytest.mark.parametrize("how", ["throw {}", "return Promise.reject({})", "return (async () => {{ throw {} }})()"])
@pytest.mark.parametrize(("value", "text"), THROWN.items(), ids=THROWN.keys())
def test_whatever_a_call_throws_or_rejects_with_is_its_error(value: str, text: str, how: str) -> None:
    scope = Scope(EngineLimits(heap_bytes=64 * MIB, turn_seconds=SECONDS))
    scope.tool(f"if (args === 'go on') return 1; {how.format(f'({value})')}")
    with pytest.raises(ScriptError) as raised:
        scope.call()
    assert str(raised.value).startswith(text)
    assert len(str(raised.value)) <= 8192
    assert raised.value.message or value == "new Error"
    assert not raised.value.fatal
    assert scope.call("go on") == 1
    scope.engine.close()


@pytest.mark.parametrize(
    "body",
    [
        "(async () => { while (true) await null })(); return new Promise(() => {})",
        "const again = () => Promise.resolve().then(again); return again()",
        "const f = () => { queue() }, queue = () => Promise.resolve().then(f); queue(); return new Promise(() => {})",
    ],
)
def test_jobs_without_end_fail_their_call_and_only_lose_the_others(body: str) -> None:
    scope = Scope(EngineLimits(turn_seconds=0.2))
    scope.tool(f"if (args === 'wait') return new Promise(() => {{}}); {body}")
    waiting = scope.engine.request("call", {"name": "t", "args": "wait", "env": {}})
    endless = scope.engine.request("call", {"name": "t", "args": 0, "env": {}})
    behind = scope.engine.request("call", {"name": "t", "args": "wait", "env": {}})
    errors = [each.exception(SECONDS) for each in (endless, waiting, behind)]
    late = scope.engine.request("call", {"name": "t", "args": "wait", "env": {}}).exception(SECONDS)
    ends = [(each.fatal, each.lost, each.began) for each in (*errors, late) if isinstance(each, ScriptError)]
    assert ends == [(True, False, True), (True, True, True), (True, True, False), (True, True, False)]
    assert "a script started jobs without end" in str(errors[0])


@pytest.mark.parametrize(
    "body",
    [
        "while (true) {}",
        "try { while (true) {} } catch (e) { return 'caught' }",
        "try { while (true) {} } finally { return 'finally' }",
        "/(a+)+b/.test('a'.repeat(40))",
        "return Promise.resolve().then(() => { while (true) {} })",
        "return new Promise(() => setTimeout(() => { while (true) {} }, 1))",
    ],
)
def test_a_call_without_end_is_interrupted_and_the_scope_goes_on(scope: Scope, body: str) -> None:
    scope.tool(f"if (args) return 1; {body}")
    with pytest.raises(ScriptError, match=r"computed for more than 0\.05 s without a pause"):
        scope.call()
    assert scope.call("go on") == 1


def test_a_call_is_interrupted_at_its_deadline(monotonic: Callable[[], float]) -> None:
    scope = Scope(EngineLimits(turn_seconds=SECONDS))
    scope.tool("while (true) {}")
    with pytest.raises(ScriptError, match=r"computed for more than 0\.\d+ s"):
        scope.call(deadline=monotonic() + 0.2)
    scope.engine.close()


@pytest.fixture
def monotonic() -> Callable[[], float]:
    import time

    return time.monotonic


def test_what_a_timer_throws_is_the_error_of_the_call_that_set_it(scope: Scope) -> None:
    late = "setTimeout(() => setTimeout(() => { throw new Error('late') }, 1), 1)"
    scope.tool(f"return new Promise(done => {{ globalThis.done = done; if (args) {late} }})")
    other = scope.engine.request("call", {"name": "t", "args": 0, "env": {}})
    with pytest.raises(ScriptError, match="Error: late"):
        scope.call(1)
    assert not other.done()


def test_a_timer_that_computes_too_much_in_all_is_stopped_and_its_call_fails() -> None:
    scope = Scope(EngineLimits(turn_seconds=SECONDS, call_seconds=0.2))
    scope.tool("if (args) setInterval(() => { for (let i = 0; i < 1e5; i++); }, 1); return new Promise(() => {})")
    waiting = scope.engine.request("call", {"name": "t", "args": 0, "env": {}})
    with pytest.raises(ScriptError, match=r"computed for more than 0\.2 s in all, so it was stopped"):
        scope.call(1)
    scope.load("setInterval(() => { for (let i = 0; i < 1e5; i++); }, 1)")
    assert "computed for more than 0.2 s in all" in scope.next_line()
    assert not waiting.done()
    scope.engine.close()


@pytest.mark.parametrize("outlives", [False, True])
def test_answers_that_compute_too_much_in_all_are_no_longer_passed_on(outlives: bool) -> None:
    questions: queue.SimpleQueue[int] = queue.SimpleQueue()
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def take(post: list[Any]) -> None:
        if post[0] == "call":
            questions.put(post[1])
            engine.notify("called", {"id": post[1], "output": "null"})
        else:
            lines.put(post[2])

    engine = Engine(take, EngineLimits(turn_seconds=SECONDS, call_seconds=0.2))
    engine.install("script.js")
    text = "while (true) { for (let i = 0; i < 1e5; i++); try { await call('x', {}) } catch {} }"
    run = engine.request("run", {"text": f"(async () => {{ {text} }})()" if outlives else text, "input": {}})
    if outlives:
        assert run.result(SECONDS) is None
        error = lines.get(timeout=SECONDS)
    else:
        error = str(run.exception(SECONDS))
    assert "computed for more than 0.2 s in all, so it was stopped" in error
    asked = questions.qsize()
    other = engine.request("run", {"text": "return (await call('y', {})) ?? 'well'", "input": {}})
    assert other.result(SECONDS) == "well"
    assert questions.qsize() == asked + 1, "only the other script has asked"
    assert lines.empty(), "it is stopped once"
    engine.close()


def test_a_timer_without_end_is_stopped_and_reported(scope: Scope) -> None:
    scope.load("setInterval(() => { while (true) {} }, 1)")
    assert "was interrupted" in scope.next_line()
    scope.tool("return new Promise(done => setTimeout(() => done(1), 30))")
    assert scope.call() == 1
    assert scope.posts.empty()


def test_timers_are_limited(scope: Scope) -> None:
    scope.tool("for (let i = 0; i < args; i++) setTimeout(() => {}, 1e6)")
    assert scope.call(1000) is None
    with pytest.raises(ScriptError, match="there are 1000 timers already"):
        scope.call(1)


def test_jobs_without_end_end_the_scope_and_every_call_in_it() -> None:
    scope = Scope()
    scope.tool("return new Promise(() => { if (args) (function again() { Promise.resolve().then(again) })() })")
    waiting = scope.engine.request("call", {"name": "t", "args": 0, "env": {}})
    with pytest.raises(ScriptError, match="jobs without end"):
        scope.call(1)
    with pytest.raises(ScriptError, match="jobs without end") as raised:
        waiting.result(SECONDS)
    assert raised.value.fatal
    assert "jobs without end" in scope.ended.get(timeout=SECONDS)
    with pytest.raises(ScriptError, match="jobs without end"):
        scope.call()


@pytest.mark.parametrize(
    "body",
    [
        "let a = []; while (true) a.push({})",
        "'x'.repeat(2 ** 29)",
        "new ArrayBuffer(1e9)",
        "try { let a = []; while (true) a.push({}) } catch (e) { throw e }",
    ],
)
def test_a_call_that_takes_too_much_memory_fails_and_the_scope_goes_on(body: str) -> None:
    scope = Scope(EngineLimits(heap_bytes=16 * MIB, turn_seconds=SECONDS))
    scope.tool(f"if (args) return 1; {body}")
    with pytest.raises(ScriptError, match="limit of 16 MiB of memory"):
        scope.call()
    assert scope.call("go on") == 1
    scope.engine.close()


def test_a_scope_whose_memory_stays_full_ends() -> None:
    scope = Scope(EngineLimits(heap_bytes=16 * MIB, turn_seconds=SECONDS))
    scope.tool("globalThis.kept = []; while (true) kept.push({})")
    with pytest.raises(ScriptError, match="limit of 16 MiB of memory"):
        scope.call()
    assert "limit of 16 MiB" in scope.ended.get(timeout=SECONDS)


def test_a_flood_of_lines_reaches_the_log_in_part_and_is_counted(scope: Scope) -> None:
    scope.load("for (let i = 0; i < 1000; i++) print(i)")
    lines = [scope.next_line() for _ in range(201)]
    assert lines[:2] == ["0", "1"]
    assert lines[-1] == "800 further lines of the log were dropped"


def test_a_post_that_cannot_be_taken_is_logged_and_the_scope_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(post: list[Any]) -> None:
        raise RuntimeError("not today")

    engine = Engine(refuse, LIMITS)
    engine.install("synchronet.js", [])
    engine.load("print('one')").result(SECONDS)
    engine.load("1").result(SECONDS)
    assert "not today" in caplog.text
    engine.close()


def test_a_closed_scope_fails_its_calls(scope: Scope) -> None:
    scope.tool("return new Promise(() => {})")
    waiting = scope.engine.request("call", {"name": "t", "args": 0, "env": {}})
    scope.engine.close()
    with pytest.raises(ScriptError, match="closed"):
        waiting.result(SECONDS)


def test_a_request_that_nobody_waits_for_is_forgotten(scope: Scope) -> None:
    scope.tool("return args ? args : new Promise(() => {})")
    waiting = scope.engine.request("call", {"name": "t", "args": 0, "env": {}})
    assert scope.call(1) == 1
    assert "calls=1" in repr(scope.engine)
    scope.engine.drop(waiting)
    assert scope.call(1) == 1
    assert repr(scope.engine) == "<Engine calls=0 timers=0 running>"


# What no script may have. `import` of a file that exists: the engine would read it if it could.
ABSENT = ("require('fs')", "process.env", "std.open", "os.exec", "fetch('http://127.0.0.1')", "new Worker('x')")


@pytest.mark.parametrize("text", ABSENT)
def test_a_script_finds_no_files_network_or_processes(scope: Scope, text: str) -> None:
    scope.tool(f"return {text}")
    with pytest.raises(ScriptError, match=r"is not defined|does not exist here"):
        scope.call()


def test_a_script_cannot_import_a_file(scope: Scope, tmp_path: Path) -> None:
    (tmp_path / "there.js").write_text("export const secret = 42")
    scope.tool("return import(args)")
    for name in (str(tmp_path / "there.js"), "std", "os", "qjs:std"):
        with pytest.raises(ScriptError, match="could not load module"):
            scope.call(name)
    with pytest.raises(ScriptError, match="could not load module"):
        scope.engine.load(f"import {{ secret }} from '{tmp_path}/there.js'", module=True).result(SECONDS)


def test_the_hosts_side_of_a_scope_is_in_no_global_and_survives_what_a_script_replaces(scope: Scope) -> None:
    scope.load(
        """
        Object.prototype.polluted = 'yes';
        Array.prototype.join = Array.prototype.map = () => { throw new Error('replaced') };
        JSON.stringify = JSON.parse = () => '["done", 1, "forged"]';
        Promise.prototype.then = undefined;
        Object.defineProperty(globalThis, 'llm_tool_register', {value: llm_tool_register, writable: false});
        """
    )
    scope.tool("return Object.getOwnPropertyNames(globalThis).filter(name => /host|outbox|post|receiv/i.test(name))")
    assert scope.call() == []


def test_scopes_share_nothing() -> None:
    one, other = Scope(), Scope()
    one.load("Object.prototype.polluted = 'yes'; globalThis.mine = 1; JSON.stringify = () => '0'")
    other.tool("return [typeof ({}).polluted, typeof mine, JSON.stringify([1])]")
    assert other.call() == ["undefined", "undefined", "[1]"]
    one.engine.close()
    other.engine.close()


# Collects everything before it replaces anything: it could not go on with what it has replaced.
REPLACES = """
const broken = () => { throw 'a built-in that a script has replaced' };
const silent = { set() {}, get() { return undefined }, configurable: true };
const changes = [];
for (const each of [Array, Map, Set, Object, String, Number, Function, Promise, RegExp, Error, Symbol]) {
  for (const holder of [each, each.prototype]) {
    for (const key of Reflect.ownKeys(holder)) {
      const own = Object.getOwnPropertyDescriptor(holder, key);
      if (own.configurable && typeof own.value === 'function' && key !== 'constructor')
        changes.push([holder, key, { value: broken, writable: true, configurable: true }]);
    }
  }
}
for (const key of ['0', '1', 'toJSON', 'then', 'kind', 'id'])
  for (const each of [Array, Object, String, Number]) changes.push([each.prototype, key, silent]);
for (const name of ['Array', 'Map', 'Set', 'Object', 'String', 'Number', 'Promise', 'Error', 'TypeError', 'RangeError'])
  changes.push([globalThis, name, { value: broken, writable: true, configurable: true }]);
const { defineProperty } = Reflect;
JSON.parse = JSON.stringify = Math.max = Math.min = Math.random = Reflect.apply = Reflect.defineProperty = broken;
for (let place = 0; place < changes.length; place += 1) {
  const change = changes[place];
  defineProperty(change[0], change[1], change[2]);
}
"""
NEVER = "Promise.prototype.then = Promise.resolve = () => new Promise(() => {});"


@pytest.mark.parametrize("replaced", [REPLACES, NEVER], ids=["all", "promises"])
def test_built_ins_that_a_script_replaces_are_not_those_of_the_wrapper(scope: Scope, replaced: str) -> None:
    scope.tool(
        "switch (args) { case 1: return {a: [1, 'x']}; case 2: return (async () => 2)(); case 3: throw 'thrown';"
        " case 4: throw {odd: 1}; case 5: console.log('line', 5); return new (class { then(done) { done(5) } });"
        " case 6: return new TheirPromise((done) => setTimeout(done, 1, 6)) }"
    )
    scope.load(f"const TheirPromise = Promise; (() => {{ {replaced} }})();")
    for _ in range(2):
        assert scope.call(1) == {"a": [1, "x"]}
        assert scope.call(2) == 2
        with pytest.raises(ScriptError, match="thrown"):
            scope.call(3)
        with pytest.raises(ScriptError, match=r"odd|object|cannot be shown"):
            scope.call(4)
        assert scope.call(5) == 5
        assert scope.next_line() == "line 5"
        assert scope.call(6) == 6


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="the system counts no time of a thread")
def test_one_step_without_end_ends_the_scope_however_many_calls_come() -> None:
    scope = Scope()
    scope.tool("if (args) new Array(2 ** 32 - 1).join()")  # a built-in, which looks at no limit
    stuck = scope.engine.request("call", {"name": "t", "args": 1, "env": {}})
    waiting = [scope.engine.request("call", {"name": "t", "args": 0, "env": {}}) for _ in range(20)]
    with pytest.raises(ScriptError, match="in one step, which nothing can interrupt") as raised:
        stuck.result(SECONDS)
    assert (raised.value.fatal, raised.value.lost) == (True, False)
    assert "in one step" in scope.ended.get(timeout=SECONDS)
    for each in waiting:
        with pytest.raises(ScriptError, match="in one step") as lost:
            each.result(SECONDS)
        assert (lost.value.lost, lost.value.began) == (True, False)
