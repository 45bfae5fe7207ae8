"""The live screen: each key, what it shows, a bus that goes and comes back, texts that are attacks."""

from __future__ import annotations

import re

import pytest
from textual.strip import Strip
from textual.widgets import Input

from tests.parts.console.top import world
from tests.parts.console.top.digests import (
    ATTACK,
    change,
    digest,
    error,
    failed,
    output,
    running,
    session,
    source,
    tool,
)
from tests.parts.console.top.screenshots import draw, read, screen
from tests.support.waiting import until
from toolbus.errors import Code
from toolbus.parts.console.top.header import ViewTab
from toolbus.parts.console.top.row_list import ColumnHeads, RowList
from toolbus.parts.console.top.screen import TopApp
from toolbus.parts.console.top.views import Selection

FIRST = digest(
    1,
    tools=[tool("slow", 4, 2, p95=3.0), tool("often", 40, p95=0.02), tool("other", 6, of="maps")],
    sources=[source(), source("maps")],
    sessions=[session("s1"), session("s2", "maps")],
)
BUSY = change(
    2,
    tools=[tool("often", 50, p95=0.02)],
    calls=[failed(1, "slow"), failed(2, "often", "TOOL")],
    running=[running("r1", "slow"), running("r2", "often", parent="r1", caller="weather")],
)


def _column(app: TopApp, column: int) -> list[str]:
    return [cells[column] for cells in app.screen_stack[0].query_one(RowList).texts]


def _shown(app: TopApp) -> str:
    """Returns what is on the screen, line by line."""
    return "\n".join(strip.text for strip in _strips(app))


def _strips(app: TopApp) -> list[Strip]:
    return app.screen._compositor.render_strips()  # Textual has nothing public but pictures, which cost far more


async def test_keys_and_clicks_choose_table_order_and_filter() -> None:
    async with screen([FIRST, BUSY]) as (app, pilot, _):
        for key, column, names in (
            *(("s", 0, ["maps", "weather"]), ("c", 2, ["sent", "sent", "sent", "sent"])),
            *(("e", 2, ["tool", "unavailable"]), ("t", 0, ["often", "other", "slow"])),
        ):
            await pilot.press(key)
            assert _column(app, column) == names
        await pilot.click(next(each for each in app.query(ViewTab) if each.view.name == "sources"))
        assert _column(app, 0) == ["maps", "weather"]
        await pilot.press("t", "greater_than_sign", "r")
        assert _column(app, 0) == ["slow", "other", "often"]  # calls, the fewest first
        await pilot.press("greater_than_sign")
        assert _column(app, 0)[0] == "slow"  # errors
        await pilot.press(*["less_than_sign"] * 4)
        assert _column(app, 0) == ["often", "other", "slow"]  # name
        await pilot.click(ColumnHeads, offset=(2, 0))
        assert _column(app, 0) == ["slow", "other", "often"]
        await pilot.press("slash", "s", "l")
        assert _column(app, 0) == ["slow"]
        await pilot.press("enter", "c")
        assert len(_column(app, 0)) == 4  # each table has a filter of its own
        await pilot.press("t")
        assert isinstance(app.focused, RowList)
        assert "filter sl" in _shown(app)
        await pilot.press("escape")
        assert len(_column(app, 0)) == 3
        await pilot.press("l")
        assert app.theme == "toolbus-light"
        await pilot.press("q")
        assert app.return_value == 0


async def test_a_line_opens_with_all_that_is_known_of_it_now() -> None:
    async with screen([FIRST, BUSY]) as (app, pilot, host):
        await pilot.press("c", "down", "enter")
        for part in ("Call of often", "running", "call-r2", "r1", "└─ → often", "slow  running"):
            assert part in _shown(app)
        late = {"message": "too slow", "stage": "SENT", "retry_safe": True, "limit": {"name": "timeout", "value": 5.0}}
        host.add(change(3, calls=[failed(9, "often", "DEADLINE_EXCEEDED", id="r2", parent="r1", failure=late)]))
        await read(app, pilot, 3)
        for part in ("deadline_exceeded", "too slow", "yes", "timeout = 5.0"):
            assert part in _shown(app)
        await pilot.press("escape", "s")
        await pilot.click(RowList, offset=(3, 1), times=2)
        for part in ("Source weather", "max in flight", "64"):
            assert part in _shown(app)
        await pilot.press("escape", "question_mark")
        for key in ("t s c e", "/", "< >", "r", "p", "d", "Enter", "q"):
            assert f" {key} " in _shown(app)
        await pilot.press("question_mark", "ctrl+c")
        assert app.return_value == 130


