"""The clients in Python keep the rules that are quickly played; `make conformance` plays all of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

import pytest

from tests.parts.conformance.clients import CLIENTS, ROOT, wrong_of
from tests.parts.conformance.forked_client import fork_client
from toolbus.parts.conformance.suite import Choice, run

RUST = ROOT / "clients" / "rust" / "src" / "pb.rs"
QUICK = ("OPEN-6", "FRAME-3", "CALL-7", "NEST-3")


@pytest.mark.parametrize("command", CLIENTS.values(), ids=CLIENTS)
async def test_a_client_keeps_the_rules(command: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "PYTHONPATH", str(ROOT))
    monkeypatch.setattr("asyncio.create_subprocess_exec", fork_client)
    assert wrong_of(await run(command, Choice(rules=QUICK), patience=3)) == []


def test_the_stubs_of_the_rust_client_are_what_the_proto_files_say() -> None:
    first, made = RUST.read_bytes().split(b"\n", 1)
    protos = b"".join(path.read_bytes() for path in sorted((ROOT / "proto" / "toolbus" / "v1").glob("*.proto")))
    digest = hashlib.sha256(protos + made).hexdigest()
    assert first.endswith(digest.encode()), "run clients/rust/generate.sh and commit the result"
