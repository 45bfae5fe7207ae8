"""``toolbus call``: arguments, output, errors and Ctrl-C."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tests.bus.gateway.on_thread import bus_on_thread
from tests.support.processes import Running, environment, toolbus
from tests.support.waiting import until_sync
from toolbus.cli import call_command
from toolbus.cli.call_command import show, show_progress
from toolbus.errors import Code, Stage
from toolbus.functions.scope import ToolScope
from toolbus.protocol.tool import CallError, Progress, Result
from toolbus.v1 import tool_pb2 as pb


def test_call_prints_the_output_as_json(bus: str) -> None:
    ended = toolbus("call", "get_weather", "city=Paris", "days=3", "--bus", bus)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == '{\n  "city": "Paris",\n  "days": 3\n}\n'


def test_the_declared_type_decides_what_a_value_is(bus: str) -> None:
    ended = toolbus("call", "get_weather", "city=2024", "days=3", "--bus", bus)
    assert json.loads(ended.stdout) == {"city": "2024", "days": 3}


def test_call_takes_arguments_from_standard_input_and_files(bus: str, tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text('{"city": "Oslo"}')
    from_file = toolbus("call", "get_weather", f"@{tmp_path}/args.json", "days=2", "--bus", bus)
    assert json.loads(from_file.stdout) == {"city": "Oslo", "days": 2}
    big = toolbus("call", "echo", "-", "--bus", bus, stdin='{"value": 123456789012345678901234567890}')
    assert big.stdout == "123456789012345678901234567890\n"


def test_a_tool_that_raises_is_exit_code_1_with_its_error_text(bus: str) -> None:
    ended = toolbus("call", "refuse", "--bus", bus)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "not today" in ended.stderr
    assert "code=TOOL stage=ACCEPTED retry_safe=false" in ended.stderr


def test_the_error_text_of_a_tool_cannot_change_the_terminal(bus: str) -> None:
    text = "\x1b]0;owned\x07\ntoolbus: all is well"
    ended = toolbus("call", "refuse", json.dumps({"why": text}), "--bus", bus)
    assert ended.returncode == 1
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", ended.stderr)
    assert "\n  toolbus: all is well\ncode=TOOL" in ended.stderr


def test_output_that_could_change_the_terminal_is_printed_as_escapes_of_json(bus: str) -> None:
    text = "\x1b]0;owned\x07\x9b2J\u202e"
    ended = toolbus("call", "echo", json.dumps({"value": text}), "--bus", bus)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", ended.stdout)
    assert json.loads(ended.stdout) == text


def test_progress_and_content_of_a_tool_cannot_change_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    bad = "x\x1b]0;owned\x07\x9b2J"
    block = pb.ContentBlock
    content = (
        block(text=pb.TextContent(text=f"{bad}\ntoolbus: all is well")),
        block(image=pb.ImageContent(mime_type=bad)),
        block(resource_link=pb.ResourceLink(name=bad, uri=bad)),
    )
    error = CallError(Code.TOOL, bad, limit=(bad, 1.0), reason=f"{bad}\nmore")
    with pytest.raises(typer.Exit):
        show(Result("1", is_error=True, error=error, content=content), as_json=False)
    show_progress(Progress(message=f"{bad}\nmore", chunk=bad))
    shown = capsys.readouterr()
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", shown.out + shown.err)
    assert "\n  toolbus: all is well\n" in shown.err


def test_a_failed_call_has_code_stage_and_limit_in_json(bus: str) -> None:
    ended = toolbus("call", "nap", "seconds=60", "--timeout", "0.2", "--json", "--bus", bus)
    assert ended.returncode == 1
    error = json.loads(ended.stdout)["error"]
    assert (error["code"], error["limit"]["name"]) == ("DEADLINE_EXCEEDED", "timeout_seconds")
    assert 0 < error["limit"]["value"] <= 0.2  # less where the call had to wait until its host was attached
    plain = toolbus("call", "nap", "seconds=60", "--timeout", "0.2", "--bus", bus)
    assert "limit=timeout_seconds=0." in plain.stderr


def test_an_unknown_tool_and_invalid_arguments_have_different_codes(bus: str) -> None:
    unknown = toolbus("call", "nothing", "--bus", bus).stderr
    assert "code=NOT_FOUND stage=NOT_DISPATCHED" in unknown
    assert "`toolbus access explain NAME`" in unknown
    invalid = toolbus("call", "get_weather", "city=Oslo", "days=three", "--bus", bus).stderr
    assert 'arguments.days: "three" ' in invalid
    assert "code=INVALID_ARGUMENTS" in invalid
    assert "explain" not in invalid


def test_ctrl_c_cancels_the_call(bus_and_plugin: tuple[str, Running], tmp_path: Path) -> None:
    bus, plugin = bus_and_plugin
    napping = plugin.out.count("napping")
    with Running(tmp_path, "call", "nap", "seconds=60", "--bus", bus) as calling:
        until_sync(lambda: plugin.out.count("napping") > napping, "the call")
        calling.send(signal.SIGINT)
        assert calling.code() == 130
        assert (calling.out, calling.err) == ("", "")
    until_sync(lambda: plugin.out.rstrip().endswith("cancelled"), "the cancel")
    newest = json.loads(toolbus("calls", "--limit", "1", "--name", "nap", "--json", "--bus", bus).stdout)
    assert newest[0]["outcome"] == "CANCELLED"


def test_a_resource_in_a_result_is_printed_or_described(capsys: pytest.CaptureFixture[str]) -> None:
    content = (
        pb.ContentBlock(resource=pb.EmbeddedResource(uri="file:///a", text="what is in it")),
        pb.ContentBlock(
            resource=pb.EmbeddedResource(uri="file:///b", mime_type="image/png", data=b"B"),
            annotations_json='{"priority":1}',
        ),
    )
    show(Result("1", content=content), as_json=False)
    printed_error = capsys.readouterr().err
    assert (
        "file:///a\n  what is in it\n(file:///b, image/png, 1 bytes; --json has it as base64, --out writes it)"
        in printed_error
    )
    show(Result("1", content=content), as_json=True)
    assert json.loads(capsys.readouterr().out)["content"] == [
        {"kind": "resource", "uri": "file:///a", "mime_type": "", "text": "what is in it"},
        {
            "kind": "resource",
            "uri": "file:///b",
            "mime_type": "image/png",
            "data": "Qg==",
            "annotations": {"priority": 1},
        },
    ]


def test_a_refusal_by_a_tool_of_the_bus_points_at_no_further_command(capsys: pytest.CaptureFixture[str]) -> None:
    error = CallError(Code.PERMISSION_DENIED, "that needs 'drain' in its scope administer", stage=Stage.NOT_DISPATCHED)
    for of_bus in (False, True):
        with pytest.raises(typer.Exit):
            show(Result("1", is_error=True, error=error), as_json=False, of_bus=of_bus)
        assert ("toolbus access explain" in capsys.readouterr().err) is not of_bus


def test_a_text_of_the_content_that_repeats_the_output_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    texts = tuple(pb.ContentBlock(text=pb.TextContent(text=text)) for text in ("alpha", "beta"))
    result = Result(output_json='"alpha\\nbeta"', content=texts)
    show(result, as_json=False)
    printed = capsys.readouterr()
    assert (printed.out + printed.err).count("alpha") == 1
    show(result, as_json=True)
    assert "content" not in json.loads(capsys.readouterr().out)


def test_parts_that_are_no_text_are_written_into_new_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = pb.ContentBlock
    content = (
        block(text=pb.TextContent(text="a cat")),
        block(image=pb.ImageContent(mime_type="image/png", data=b"png")),
        block(resource=pb.EmbeddedResource(uri="file:///../../etc/x", mime_type="odd/kind", data=b"odd")),
    )
    folder = tmp_path / "new" / "pictures"
    call_command._write_content(Result("1", content=content), folder, "../draw:cat")
    written = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert written == {".._draw_cat-2.png": b"png", ".._draw_cat-3.bin": b"odd"}
    with pytest.raises(typer.Exit):
        call_command._write_content(Result("1", content=content), folder, "../draw:cat")
    assert "choose another folder" in capsys.readouterr().err


def test_progress_is_printed_on_a_terminal_and_where_it_is_asked_for() -> None:
    with bus_on_thread() as running:

        @running.tool
        def draw(scope: ToolScope) -> str:
            """Draws."""
            scope.progress(1, total=2, message="half")
            return "drawn"

        words = ("call", "draw", "--bus", running.grpc_addresses[0])
        assert toolbus(*words).stderr == ""
        assert toolbus(*words, "--progress").stderr == "… 1/2 half\n"
        ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "toolbus.cli", *words]
        with open(theirs, "wb") as terminal:
            ran = subprocess.run(command, stderr=terminal, stdin=subprocess.DEVNULL, env=environment({}), check=False)
            assert (ran.returncode, os.read(ours, 10_000).decode()) == (0, "… 1/2 half\r\n")
        os.close(ours)


def test_the_http_port_of_a_bus_is_named_at_once() -> None:
    with bus_on_thread() as running:
        ran = toolbus("list", "--bus", str(running.http_address))
    assert ran.returncode == 3
    assert f"the server at {running.http_address} speaks HTTP, not gRPC" in ran.stderr
