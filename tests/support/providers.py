"""Loads the client libraries of the providers when a test first uses them.

Together they take 170 MB and three seconds of processor time, in every test process that only collects the tests.
"""

from __future__ import annotations

import functools
import importlib
import ssl
import types
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, TypeAdapter

if TYPE_CHECKING:
    import anthropic
    import mcp
    import ollama
    import openai
    from google import genai
    from google.genai import types as genai_types
else:

    class _Library:
        """A module that is imported when one of its names is asked for."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__") or name == "_mock_name":  # pytest asks each name of a module whether it is a test
                raise AttributeError(name)
            return getattr(importlib.import_module(self._name), name)

    anthropic, mcp, ollama, openai = map(_Library, ("anthropic", "mcp", "ollama", "openai"))
    genai, genai_types = _Library("google.genai"), _Library("google.genai.types")

__all__ = ["OfficialType", "anthropic", "genai", "genai_client", "genai_types", "mcp", "ollama", "openai"]


class OfficialType:
    """A type of a client library, named by module and name, against which values are validated.

    Args:
        closed: whether a TypedDict refuses keys that it does not have, at its first level.
        many: whether values are lists of the type.
    """

    def __init__(self, module: str, name: str, *, closed: bool = False, many: bool = False) -> None:
        self._module, self._name = module, name
        self._closed, self._many = closed, many

    @functools.cached_property
    def kind(self) -> Any:
        """The type itself."""
        return getattr(importlib.import_module(self._module), self._name)

    @functools.cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        if self._closed:
            self.kind.__pydantic_config__ = ConfigDict(extra="forbid")
        kind: Any = types.GenericAlias(list, (self.kind,)) if self._many else self.kind
        return TypeAdapter(kind)

    def validate_python(self, value: Any) -> Any:
        """Returns a value as the library reads it.

        Raises:
            ValidationError: of pydantic: the library would not take it.
        """
        return self._adapter.validate_python(value)


def genai_client(url: str) -> Any:
    """Creates a client for a server without TLS."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # given, so that it does not read the system's certificates
    trusting.check_hostname = False
    trusting.verify_mode = ssl.CERT_NONE
    options: Any = {"base_url": url, "client_args": {"verify": trusting}, "async_client_args": {"ssl": trusting}}
    return genai.Client(api_key="k", vertexai=False, http_options=options)
