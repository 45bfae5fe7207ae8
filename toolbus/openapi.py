"""Makes the operations of an OpenAPI document tools: ``from_openapi("https://…/openapi.json").run()`` is a plugin.

Each public name is loaded from its own module when it is first used. Requests need ``pip install 'toolbus[openapi]'``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolbus.common.lazy import lazily

if TYPE_CHECKING:
    from toolbus.parts.openapi.api import Api, ApiTool, LeftOut, read_api
    from toolbus.parts.openapi.api_plugin import ApiPlugin, from_openapi
    from toolbus.parts.openapi.api_settings import ApiSettings, Secret, env
    from toolbus.parts.openapi.document import Document, read_document

__all__ = [
    "ApiPlugin", "from_openapi",
    "ApiSettings", "Secret", "env",
    "Api", "ApiTool", "LeftOut", "read_api",
    "Document", "read_document",
]  # fmt: skip

__getattr__, __dir__ = lazily(
    __name__,
    {
        "parts.openapi.api_plugin": "ApiPlugin from_openapi",
        "parts.openapi.api_settings": "ApiSettings Secret env",
        "parts.openapi.api": "Api ApiTool LeftOut read_api",
        "parts.openapi.document": "Document read_document",
    },
)
