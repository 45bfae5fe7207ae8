from __future__ import annotations

from urllib.parse import quote_from_bytes

import grpc
import pytest

from toolbus import errors
from toolbus.errors import (
    MAX_STATUS_BYTES,
    STATUS,
    AlreadyAttached,
    CallFailed,
    Code,
    InvalidRequest,
    InvalidTool,
    LimitExceeded,
    NotApproved,
    NotAudited,
    NotKept,
    NotOffered,
    NotPermitted,
    PeerLost,
    ProtocolError,
    RequestError,
    SessionGone,
    SetupError,
    Stage,
    ToolBusError,
    Unauthenticated,
    UnknownRole,
    VersionMismatch,
    grpc_status,
    status_text,
)
from toolbus.protocol.tool import CallError
from toolbus.v1 import tool_pb2 as pb

# No row in STATUS: the two abstract ones; a failed call is data; a process that cannot start has no peer.
WITHOUT_STATUS = {ToolBusError, RequestError, CallFailed, SetupError}
GRPC_NAMES = {status.name for status in grpc.StatusCode}

# One of each that can reach a peer, with the status its text travels under.
SAMPLES: list[tuple[ToolBusError, str]] = [
    (InvalidTool(["tool 'a': too long"]), "INVALID_ARGUMENT"),
    (InvalidRequest("source is empty"), "INVALID_ARGUMENT"),
    (ProtocolError("the first message must be attach"), "INVALID_ARGUMENT"),
    (VersionMismatch(2, (1,)), "FAILED_PRECONDITION"),
    (UnknownRole("cook"), "NOT_FOUND"),
    (SessionGone(), "FAILED_PRECONDITION"),
    (Unauthenticated("no key was presented"), "UNAUTHENTICATED"),
    (NotApproved("tool 'a' is another one than was trusted"), "PERMISSION_DENIED"),
    (NotPermitted("source 'a' is bound to a token"), "PERMISSION_DENIED"),
    (AlreadyAttached("6 attaches in a minute"), "ALREADY_EXISTS"),
    (LimitExceeded("sessions", 10_000, "too many sessions"), "RESOURCE_EXHAUSTED"),
    (NotOffered("no such RPC"), "UNIMPLEMENTED"),
    (NotKept("the disk is full"), "UNAVAILABLE"),
    (NotAudited("the disk is full"), "UNAVAILABLE"),
    (PeerLost("no heartbeat for 20 s"), "UNAVAILABLE"),
]


def _classes(root: type[ToolBusError] = ToolBusError) -> set[type[ToolBusError]]:
    own = {root} if root.__module__ == errors.__name__ else set()
    return own.union(*(_classes(child) for child in root.__subclasses__()))


def test_codes_are_those_of_the_wire() -> None:
    wire = {name.removeprefix("ERROR_CODE_"): number for name, number in pb.ErrorCode.items()}
    assert {code.name: code.value for code in Code} == wire


def test_stages_are_those_of_the_wire() -> None:
    wire = {name.removeprefix("CALL_STAGE_"): number for name, number in pb.CallStage.items()}
    assert {stage.name: stage.value for stage in Stage} == wire


def test_every_error_has_a_status_or_needs_none() -> None:
    assert _classes() == set(STATUS) | WITHOUT_STATUS
    assert not set(STATUS) & WITHOUT_STATUS


@pytest.mark.parametrize("status", STATUS.values(), ids=str)
def test_statuses_exist_in_grpc_and_http(status: tuple[str, int]) -> None:
    name, number = status
    assert name in GRPC_NAMES
    assert 200 <= number < 600
    assert (name == "OK") == (number < 400)


def test_a_subclass_stands_before_its_base_in_the_table() -> None:
    order = list(STATUS)
    hidden = [(late, early) for i, late in enumerate(order) for early in order[:i] if issubclass(late, early)]
    assert hidden == []


def test_there_is_a_sample_of_every_error_that_can_reach_a_peer() -> None:
    assert {type(error) for error, _ in SAMPLES} == set(STATUS)


@pytest.mark.parametrize(("error", "status"), SAMPLES, ids=lambda value: type(value).__name__)
def test_an_error_of_ours_reaches_the_peer_with_its_text(error: ToolBusError, status: str) -> None:
    assert grpc_status(error) == (status, str(error))
    assert str(error)


@pytest.mark.parametrize("error", [ValueError("token=hunter2"), KeyError("hunter2"), SystemExit("hunter2")], ids=repr)
def test_a_foreign_error_reaches_the_peer_without_its_text(error: BaseException) -> None:
    status, text = grpc_status(error)
    assert status == "INTERNAL"
    assert "hunter2" not in text


@pytest.mark.parametrize(
    "error", [SetupError("/home/me/secret"), CallFailed(CallError(Code.TOOL, "my secret"))], ids=repr
)
def test_an_error_without_status_reaches_the_peer_without_its_text(error: ToolBusError) -> None:
    status, text = grpc_status(error)
    assert status == "INTERNAL"
    assert "secret" not in text


def test_many_faults_are_shortened_in_the_text_and_complete_in_the_data() -> None:
    error = InvalidTool([f"fault {number}" for number in range(25)])
    assert str(error).endswith("fault 9; and 15 more")
    assert len(error.faults) == 25


def test_ten_faults_are_all_in_the_sentence() -> None:
    assert str(InvalidTool([f"fault {number}" for number in range(10)])).endswith("; fault 9")


@pytest.mark.parametrize(("theirs", "fix"), [(2, "Update the bus"), (0, "Update the peer's SDK")])
def test_a_version_mismatch_names_the_side_that_is_too_old(theirs: int, fix: str) -> None:
    sentence = str(VersionMismatch(theirs, (1,)))
    assert "speaks version 1 " in sentence
    assert f"asked for version {theirs}" in sentence
    assert fix in sentence


def test_a_limit_names_itself_and_its_value() -> None:
    error = LimitExceeded("idle_timeout_seconds", 0.5, "the tool was silent")
    assert (error.name, error.value) == ("idle_timeout_seconds", 0.5)
    assert str(error) == "the tool was silent (limit idle_timeout_seconds = 0.5)"


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [("message_bytes", 16 * 1024 * 1024, "16777216"), ("tools", 100_000, "100000"), ("sessions", 10_000, "10000")],
)
def test_a_large_limit_is_shown_in_full(name: str, value: int, shown: str) -> None:
    assert str(LimitExceeded(name, value, "too much")) == f"too much (limit {name} = {shown})"


def test_a_failed_call_shows_its_code_and_keeps_its_error() -> None:
    call_error = CallError(Code.OVERLOADED, "every session is full", Stage.NOT_DISPATCHED, retry_safe=True)
    failed = CallFailed(call_error)
    assert str(failed) == "OVERLOADED: every session is full"
    assert failed.error is call_error


@pytest.mark.parametrize("unit", ["a", "工", "é", "%", "\n", "👋", "\ud800", "名 a%"])
@pytest.mark.parametrize("length", [1, 400, 1300, 1365, 1366, 2000, 5000, 50_000])
def test_the_text_of_a_status_has_at_most_4_kib_as_it_is_sent(unit: str, length: int) -> None:
    text = (unit * length)[:length]
    cut = status_text(text)
    encoded = len(quote_from_bytes(cut.encode("utf-8", "replace"), safe=bytes(range(0x20, 0x7F)).replace(b"%", b"")))
    assert encoded <= MAX_STATUS_BYTES
    if cut != text:
        assert cut.endswith(" …")
        assert text.startswith(cut.removesuffix(" …"))
        assert encoded > MAX_STATUS_BYTES - 30  # not more is cut than has to be