async def test_d_drains_the_source_whose_name_was_typed() -> None:
    async with screen([FIRST]) as (app, pilot, host):
        for answer, title in (
            (output({"sessions": 1}), "draining maps"),
            (output({"sessions": 0}), "maps was not drained"),
            (error(Code.PERMISSION_DENIED, ATTACK), "maps was not drained"),
        ):
            host.answers["toolbus:drain"] = answer
            app.clear_notifications()
            await pilot.press("s", "d")
            assert app.screen.styles.align == ("center", "middle")
            app.screen.query_one(Input).value = "map"
            await pilot.press("enter")
            assert "that is not maps" in _shown(app)
            app.screen.query_one(Input).value = "maps"
            await pilot.press("enter")
            await until(lambda title=title: title in _shown(app), "the answer")  # type: ignore[misc]
            assert "\x1b" not in _shown(app)
        assert [call for call in host.calls if call[0] != "toolbus:digest"] == [
            ("toolbus:drain", {"source": "maps"})
        ] * 3


async def test_x_cancels_the_call_that_runs_once_the_name_of_its_tool_was_typed() -> None:
    async with screen([FIRST, BUSY]) as (app, pilot, host):
        await pilot.press("x")
        await until(lambda: "x cancels a call that runs" in _shown(app), "how to choose one")
        for answer, title in (
            (output({"caller": "chat"}), "the call of slow is cancelled"),
            (error(Code.INVALID_ARGUMENTS, ATTACK), "the call of slow was not cancelled"),
        ):
            host.answers["toolbus:cancel_call"] = answer
            app.clear_notifications()
            await pilot.press("c", "x")
            app.screen.query_one(Input).value = "slow"
            await pilot.press("enter")
            await until(lambda title=title: title in _shown(app), "the answer")  # type: ignore[misc]
            assert "\x1b" not in _shown(app)
        acts = [call for call in host.calls if call[0] != "toolbus:digest"]
        assert acts == [("toolbus:cancel_call", {"id": "r1"})] * 2


async def test_a_bus_that_goes_leaves_its_last_state_dimmed_and_comes_back_by_itself() -> None:
    busy = BUSY | {"rate": 20.0, "in_flight": 2, "stuck": 1, "held_bytes": 2048, "lost": 7}
    async with screen([FIRST, busy], size=(160, 30)) as (app, pilot, host):
        for part in (
            *("toolbus 0.1.0  127.0.0.1:48930  serving  up 1 min 4", "20 calls/s", "2 in flight (1 stuck)"),
            *("held 2.0 KiB", "lag 1.0 ms", "7 calls lost"),
        ):
            assert part in _shown(app)
        host.add(error(Code.UNAVAILABLE, "the connection broke"))
        await until(lambda: app.query_one(RowList).lost, "the loss")
        await pilot.pause()
        assert "no answer since" in _shown(app)
        assert "the connection broke" in _shown(app)
        assert len(_column(app, 0)) == 3
        host.add(digest(1, instance="two", tools=[tool("fresh", 1)]))
        await until(lambda: not app.query_one(RowList).lost, "the bus")
        await pilot.pause()
        assert _column(app, 0) == ["fresh"]
        assert "serving" in _shown(app)
        await pilot.press("p")
        host.add(change(2, instance="two"), change(3, instance="two", tools=[tool("new")]))
        app.draw()
        await pilot.pause()
        assert app.state.number < 3  # a request was on its way
        assert "PAUSED" in _shown(app)
        await pilot.press("p")
        await read(app, pilot, 3)
        assert "new" in _column(app, 0)
        assert "PAUSED" not in _shown(app)
        host.add(error(Code.PERMISSION_DENIED, "needs the verb calls"))
        await until(lambda: app.return_value is not None, "the end")
        assert (app.return_value, str(app.error)) == (1, "needs the verb calls")


async def test_of_a_thousand_lines_those_that_changed_are_drawn_and_the_cursor_stays_at_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    thousand = digest(1, tools=[tool(f"t{number:04}", 5_000 - number) for number in range(1_000)])
    async with screen([thousand], selection=Selection(sort="calls")) as (app, pilot, host):
        rows = app.query_one(RowList)
        for key, name in (("end", "t0999"), ("home", "t0000"), ("j", "t0001"), ("k", "t0000")):
            await pilot.press(key)
            assert rows.line.tool.name == name
            assert name in _shown(app)
        await pilot.press("pagedown")
        assert rows.line.tool.name == f"t{rows.size.height - 1:04}"
        drawn, draw_line = set[int](), RowList.render_line

        def note_and_draw(self: RowList, y: int) -> Strip:
            drawn.add(y)
            return draw_line(self, y)

        monkeypatch.setattr(RowList, "render_line", note_and_draw)
        host.add(change(2))
        await read(app, pilot, 2)
        drawn.clear()
        host.add(change(3, tools=[tool("t0003", 4_997, 1)]))
        await read(app, pilot, 3)
        assert drawn == {3}
        assert rows.texts[3][4] == "1"
        name = rows.line.tool.name
        host.add(change(4, tools=[tool("t0900", 9_000)]))
        await read(app, pilot, 4)
        assert _column(app, 0)[0] == "t0900"
        assert rows.line.tool.name == name


