"""Defines the errors of calls, the exceptions of the bus, and the one table from these to gRPC and HTTP statuses.

The tree, by whose fault it is::

    ToolBusError
    ├── RequestError            the peer's request cannot be done as it is
    │   ├── InvalidTool         a tool breaks a rule; carries every fault found
    │   ├── InvalidRequest      any other part of a request breaks a rule
    │   ├── ProtocolError       a message arrived where the protocol forbids it
    │   ├── VersionMismatch     the peer speaks another version of the protocol
    │   ├── UnknownRole         that role does not exist
    │   ├── SessionGone         the session_id names no live session
    │   ├── NotPermitted        the source or identity lacks a permission
    │   │   ├── Unauthenticated no key proves who calls, or it is not valid (any more)
    │   │   └── NotApproved     a pinned source declares tools that no operator has approved
    │   ├── AlreadyAttached     the same source and instance attach too often
    │   ├── LimitExceeded       a limit of the bus was hit
    │   └── NotOffered          the server does not do that: it is not a toolbus, or an older one
    ├── NotKept                 the request is done, but could not be persisted
    ├── NotAudited              the request is not done, because the audit could not be written
    ├── PeerLost                the other side went away or stopped answering
    ├── CallFailed              a call failed; carries the CallError
    └── SetupError              this process cannot start as configured (address, file, option)

A failed call is data (``ToolResult.error``) and travels as a result; the bus raises none of these for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from toolbus.v1 import tool_pb2 as pb

_Member = TypeVar("_Member", bound=IntEnum)


class Code(IntEnum):
    """What went wrong with a call: ``ErrorCode`` of the wire, by its short name."""

    UNSPECIFIED = 0
    TOOL = 1
    NOT_FOUND = 2
    INVALID_ARGUMENTS = 3
    PERMISSION_DENIED = 4
    CATALOG_STALE = 5
    OVERLOADED = 6
    UNAVAILABLE = 7
    DEADLINE_EXCEEDED = 8
    CANCELLED = 9
    RESULT_TOO_LARGE = 10
    SECRET_BLOCKED = 11
    REPEATED = 12
    INTERNAL = 13


class Stage(IntEnum):
    """How far a call had got: ``CallStage`` of the wire, by its short name."""

    UNSPECIFIED = 0
    NOT_DISPATCHED = 1
    DISPATCHED = 2
    ACCEPTED = 3
    UNKNOWN = 4


@dataclass(frozen=True, slots=True)
class CallError:
    """Why a call failed, how far it had got and whether it is safe to retry."""

    code: Code
    message: str
    stage: Stage = Stage.UNKNOWN
    retry_safe: bool = False
    limit: tuple[str, float] | None = None
    retry_after_seconds: float = 0.0
    reason: str = ""

    @classmethod
    def from_wire(cls, message: pb.CallError) -> CallError:
        """Copies the wire form; a code of a newer protocol reads as INTERNAL."""
        return cls(
            code=_member(Code, message.code, Code.INTERNAL),
            message=message.message,
            stage=_member(Stage, message.stage, Stage.UNKNOWN),
            retry_safe=message.retry_safe,
            limit=(message.limit.name, message.limit.value) if message.HasField("limit") else None,
            retry_after_seconds=message.retry_after_seconds,
            reason=message.reason,
        )

    def after(self, refusal: CallError) -> CallError:
        """Returns this error, of the last attempt of a call, as that of a call that was refused before.

        A tool that disappears while its caller waits for the plugin is unavailable and not unknown: the plugin may
        return later, and the refusal says why it is away.
        """
        if self.code is not Code.NOT_FOUND or refusal.code is not Code.UNAVAILABLE:
            return self
        return replace(refusal, message=f"{refusal.message}; the last attempt: {self.message}")

    def described(self) -> dict[str, Any]:
        """Returns it as a JSON object."""
        limit = {"name": self.limit[0], "value": self.limit[1]} if self.limit else None
        return {**asdict(self), "code": self.code.name, "stage": self.stage.name, "limit": limit}

    def to_wire(self) -> pb.CallError:
        """Returns the wire form."""
        from toolbus.v1 import tool_pb2 as pb  # programs that only raise and catch errors do not load protobuf

        return pb.CallError(
            code=self.code.value,  # type: ignore[arg-type]  # protoc's enum types are ints at run time
            stage=self.stage.value,  # type: ignore[arg-type]
            message=self.message,
            retry_safe=self.retry_safe,
            limit=pb.Limit(name=self.limit[0], value=self.limit[1]) if self.limit else None,
            retry_after_seconds=self.retry_after_seconds,
            reason=self.reason,
        )


class ToolBusError(Exception):
    """Root of all exceptions that this package raises on purpose."""


class RequestError(ToolBusError):
    """The peer's request cannot be done as it is."""


class InvalidTool(RequestError):
    """A declared tool breaks one or more rules.

    Attributes:
        faults: a text for each, with the tool, the value, the rule and how to fix it.
    """

    def __init__(self, faults: Sequence[str]) -> None:
        self.faults = tuple(faults)
        super().__init__(self.faults)

    def __str__(self) -> str:
        shown = "; ".join(self.faults[:10])
        more = len(self.faults) - 10
        return shown + (f"; and {more} more" if more > 0 else "")


class InvalidRequest(RequestError):
    """Part of a request breaks a rule."""


class ProtocolError(RequestError):
    """A message arrived where the protocol does not allow it."""


