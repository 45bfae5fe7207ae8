"""`toolbus notify` and `toolbus notifications`, with a bus in this process."""

import json
from pathlib import Path

from tests.bus.gateway.on_thread import bus_on_thread
from tests.support.processes import Running, toolbus
from tests.support.waiting import until_sync


def test_what_is_notified_is_printed_by_all_who_follow_without_control_characters(tmp_path: Path) -> None:
    with bus_on_thread() as bus:
        address = bus.grpc_addresses[0]
        assert toolbus("notify", "nobody follows", "--bus", address).stdout == "sent to 0 hosts\n"
        with (
            Running(tmp_path, "notifications", "--bus", address) as shown,
            Running(tmp_path, "notifications", "--json", "--bus", address) as written,
        ):

            def reaches_both() -> bool:
                answer = toolbus("notify", "hello", "--bus", address, "--json")
                return bool(json.loads(answer.stdout)["hosts"] == 2)

            until_sync(reaches_both, "two that follow")
            order = ("order \x1b[2J4 is here", "--user", "u-17", "--data", '{"id": 4}')
            assert toolbus("notify", *order, "--bus", address).stdout == "sent to 2 hosts\n"
            shown.says('4 is here {"id": 4}')
            written.says("is here")
            assert "hello" in shown.out
            assert " to everyone: hello\n" in shown.out
            assert " to u-17: order " in shown.out
            assert "\x1b" not in shown.out
            last = json.loads(written.out.splitlines()[-1])
            assert (last["user"], last["data"], last["lost"]) == ("u-17", {"id": 4}, 0)


def test_data_that_is_not_json_is_wrong_usage() -> None:
    ended = toolbus("notify", "text", "--data", "{")
    assert ended.returncode == 2
    assert "--data is not JSON" in ended.stderr
