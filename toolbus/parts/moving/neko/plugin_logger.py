"""Provides a plugin's logger, whose messages may have `{}` for arguments, as in loguru, or `%s`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

SUCCESS = 25
TRACE = 5
_OF_LOGGING = ("exc_info", "extra", "stack_info", "stacklevel")  # keywords of `logging`, not arguments of the message
_LEVELS = {"TRACE": TRACE, "SUCCESS": SUCCESS}


class PluginLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger of `logging` whose messages may also be written as loguru's are.

    A message with braces is filled by `str.format`, another one by `%`; one that fits neither is logged with its
    arguments behind it. A message without arguments is logged as it is.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})

    def log(self, level: int | str, msg: object, *args: object, **kwargs: Any) -> None:
        """Logs a message; `level` is a number or a name, such as ``INFO``."""
        number = level if isinstance(level, int) else _LEVELS.get(level.upper()) or logging.getLevelName(level.upper())
        if not isinstance(number, int) or not self.logger.isEnabledFor(number):
            return
        known = {key: kwargs.pop(key) for key in _OF_LOGGING if key in kwargs}
        known["stacklevel"] = int(known.get("stacklevel", 1)) + 1
        self.logger.log(number, "%s", filled(msg, args, kwargs), **known)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Returns both as they are."""
        return msg, kwargs

    def trace(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Logs below DEBUG."""
        self.log(TRACE, msg, *args, **kwargs)

    def success(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Logs between INFO and WARNING."""
        self.log(SUCCESS, msg, *args, **kwargs)

    def bind(self, **extra: Any) -> PluginLogger:
        """Returns the logger itself; bound values are not shown."""
        return self

    def opt(self, **options: Any) -> PluginLogger:
        """Returns the logger itself; the options of loguru have no effect."""
        return self

    @contextmanager
    def contextualize(self, **extra: Any) -> Iterator[None]:
        """Does nothing; bound values are not shown."""
        yield


def plugin_logger(plugin_id: str, suffix: str | None = None) -> PluginLogger:
    """Returns the logger of a plugin or of a part of it, ``toolbus.plugin.ID[.SUFFIX]``."""
    return PluginLogger(logging.getLogger(".".join(filter(None, ("toolbus.plugin", plugin_id, suffix)))))


def filled(message: object, args: tuple[object, ...], named: dict[str, Any]) -> str:
    """Returns a message with its arguments filled in; never raises."""
    text = str(message)
    if not args and not named:
        return text
    if "{" in text:
        try:
            return text.format(*args, **named)
        except (IndexError, KeyError, ValueError, AttributeError, TypeError):
            pass  # braces of another kind; perhaps it is written with %
    try:
        return text % (args[0] if len(args) == 1 and isinstance(args[0], dict) else args)
    except (TypeError, ValueError, KeyError):
        return " ".join([text, *map(repr, args), *(f"{key}={value!r}" for key, value in named.items())])
