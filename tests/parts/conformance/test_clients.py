"""The clients in Python keep the rules that are quickly played; `make conformance` plays all of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.parts.conformance.clients import CLIENTS, ROOT, wrong_of
from tests.parts.conformance.forked_client import fork_client
from toolbus.parts.conformance.suite import Choice, run

PROTOS = sorted((ROOT / "proto" / "toolbus" / "v1").glob("*.proto"))
JAVA = ROOT / "clients" / "java" / "src" / "main" / "java" / "dev" / "toolbus" / "pb"
RUST = ROOT / "clients" / "rust" / "src" / "pb.rs"
QUICK = ("OPEN-6", "FRAME-3", "CALL-7", "NEST-3")


@pytest.mark.parametrize("command", CLIENTS.values(), ids=CLIENTS)
async def test_a_client_keeps_the_rules(command: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "PYTHONPATH", str(ROOT))
    monkeypatch.setattr("asyncio.create_subprocess_exec", fork_client)
    assert wrong_of(await run(command, Choice(rules=QUICK), patience=3)) == []


def test_the_stubs_of_the_rust_client_are_what_the_proto_files_say() -> None:
    first, made = RUST.read_bytes().split(b"\n", 1)
    digest = hashlib.sha256(_texts(PROTOS) + made).hexdigest()
    assert first.endswith(digest.encode()), "run clients/rust/generate.sh and commit the result"


def test_the_stubs_of_the_java_client_are_what_the_proto_files_say() -> None:
    digest = hashlib.sha256(_texts([*PROTOS, *sorted(JAVA.glob("*.java"))])).hexdigest()
    assert (JAVA / "DIGEST").read_text("ascii").strip() == digest, "run clients/java/generate.sh and commit the result"


def _texts(files: Sequence[Path]) -> bytes:
    return b"".join(file.read_bytes() for file in files)
