"""Defines the exceptions that N.E.K.O. plugins catch and return, and those for names that toolbus does not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toolbus.errors import ToolBusError


class SdkError(RuntimeError):
    """The base of all of these: an operation of a plugin failed.

    Attributes:
        code: a short name of the reason; None without one.
        details: further values.
        context: further keywords, which are attributes too.
    """

    def __init__(self, message: str = "", *, code: str | None = None, details: object = None, **context: Any) -> None:
        super().__init__(message)
        self.code = code
        self.details = details
        self.context = {key: value for key, value in context.items() if value is not None}
        for key, value in self.context.items():
            setattr(self, key, value)


class ResultError(SdkError):
    """`unwrap` was called on an `Err` whose error is not an exception."""


class ValidationError(SdkError):
    """An argument or a value of the configuration breaks its rule."""


class NotFoundError(SdkError):
    """A requested object does not exist."""


class TransportError(SdkError):
    """A file or another program could not be reached."""


class ConflictError(SdkError):
    """An object of that name exists already."""


class PluginCallError(SdkError):
    """Another plugin could not be called."""


class EntryConflictError(ToolBusError, ConflictError):
    """A plugin object already has a tool of that name."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(name)

    def __str__(self) -> str:
        return f"this plugin already has a tool {self.name!r}: unregister_llm_tool({self.name!r}) first, or rename one"


@dataclass(frozen=True, slots=True)
class Absence:
    """Why toolbus does not have a name of N.E.K.O.

    Attributes:
        purpose: its purpose there, as the rest of a sentence.
        remedy: what to use instead, as a sentence.
    """

    purpose: str
    remedy: str

    def explain(self, name: str) -> str:
        """Returns the text of an error about it."""
        return f"toolbus has no {name}: in N.E.K.O. it {self.purpose}. {self.remedy}"


class NotProvided(ToolBusError, AttributeError):
    """A plugin used an attribute that only N.E.K.O. has; the text has its name, its purpose and what to use."""

    def __init__(self, name: str, absence: Absence) -> None:
        super().__init__(absence.explain(name))
        self.absence = absence


class ModuleNotProvided(ToolBusError, ModuleNotFoundError):
    """A plugin imported a name that only N.E.K.O. has; the text has the name, its purpose and what to use."""

    def __init__(self, name: str, absence: Absence) -> None:
        super().__init__(absence.explain(name))
        self.name = name
        self.absence = absence
        self.remedy = absence.remedy  # for the program that imports the plugin
