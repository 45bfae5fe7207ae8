"""Makes the page that shows every endpoint with a form to try it (Swagger UI), and the policy under which it works.

The page comes from FastAPI, its script and style from files of this machine. A script within the page is allowed by its
hash, which is made from the same text: whatever else a browser found in the page would not run.
"""

from __future__ import annotations

import base64
import hashlib
import re

from fastapi.openapi.docs import get_swagger_ui_html

DOCS_PATH = "/docs"
ASSETS_PATH = "/static-offline-docs"

_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


class DocsPage:
    """The page as text, and its policy.

    Attributes:
        html: the page.
        policy: its Content-Security-Policy.
    """

    def __init__(self) -> None:
        page = get_swagger_ui_html(
            openapi_url="/openapi.json",
            title="toolbus - Swagger UI",
            swagger_js_url=f"{ASSETS_PATH}/swagger-ui-bundle.js",
            swagger_css_url=f"{ASSETS_PATH}/swagger-ui.css",
            swagger_favicon_url=f"{ASSETS_PATH}/favicon.png",
        )
        self.html = bytes(page.body).decode()
        hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()) for script in _SCRIPT.findall(self.html)]
        scripts = " ".join(f"'sha256-{each.decode()}'" for each in hashes)
        self.policy = "; ".join(
            (
                "default-src 'none'",
                f"script-src 'self' {scripts}",
                "style-src 'self' 'unsafe-inline'",  # Swagger UI sets style attributes
                "img-src 'self' data:",  # its icons
                "connect-src 'self'",  # what its forms send
                "base-uri 'none'",
                "form-action 'none'",
                "frame-ancestors 'none'",
            )
        )
