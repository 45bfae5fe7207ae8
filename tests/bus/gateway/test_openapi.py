"""The gateway against its own description: every request that the document allows, and many that it does not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, assume, given, settings

from tests.bus.gateway.on_thread import bus_on_thread
from tests.support.examples import examples
from tests.support.waiting import WAIT_SECONDS

# schemathesis is imported in tests: it takes 24 MB and half a second, in every process that only collects them.
EXAMPLES = examples(4)  # of requests, for each operation and mode
OPERATIONS = (
    "GET /healthz",
    "GET /readyz",
    "POST /api/tools/register",
    "POST /api/tools/unregister",
    "POST /api/tools/clear",
    "GET /api/tools",
    "GET /api/tools/export",
    "GET /api/tools/search",
    "POST /api/tools/invoke",
    "POST /api/llm-tools/callback/{plugin_id}/{tool_name}",
    "POST /api/bus/{name}",
    "GET /api/calls",
    "GET /api/tasks",
    "GET /api/tasks/{task_id}",
    "GET /api/tasks/{task_id}/await",
    "DELETE /api/tasks/{task_id}",
    "POST /api/tasks/{task_id}/redirect",
    "GET /api/council",
    "GET /api/council/tools",
    "POST /api/council/run",
    "POST /api/council/retry",
    "POST /api/council/inline",
    "POST /api/council/inline/invoke",
    "GET /api/notifications",
    "GET /api/council/runs",
    "GET /api/council/runs/{run_id}",
)
ENDLESS = ("GET /api/tools/events", "GET /api/tasks/events", "GET /api/council/events")
# They take no data, or any text.
NEVER_WRONG = (
    "GET /healthz",
    "GET /readyz",
    "GET /api/council",
    "GET /api/council/runs",
    "GET /api/council/runs/{run_id}",
)
CASES = [
    (operation, mode)
    for operation in OPERATIONS
    for mode in ("positive", "negative")
    if mode == "positive" or operation not in NEVER_WRONG
]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where a bus answers that nobody else uses."""
    with bus_on_thread(roles=("default", "other")) as bus:
        yield f"http://{bus.http_address}"


@pytest.fixture(scope="module")
def described(address: str) -> Any:
    """The document, as it was read from the bus."""
    import schemathesis

    return schemathesis.openapi.from_url(f"{address}/openapi.json")


@pytest.fixture(scope="module")
def document(address: str) -> dict[str, Any]:
    """The document as it is."""
    found: dict[str, Any] = httpx.get(
        f"{address}/openapi.json", trust_env=False, verify=False, timeout=WAIT_SECONDS
    ).json()
    return found


@pytest.fixture(scope="module")
def checks() -> list[Any]:
    """What is checked of each answer.

    Not whether "positive" data is accepted or "negative" data refused: that a URL leads here is no schema's business,
    and "30" is a number to this contract (REST-3).
    """
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks as of_openapi

    return [
        not_a_server_error,
        of_openapi.status_code_conformance,
        of_openapi.content_type_conformance,
        of_openapi.response_headers_conformance,
        of_openapi.response_schema_conformance,
    ]


@pytest.mark.hypothesis
@pytest.mark.parametrize(("operation", "mode"), CASES)
def test_every_request_is_answered_as_the_document_says(
    described: Any, checks: list[Any], operation: str, mode: str
) -> None:
    from schemathesis import GenerationMode

    method, path = operation.split()
    cases = described[path][method].as_strategy(generation_mode=GenerationMode(mode))

    @settings(max_examples=EXAMPLES, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=cases)
    def ask(case: Any) -> None:
        assume((case.path_parameters or {}).get("name") != "drain")  # would end the bus
        case.call_and_validate(checks=checks, timeout=WAIT_SECONDS)

    ask()


def test_no_operation_is_left_out(document: dict[str, Any]) -> None:
    found = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert found == {*OPERATIONS, *ENDLESS}


def test_every_endpoint_says_what_it_is_for(document: dict[str, Any]) -> None:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation["summary"], (method, path)
            assert operation["description"].endswith("."), (method, path)
            assert operation["tags"], (method, path)


def test_every_post_has_an_example_that_fits_it(document: dict[str, Any], address: str) -> None:
    posts = {path: methods["post"] for path, methods in document["paths"].items() if "post" in methods}
    assert len(posts) >= 6
    for path, operation in posts.items():
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        if "$ref" in schema:
            schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        assert schema["examples"], path
        for example in schema["examples"]:
            url = path.format(plugin_id="p", tool_name="t", name="stats", task_id="task_0")
            answer = httpx.post(f"{address}{url}", json=example, trust_env=False, verify=False, timeout=WAIT_SECONDS)
            # Of an id that nobody can guess no example can be given.
            fits = 404 if "task_id" in path or path == "/api/council/retry" else 200
            assert answer.status_code == fits, (path, answer.text)


def test_the_page_of_documentation_needs_no_other_host(address: str) -> None:
    with httpx.Client(base_url=address, trust_env=False, verify=False, timeout=WAIT_SECONDS) as http:
        page = http.get("/docs")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        named = re.findall(r"""(?:href|src)=["']([^"']+)""", page.text) + re.findall(r"url: '([^']+)'", page.text)
        assert "/openapi.json" in named
        kinds = {".css": "text/css", ".js": "text/javascript", ".png": "image/png", ".json": "application/json"}
        for each in named:
            url = urljoin(f"{address}/docs", each)
            assert urlsplit(url).netloc == urlsplit(address).netloc, each
            asset = http.get(url)
            assert asset.status_code == 200, each
            assert asset.headers["content-type"].startswith(kinds[each[each.rindex(".") :]]), each
            assert asset.content
        assert not re.search(r"https?://|//[a-z]", page.text)
