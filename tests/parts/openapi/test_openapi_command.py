"""``toolbus openapi``: what would be offered, the errors, and the tools on a bus."""

import json
import signal
from pathlib import Path

from tests.parts.openapi.pet_server import KEY, pet_shop
from tests.support.processes import Running, toolbus
from tests.support.waiting import until_sync

DOCUMENT = """
openapi: 3.0.3
info: {title: Pets}
servers: [{url: https://pets.example/v1}]
paths:
  /pets: {get: {operationId: listPets}, post: {operationId: addPet}}
"""


def test_the_list_says_what_is_offered_and_why_the_rest_is_not(tmp_path: Path) -> None:
    file = tmp_path / "pets.yaml"
    file.write_text(DOCUMENT)
    ran = toolbus("openapi", file, "--base-url", "https://pets.example/v1", "--list", "--deny", "none")
    assert (ran.returncode, ran.stdout.splitlines()) == (
        0,
        [
            "NAME      OPERATION   STATE",
            "listPets  GET /pets   offered",
            "addPet    POST /pets  POST may change something: name it in allow",
            "operations of https://pets.example/v1: 1 offered, 1 left out",
        ],
    )
    assert ran.stderr == "toolbus: no operation matches 'none': correct the pattern\n"
    ran = toolbus("openapi", file, "--base-url", "https://pets.example/v1", "--list", "--json", "--allow", "add*")
    report = json.loads(ran.stdout)
    assert [each["name"] for each in report["tools"]] == ["addPet"]
    assert report["left_out"] == [{"name": "listPets", "operation": "GET /pets", "reason": "not allowed"}]


def test_mistakes_are_named(tmp_path: Path) -> None:
    file = tmp_path / "pets.yaml"
    file.write_text(DOCUMENT)
    for words, code, text in (
        ((file, "--list"), 1, "pass base_url='https://pets.example/v1' (--base-url) if that is right"),
        ((tmp_path / "none.json", "--list"), 1, "No such file or directory: name a file, or a URL"),
        ((file, "--auth", "NO_SUCH_VARIABLE"), 1, "the environment variable NO_SUCH_VARIABLE is not set"),
        ((file, "--auth", "A", "--auth", "b=B"), 2, "--auth A names no security scheme"),
        ((file, "--base-url", "https://pets.example", "--allow", "x"), 1, "no operation can be offered"),
    ):
        ran = toolbus("openapi", *words)
        assert (ran.returncode, text in ran.stderr) == (code, True), ran.stderr


def test_the_command_offers_the_tools_until_it_is_ended(bus: str, tmp_path: Path) -> None:
    with (
        pet_shop() as url,
        Running(
            tmp_path, "openapi", f"{url}/openapi.json", "--allow", "readLocked", "--auth", "byHeader=SHOP_KEY",
            "--prefix", "shop-", "--bus", bus, SHOP_KEY=KEY,
        ) as running,
    ):  # fmt: skip
        running.says("1 offered, ")
        until_sync(lambda: "shop-readLocked" in toolbus("list", "--bus", bus).stdout, "the tool")
        ran = toolbus("call", "shop-readLocked", "--bus", bus)
        assert (ran.returncode, ran.stdout) == (0, '"open"\n')
        running.send(signal.SIGTERM)
        assert running.code() == 0
