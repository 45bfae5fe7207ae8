"""Shows MCP clients of other machines where they get a token for `/mcp` (RFC 9728): from the configured issuers.

The document needs no key: a client without a token reads it. It holds the names of the issuers, and the address that
the client used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.responses import JSONResponse
from starlette.types import Scope

WELL_KNOWN = "/.well-known/oauth-protected-resource"
RESOURCE = "/mcp"
_PLAIN_HOST = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?", re.ASCII)


class ResourceMetadata:
    """Describes `/mcp` as a resource that tokens of issuers open.

    Args:
        issuers: their names; those that are not https URLs are left out, since clients cannot use them.
    """

    def __init__(self, issuers: Sequence[str]) -> None:
        self._issuers = [each for each in issuers if each.startswith("https://")]

    def response(self, scope: Scope) -> JSONResponse | None:
        """Returns the document for a request; None for another path, or without issuers."""
        path: str = scope["path"]
        resource = path.removeprefix(WELL_KNOWN)
        if resource == path or not _is_resource(resource) or scope["method"] not in ("GET", "HEAD"):
            return None
        origin = self._origin(scope)
        if origin is None:
            return None
        document = {
            "resource": origin + resource,
            "authorization_servers": self._issuers,
            "bearer_methods_supported": ["header"],
            "resource_name": "toolbus",
        }
        return JSONResponse(document, headers={"Cache-Control": "no-store"})

    def challenge(self, scope: Scope) -> str:
        """Returns the WWW-Authenticate header of a 401."""
        path: str = scope["path"]
        origin = self._origin(scope) if _is_resource(path) else None
        return "Bearer" if origin is None else f'Bearer resource_metadata="{origin}{WELL_KNOWN}{path}"'

    def _origin(self, scope: Scope) -> str | None:
        """Returns the address under which the client reached this listener; None without issuers or a plain host."""
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if not self._issuers or len(hosts) != 1 or not _PLAIN_HOST.fullmatch(hosts[0]):
            return None
        return f"https://{hosts[0]}"


def _is_resource(path: str) -> bool:
    """Tells whether a path is one of MCP clients that may stand in a header between quotes."""
    return re.fullmatch(RESOURCE + r"(?:/[A-Za-z0-9._~-]{1,100})?", path, re.ASCII) is not None
