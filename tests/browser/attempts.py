"""Lists what a web page tries on a bus, as scripts; each says what the page saw.

Every script sees `target`, the address of the bus, and `tool`, the JSON of a registration.
"""

from __future__ import annotations

import json

TOOL = json.dumps({"name": "planted", "description": "d", "callback_url": "http://127.0.0.1:1/", "source": "page"})

# What the scripts share. A promise that is rejected is shown as the name of its error.
_PRELUDE = """
const shown = (promise, of) => promise.then(of || (answer => answer.type), error => error.name);
const post = (path, body, more) => shown(fetch(target + path, {method: 'POST', mode: 'no-cors', body, ...more}));
const asJson = {mode: 'cors', headers: {'Content-Type': 'application/json'}};
const event = (of, names) => new Promise(done => names.forEach(name => of.addEventListener(name, () => done(name))));
const added = async (name, attributes) => {
    const element = Object.assign(document.createElement(name), attributes);
    const seen = event(element, ['load', 'error']);
    document.body.append(element);
    return [element, await seen];
};
const form = async (path, enctype, name, value) => {
    const [frame] = await added('iframe', {name: 'answer' + Math.random(), src: 'about:blank'});
    const form = Object.assign(document.createElement('form'), {method: 'post', action: target + path, enctype});
    form.target = frame.name;
    form.append(Object.assign(document.createElement('input'), {name, value}));
    document.body.append(form);
    const seen = event(frame, ['load']);
    form.submit();
    await seen;
    try { return frame.contentDocument ? 'readable' : 'hidden'; } catch (error) { return error.name; }
};
"""

# A tool's JSON as a form of text: `NAME=VALUE` makes one object of both.
_HALVES = f"""'{TOOL[:-1]}, "x": "', '"}}'"""

# Name → script, and what the page sees when the bus refuses.
ATTEMPTS: dict[str, tuple[str, str]] = {
    "a blob registers a tool": ("post('/api/tools/register', new Blob([tool]))", "TypeError"),
    "a text registers a tool": ("post('/api/tools/register', tool)", "TypeError"),
    "a form of text registers a tool": (f"form('/api/tools/register', 'text/plain', {_HALVES})", "hidden"),
    "multipart registers a tool": ("post('/api/tools/register', new FormData())", "TypeError"),
    "a fetch that outlives the page registers a tool": (
        "post('/api/tools/register', new Blob([tool]), {keepalive: true})",
        "TypeError",
    ),
    "json registers a tool": ("post('/api/tools/register', tool, asJson)", "TypeError"),
    "a beacon clears a source": ("String(navigator.sendBeacon(target + '/api/tools/clear', new Blob([tool])))", "true"),
    "a blob calls a tool": ("""post('/api/tools/invoke', new Blob(['{"name": "planted"}']))""", "TypeError"),
    "a blob drains the bus": ("post('/api/bus/drain', new Blob(['{}']))", "TypeError"),
    "an empty request drains the bus": ("post('/api/bus/drain')", "TypeError"),
    "a form drains the bus": ("form('/api/bus/drain', 'application/x-www-form-urlencoded', 'a', 'b')", "hidden"),
    "json drains the bus": ("post('/api/bus/drain', '{}', asJson)", "TypeError"),
    "a task is cancelled": ("shown(fetch(target + '/api/tasks/x', {method: 'DELETE'}))", "TypeError"),
    "a frame without an origin registers a tool": (
        """(async () => {
            const script = `fetch('${target}/api/tools/register',
                {method: 'POST', mode: 'no-cors', body: new Blob(['${tool}'])})
                .then(answer => parent.postMessage(answer.type, '*'), error => parent.postMessage(error.name, '*'))`;
            const said = new Promise(done => addEventListener('message', message => done(message.data)));
            await added('iframe', {sandbox: 'allow-scripts', srcdoc: '<script>' + script + '</' + 'script>'});
            return said;
        })()""",
        "TypeError",
    ),
    "the list is read": ("shown(fetch(target + '/api/tools'), answer => answer.text())", "TypeError"),
    "the list is fetched unread": ("shown(fetch(target + '/api/tools', {mode: 'no-cors'}))", "TypeError"),
    "the list is a script": ("added('script', {src: target + '/api/tools'}).then(seen => seen[1])", "error"),
    "an icon of the bus is an image": (
        "added('img', {src: target + '/static-offline-docs/favicon.png'}).then(seen => seen[1])",
        "error",
    ),
    "events are followed": (
        "event(new EventSource(target + '/api/tools/events'), ['open', 'message', 'catalog', 'error'])",
        "error",
    ),
    "digests are followed": (
        "event(new EventSource(target + '/api/console/stream'), ['open', 'message', 'digest', 'error'])",
        "error",
    ),
    "digests are fetched unread": ("shown(fetch(target + '/api/console/stream', {mode: 'no-cors'}))", "TypeError"),
    "a script of the console is loaded": (
        "added('script', {type: 'module', src: target + '/console/text.mjs'}).then(seen => seen[1])",
        "error",
    ),
    "a window of the console is kept": (
        """(async () => {
            const page = open(target + '/console/');
            while (!page.closed) await new Promise(done => setTimeout(done, 20));
            return 'closed';
        })()""",
        "closed",
    ),
    "a web socket is opened": (
        "event(new WebSocket(target.replace('http', 'ws') + '/api/tools'), ['open', 'error'])",
        "error",
    ),
    "a window of /docs is kept": (
        """(async () => {
            const docs = open(target + '/docs');
            while (!docs.closed) await new Promise(done => setTimeout(done, 20));
            return 'closed';
        })()""",
        "closed",
    ),
}

# What a page tries whose own name was made to lead to the bus: it is of the same origin, and no preflight is needed.
REBINDING = ("json registers a tool", "json drains the bus", "a task is cancelled", "the list is read")


def script_of(attempt: str, target: str) -> str:
    """Returns an attempt on an address as an expression."""
    values = f"const target = {json.dumps(target)}, tool = {json.dumps(TOOL)};"
    return f"(async () => {{ {values} {_PRELUDE} return await {ATTEMPTS[attempt][0]}; }})()"