class VersionMismatch(RequestError):
    """The peer speaks a version of the protocol that this side does not."""

    def __init__(self, theirs: int, ours: Sequence[int]) -> None:
        self.theirs = theirs
        self.ours = tuple(ours)
        super().__init__(theirs, self.ours)

    def __str__(self) -> str:
        spoken = ", ".join(map(str, self.ours))
        return (
            f"this bus speaks version {spoken} of the toolbus protocol, the peer asked for version {self.theirs}. "
            + (
                "Update the bus, or set attach.protocol_version to one that it speaks."
                if self.theirs > max(self.ours)
                else "Update the peer's SDK, and set attach.protocol_version."
            )
        )


class UnknownRole(RequestError):
    """That role does not exist."""

    def __init__(self, role: str) -> None:
        self.role = role
        super().__init__(role)

    def __str__(self) -> str:
        return f"unknown role: {self.role if len(self.role) <= 200 else self.role[:197] + '...'}"


class SessionGone(RequestError):
    """The session_id names no live session."""

    def __str__(self) -> str:
        return "no live session has this session_id: it ended, or the bus restarted. Attach again and use the new one."


class NotPermitted(RequestError):
    """The source or identity lacks a permission."""


class NotApproved(NotPermitted):
    """A pinned source declares other tools than those that were trusted."""


class Unauthenticated(NotPermitted):
    """No key proves who calls, or one that is unknown, has expired or was revoked."""


class AlreadyAttached(RequestError):
    """The same source and instance attach too often."""


class LimitExceeded(RequestError):
    """A limit of the bus was hit.

    Attributes:
        name: the limit's name, as in the table of limits.
        value: its value, in the unit that the name says.
    """

    def __init__(self, name: str, value: float, sentence: str) -> None:
        self.name = name
        self.value = value
        self.sentence = sentence
        super().__init__(name, value, sentence)

    def __str__(self) -> str:
        return f"{self.sentence} (limit {self.name} = {self.value:.15g})"


class NotOffered(RequestError):
    """The server does not do what was requested: it is not a toolbus, or an older one."""


class NotKept(ToolBusError):
    """The request is done, but could not be persisted, so its effect ends with the process."""


class NotAudited(ToolBusError):
    """The request is not done, because the audit of it could not be written."""


class PeerLost(ToolBusError):
    """The other side went away or stopped answering."""


class CallFailed(ToolBusError):
    """A call failed; raised only where a program wants exceptions (``Result.unwrap``)."""

    def __init__(self, error: CallError) -> None:
        self.error = error
        super().__init__(error)

    def __str__(self) -> str:
        return f"{self.error.code.name}: {self.error.message}"


class SetupError(ToolBusError):
    """This process cannot start as configured.

    Attributes:
        loc: the place of the value that breaks a rule: keys and list indexes from the outside in; () if unknown.
    """

    def __init__(self, message: str = "", loc: tuple[str | int, ...] = ()) -> None:
        super().__init__(message)
        self.loc = loc


# Class → (gRPC status name, HTTP status). Order matters: the first class that fits wins.
STATUS: dict[type[ToolBusError], tuple[str, int]] = {
    InvalidTool: ("INVALID_ARGUMENT", 422),
    InvalidRequest: ("INVALID_ARGUMENT", 422),
    ProtocolError: ("INVALID_ARGUMENT", 400),
    VersionMismatch: ("FAILED_PRECONDITION", 400),
    UnknownRole: ("NOT_FOUND", 404),
    SessionGone: ("FAILED_PRECONDITION", 409),
    Unauthenticated: ("UNAUTHENTICATED", 401),
    NotApproved: ("PERMISSION_DENIED", 403),
    NotPermitted: ("PERMISSION_DENIED", 403),
    AlreadyAttached: ("ALREADY_EXISTS", 409),
    LimitExceeded: ("RESOURCE_EXHAUSTED", 429),
    NotOffered: ("UNIMPLEMENTED", 501),
    NotKept: ("UNAVAILABLE", 503),
    NotAudited: ("UNAVAILABLE", 503),
    PeerLost: ("UNAVAILABLE", 503),
}


def http_status(error: BaseException) -> int:
    """Returns the HTTP status of an error; 500 for a foreign one."""
    return next((status for kind, (_, status) in STATUS.items() if isinstance(error, kind)), 500)


INTERNAL_DETAIL = "a fault of the bus; its log has the details"  # all that a peer learns of an unexpected exception


def grpc_status(error: BaseException) -> tuple[str, str]:
    """Returns the gRPC status name and the text of an error; INTERNAL without detail for a foreign one."""
    for kind, (status, _) in STATUS.items():
        if isinstance(error, kind):
            return status, str(error)
    return "INTERNAL", INTERNAL_DETAIL


# Encoded bytes of the text of a status, which is a header of HTTP/2: libraries refuse headers of more than 8 KiB (some)
# or 16 KiB (grpcio), and report RESOURCE_EXHAUSTED in place of the status.
MAX_STATUS_BYTES = 4096
_CUT = " …"


def status_text(text: str) -> str:
    """Returns the text of a gRPC status, cut so that it has at most MAX_STATUS_BYTES as it is sent.

    gRPC sends ASCII as it is, except for `%` and control characters, and each other byte of UTF-8 as three characters.
    """
    if 3 * len(text) <= MAX_STATUS_BYTES and text.isascii():
        return text
    size, room = 0, MAX_STATUS_BYTES - _encoded_size(_CUT)
    end = len(text)
    for index, character in enumerate(text):
        if size <= room:
            end = index
        size += _encoded_size(character)
        if size > MAX_STATUS_BYTES:
            return text[:end] + _CUT
    return text


def _encoded_size(text: str) -> int:
    return sum(1 if 0x20 <= byte <= 0x7E and byte != 0x25 else 3 for byte in text.encode("utf-8", "replace"))


def _member(kind: type[_Member], number: int, otherwise: _Member) -> _Member:
    """Returns a number of the wire as a member; one that a newer protocol added reads as a known one."""
    try:
        return kind(number)
    except ValueError:
        return otherwise
