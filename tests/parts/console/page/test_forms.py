"""Forms of tools, filled by keyboard alone: what arrives at the plugin is what the form shows."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from tests.browser.chromium import Page
from tests.parts.console.page.looking import open_console, settled
from tests.parts.console.page.world import World, empty_world
from tests.support.waiting import until

pytestmark = [pytest.mark.console, pytest.mark.asyncio(loop_scope="module")]

SCHEMAS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "schemas.json").read_text("utf-8"))
MAX_STOPS = 600  # of Tab, for one form

# What a person would choose and type in each place of the form of `schema`, so that it means `text`.
_PLAN = """(async (schema, text) => {
    const {argumentsModel} = await import('/console/schema_model.mjs');
    const {stateOf} = await import('/console/form_state.mjs');
    const {parseJson} = await import('/console/json.mjs');
    const plan = {};
    const walk = (model, state, path) => {
        const at = JSON.stringify(path);
        if (model.kind === 'union') {
            plan['kind' + at] = state.at;
            walk(model.options[state.at](), state.state, path);
        } else if (model.kind === 'object') {
            model.properties.forEach(({name, below}, index) => {
                const {on, state: inner} = state.fields[index];
                plan['send' + JSON.stringify([...path, name])] = on;
                if (on) walk(below(), inner, [...path, name]);
            });
            plan['more' + at] = state.more.map(({name}) => name);
            state.more.forEach(({name, state: inner}) => walk(model.more(), inner, [...path, name]));
        } else if (model.kind === 'array') {
            plan['items' + at] = state.items.length;
            state.items.forEach((each, index) => walk(model.below(index), each, [...path, index]));
        } else if ('text' in state) plan[at] = state.text;
        else if ('at' in state) plan[at] = state.at;
        else if ('value' in state) plan[at] = state.value;
    };
    const model = argumentsModel(parseJson(schema));
    walk(model, stateOf(model, parseJson(text)), []);
    return plan;
})(%s, %s)"""

# What has the focus: where it is in the form, what it is, and what it holds.
_FOCUS = """(() => {
    const at = document.activeElement, {path, send, more} = at.dataset, label = at.getAttribute('aria-label') || '';
    const boxes = at.closest('.group') || at.closest('form');
    return {
        form: !!at.closest('form[aria-label=Arguments]'), submit: at.type === 'submit', tag: at.tagName,
        path: path ?? null, send: send ?? null, more: more ?? null,
        union: label.startsWith('kind of '), checked: at.checked, value: at.value,
        items: boxes ? boxes.querySelectorAll(':scope > .item').length : 0,
        names: boxes ? [...boxes.querySelectorAll(':scope > .field > .inline .label, :scope > .field > .inline label')]
            .map(each => each.querySelector('.any')?.innerText) : [],
    };
})()"""


@dataclass
class Plugin:
    """Tools of one callback URL, and the texts of the arguments that they got."""

    world: World
    got: dict[str, str] = field(default_factory=dict)


@asynccontextmanager
async def callback_plugin(world: World) -> AsyncIterator[Plugin]:
    plugin = Plugin(world)

    async def invoke(request: web.Request) -> web.Response:
        call = await request.json()
        plugin.got[call["name"]] = call["raw_arguments"]
        return web.json_response({"output": "thanks"})

    app = web.Application()
    app.router.add_post("/", invoke)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        for each in SCHEMAS:
            tool = {"name": each["name"], "description": each["about"], "callback_url": url, "source": "forms"}
            parameters = each["schema"] if isinstance(each["schema"], dict) else {}
            await world.post("/api/tools/register", {**tool, "parameters": parameters})
        yield plugin
    finally:
        await runner.cleanup()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plugin() -> AsyncIterator[Plugin]:
    async with empty_world() as world, callback_plugin(world) as plugin:
        yield plugin


async def act(page: Page, plan: dict[str, Any], at: dict[str, Any]) -> bool:
    """Does what the plan says about the place with the focus; returns whether there was something to do."""
    if at["send"]:
        if plan.get("send" + at["send"], at["checked"]) == at["checked"]:
            return False
        await page.press(" ")
    elif at["more"]:
        missing = [name for name in plan.get("more" + at["more"], ()) if name not in at["names"]]
        if not missing:
            return False
        await page.type(missing[0])
        await page.press("Enter")
        await drawn(page)  # what was added has the focus then
    elif at["tag"] == "BUTTON":
        if plan.get("items" + (at["path"] or ""), 0) <= at["items"]:
            return False
        await page.press("Enter")
        await drawn(page)
    elif at["tag"] == "SELECT":
        steps = plan.get(("kind" if at["union"] else "") + at["path"], int(at["value"])) - int(at["value"])
        # "choose …" is the first of the options, until something is chosen
        await page.press(*["ArrowDown" if steps > 0 else "ArrowUp"] * abs(steps))
        return bool(steps)
    elif at["path"] not in plan:
        return False
    elif isinstance(plan[at["path"]], bool):
        if plan[at["path"]] == at["checked"]:
            return False
        await page.press(" ")
    else:
        if plan[at["path"]] == at["value"]:
            return False
        await page.press("Control+a", "Delete")
        await page.type(plan[at["path"]])
    return True


async def drawn(page: Page) -> None:
    """Waits until the page has drawn what the last key did."""
    await page.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


async def fill(page: Page, plan: dict[str, Any]) -> None:
    """Goes through the page by Tab, round after round, until there is nothing left to do in the form."""
    acted = True
    for _ in range(MAX_STOPS):
        await page.press("Tab")
        at = await page.run(_FOCUS)
        if at["submit"] and at["form"]:
            if not acted:
                return
            acted = False
        elif at["form"]:
            while await act(page, plan, at):
                acted = True
                at = await page.run(_FOCUS)
                if not at["form"] or at["send"] or at["more"]:
                    break
    raise AssertionError(f"the form was not filled after {MAX_STOPS} stops")


def exact(text: str) -> Any:
    """Reads JSON; numbers stay the texts that they are."""
    return json.loads(text, parse_float=lambda each: ("number", each), parse_int=lambda each: ("number", each))


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: str(schema["name"]))
async def test_what_is_typed_into_a_form_is_what_arrives(page: Page, plugin: Plugin, schema: dict[str, Any]) -> None:
    await page.size(1440, 900)
    await open_console(page, plugin.world, f"tools/forms/{schema['name']}")
    await page.until("!!document.querySelector('form[aria-label=Arguments]')", "the form")
    plan = await page.run(_PLAN % (json.dumps(json.dumps(schema["schema"])), json.dumps(schema["arguments"])))
    await fill(page, plan)
    await page.press("Control+Enter")
    await until(lambda: schema["name"] in plugin.got, "the call")
    await settled(page)
    assert exact(plugin.got[schema["name"]]) == exact(schema["arguments"])
    assert "thanks" in await page.run("document.querySelector('.detail').innerText")
    assert page.complaints == []
