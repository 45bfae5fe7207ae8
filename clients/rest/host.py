"""Lists the tools of a bus over HTTP and calls one. Needs httpx and the standard library.

On this machine no key is needed. A bus on another machine is reached over HTTPS, with a credential file that
TOOLBUS_CREDENTIAL names: its token goes with every request, and its authority alone is trusted.

python clients/rest/host.py [NAME [ARGUMENTS_JSON]]
"""

from __future__ import annotations

import json
import os
import ssl
import stat
import sys
import tomllib
from typing import Any

import httpx

DEFAULT = "http://127.0.0.1:48911"
SECONDS = 310.0  # more than a call may take
LOCAL = ("127.0.0.1", "localhost", "::1")


def read_credential(path: str) -> dict[str, Any]:
    """Returns the values of a credential file; {} without a path."""
    if not path:
        return {}
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid not in (os.geteuid(), 0) or stat.S_IMODE(status.st_mode) & 0o077:
            sys.exit(f"{path} must belong to this user, who alone may read it: chmod 600 {path}")
        return tomllib.load(file)


def connect(credential: dict[str, Any]) -> httpx.Client:
    """Returns a client of the bus that MAIN_SERVER or the credential names."""
    named = credential.get("address", "")
    url = httpx.URL(os.environ.get("MAIN_SERVER") or (named if named.startswith("https://") else DEFAULT))
    if credential and url.scheme != "https" and url.host not in LOCAL:
        sys.exit(f"a token is not sent to {url} in plain text: name an https URL in MAIN_SERVER")
    headers = {"Authorization": f"Bearer {credential['token']}"} if "token" in credential else {}
    verify: ssl.SSLContext | bool = ssl.create_default_context(cadata=credential["ca"]) if "ca" in credential else True
    return httpx.Client(base_url=url, headers=headers, verify=verify, timeout=SECONDS, trust_env=False)


def main() -> int:
    """Lists, calls and prints; 0 if the tool succeeded."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    arguments = sys.argv[2] if len(sys.argv) > 2 else "{}"
    with connect(read_credential(os.environ.get("TOOLBUS_CREDENTIAL", ""))) as bus:
        try:
            listed = bus.get("/api/tools")
            if listed.status_code in (401, 403):  # a missing or refused key; a key without permission
                print(f"the bus at {bus.base_url} refused: {listed.text}", file=sys.stderr)
                return 1
            for role, tools in listed.raise_for_status().json()["tools_by_role"].items():
                print(f"{role}:")
                for tool in tools:
                    print(f"  {tool['name']} ({tool['source']}): {tool['description']}")
            if not name:
                return 0
            called = bus.post("/api/tools/invoke", json={"name": name, "arguments": json.loads(arguments)})
            result = called.raise_for_status().json()
        except httpx.HTTPError as error:
            print(f"no bus at {bus.base_url}: {error}", file=sys.stderr)
            return 3
    print(json.dumps(result["error"] or result["output"], ensure_ascii=False))
    return int(result["is_error"])


if __name__ == "__main__":
    sys.exit(main())