async def test_texts_of_plugins_are_neither_markup_nor_escapes() -> None:
    nasty = digest(
        1,
        version=ATTACK,
        bus_id=ATTACK,
        tools=[tool(ATTACK, of=ATTACK)],
        sources=[source(ATTACK, state=ATTACK, kind=ATTACK)],
        sessions=[session("s", ATTACK, identity=ATTACK, peer=ATTACK)],
        running=[running(ATTACK, ATTACK, source=ATTACK, caller=ATTACK, user_id=ATTACK, stage=ATTACK)],
        calls=[failed(1, ATTACK, ATTACK, source=ATTACK, failure={"message": ATTACK, "stage": ATTACK, "limit": ATTACK})],
    )
    async with screen([nasty], size=(160, 24)) as (app, pilot, _):
        for key in "tsce":
            await pilot.press(key)
            _check_harmless(app)
        await pilot.press("enter")
        _check_harmless(app)
        await pilot.press("escape", "s", "d")
        _check_harmless(app)
        await pilot.press("escape", "slash")
        app.query_one("#filter", Input).value = "[red]"
        await pilot.press("enter")
        assert "filter [red]" in _shown(app)


def _check_harmless(app: TopApp) -> None:
    shown = _shown(app)
    assert "[red]x[/red][@click=app.quit]y[/]" in shown
    assert not set(shown) & {"\x1b", "\x07", "\x9b", "\u202e"}
    assert not any("second line" in line.strip()[:11] for line in shown.splitlines())
    assert not any(
        segment.style.meta.get("@click") == "app.quit"
        for strip in _strips(app)
        for segment in strip
        if segment.style is not None
    )


async def test_columns_fit_into_the_width_and_the_name_keeps_room() -> None:
    async with screen(world.digests()) as (app, pilot, _):
        for width in (60, 220):
            await pilot.resize_terminal(width, 24)
            await until(lambda width=width: app.query_one(RowList).size.width == width, "the width")  # type: ignore[misc]
            await pilot.pause()
            assert "search_mailbox" in _shown(app)
            assert ("LAST MINUTE" in _shown(app)) == (width == 220)
            assert "IN FLIGHT" in _shown(app) or width == 60


@pytest.mark.parametrize("height", [10, 24])
async def test_a_scrollbar_covers_no_character_of_a_narrow_table(height: int) -> None:
    async with screen(world.digests(), size=(60, height)) as (app, _, _):
        rows = app.query_one(RowList)
        assert rows.show_vertical_scrollbar == (height == 10)
        assert re.search(r"get_weather +\d+ +[\d,]+ +2\.4 ms[ ▁-█]$", _shown(app), re.MULTILINE)


async def test_a_text_that_a_narrow_table_cuts_says_so() -> None:
    async with screen(world.digests(), size=(60, 24)) as (app, pilot, _):
        await pilot.press("e")
        await pilot.pause()
        assert re.search(r"unavailable +send_email +the [a-z]+… *$", _shown(app), re.MULTILINE)


async def test_a_picture_shows_what_its_keys_open() -> None:
    picture = await draw("call", light=True)
    assert "search_mailbox" in picture
    assert "deadline" in picture


@pytest.mark.parametrize("width", [60, 80, 100, 200])
async def test_figures_and_keys_are_whole_or_left_out(width: int) -> None:
    async with screen(world.digests(), size=(width, 24)) as (app, pilot, _):
        await pilot.pause()
        line = next(each for each in _shown(app).splitlines() if " calls/s " in each)
        assert re.fullmatch(
            r" +\d+ calls/s [ ▁-█]+  \d+ in flight(  [\d,]+ calls(  [\d,]+ errors(  held [\d.]+ \w+(  lag [\d.]+ \w+"
            r"(  late \d+)?)?)?)?)? *",
            line,
        ), line
        assert ("late" in line) == (width == 200)
        keys = _shown(app).splitlines()[-1]
        assert ("q Quit" in keys) == (width >= 80), keys
