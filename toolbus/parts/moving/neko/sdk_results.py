"""Defines `Ok` and `Err` with the methods that N.E.K.O. plugins call on them.

They are the `Ok` and `Err` that a handler may return anywhere (REST-62), with more methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Literal, NoReturn, TypeAlias, TypeVar

from toolbus.functions import reply
from toolbus.parts.moving.neko.sdk_errors import ResultError

T = TypeVar("T")
E = TypeVar("E")


class Ok(reply.Ok, Generic[T]):
    """Success with a value."""

    __slots__ = ()

    def is_ok(self) -> Literal[True]:
        """Tells that it is a success."""
        return True

    def is_err(self) -> Literal[False]:
        """Tells that it is a success."""
        return False

    def err(self) -> None:
        """Returns no error."""

    def value_or_none(self) -> Any:
        """Returns the value."""
        return self.value

    def map(self, function: Callable[[Any], Any]) -> Ok[Any]:
        """Returns the function's value as a success."""
        return Ok(function(self.value))

    def map_err(self, function: Callable[[Any], Any]) -> Ok[T]:
        """Returns itself."""
        return self

    def bind(self, function: Callable[[Any], Any]) -> Any:
        """Returns the result that the function makes of the value."""
        return function(self.value)

    def unwrap(self) -> Any:
        """Returns the value."""
        return self.value

    def unwrap_or(self, default: object) -> Any:
        """Returns the value."""
        return self.value

    def raise_for_err(self) -> None:
        """Does nothing."""


class Err(reply.Err, Generic[E]):
    """Failure with a reason."""

    __slots__ = ()

    def is_ok(self) -> Literal[False]:
        """Tells that it is a failure."""
        return False

    def is_err(self) -> Literal[True]:
        """Tells that it is a failure."""
        return True

    def err(self) -> Any:
        """Returns the reason."""
        return self.error

    def value_or_none(self) -> None:
        """Returns None."""

    def map(self, function: Callable[[Any], Any]) -> Err[E]:
        """Returns itself."""
        return self

    def map_err(self, function: Callable[[Any], Any]) -> Err[Any]:
        """Returns a failure with the function's value."""
        return Err(function(self.error))

    def bind(self, function: Callable[[Any], Any]) -> Err[E]:
        """Returns itself."""
        return self

    def unwrap(self) -> NoReturn:
        """Raises the reason.

        Raises:
            ResultError: the reason is not an exception.
        """
        if isinstance(self.error, Exception):
            raise self.error
        raise ResultError(self.error if isinstance(self.error, str) else repr(self.error))

    def unwrap_or(self, default: Any) -> Any:
        """Returns the default."""
        return default

    def raise_for_err(self) -> NoReturn:
        """Raises the reason, as `unwrap` does."""
        self.unwrap()


Result: TypeAlias = Ok[T] | Err[E]


def is_ok(result: object) -> bool:
    """Tells whether a result is a success."""
    return isinstance(result, reply.Ok)


def is_err(result: object) -> bool:
    """Tells whether a result is a failure."""
    return isinstance(result, reply.Err)


def unwrap(result: Ok[Any] | Err[Any]) -> Any:
    """Returns a result's value or raises its reason; `must` is the same."""
    return result.unwrap()


def unwrap_or(result: Ok[Any] | Err[Any], default: Any) -> Any:
    """Returns a result's value, or the default for a failure."""
    return result.unwrap_or(default)


def raise_for_err(result: Ok[Any] | Err[Any]) -> None:
    """Raises the reason of a failure."""
    result.raise_for_err()


def map_result(result: Ok[Any] | Err[Any], function: Callable[[Any], Any]) -> Ok[Any] | Err[Any]:
    """Returns a success with what the function makes of the value, or the failure itself."""
    return result.map(function)


def map_err_result(result: Ok[Any] | Err[Any], function: Callable[[Any], Any]) -> Ok[Any] | Err[Any]:
    """Returns a failure with what the function makes of the reason, or the success itself."""
    return result.map_err(function)


def bind_result(result: Ok[Any] | Err[Any], function: Callable[[Any], Any]) -> Any:
    """Returns what the function makes of the value of a success, or the failure itself."""
    return result.bind(function)


def match_result(result: Ok[Any] | Err[Any], on_ok: Callable[[Any], Any], on_err: Callable[[Any], Any]) -> Any:
    """Returns what one function makes of the value of a success, or the other of the reason of a failure."""
    return on_ok(result.unwrap()) if is_ok(result) else on_err(result.err())


def capture(function: Callable[[], Any]) -> Ok[Any] | Err[Any]:
    """Returns what a function returns as a success, or what it raises as a failure."""
    try:
        return Ok(function())
    except Exception as problem:
        return Err(problem)


def ok(data: Any = None, *, message: str = "", **meta: Any) -> dict[str, Any]:
    """Returns a success as older plugins write it: a dict."""
    envelope = {"success": True, "data": data, "message": message, "error": None}
    return {**envelope, "meta": meta} if meta else envelope


def fail(code: object, message: str, *, details: Any = None, retriable: bool = False, **meta: Any) -> dict[str, Any]:
    """Returns a failure as older plugins write it; the model reads it as one."""
    error = {"code": str(code), "message": message, "details": details, "retriable": retriable}
    envelope = {"success": False, "data": None, "message": "", "error": error, "is_error": True}
    return {**envelope, "meta": meta} if meta else envelope


must = unwrap
