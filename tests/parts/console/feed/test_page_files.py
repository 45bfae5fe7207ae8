"""The files of the console's page: which are served, with which headers, and that no path leads out of the folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parts.console.feed.console_bus import console_bus
from toolbus.parts.console.app import HOME, POLICY, PageFiles


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    page = tmp_path / "page"
    (page / "pages").mkdir(parents=True)
    (page / "index.html").write_text(
        '<head><link href="style.css"></head><script src="./app.mjs"></script>'
        '<a href="https://example.org/style.css">x</a><img src="missing.png">'
    )
    (page / "style.css").write_text("body {}")
    (page / "app.mjs").write_text('import "./pages/calls.mjs";')
    (page / "pages" / "calls.mjs").write_text("export const page = 1;")
    (page / "notes.py").write_text("secret = 1")
    (tmp_path / "app.mjs").write_text("outside")
    return page


def test_the_page_loads_files_of_one_version_and_these_never_change(folder: Path) -> None:
    files = PageFiles(folder)
    found = files.find(HOME)
    assert found is not None
    index, cache = found
    below = f"/console/{files.version}"
    assert index.content.decode() == (
        f'<head><link href="{below}/style.css">'
        f'<link rel="modulepreload" href="{below}/app.mjs">\n'
        f'<link rel="modulepreload" href="{below}/pages/calls.mjs">\n'
        f'</head><script src="{below}/app.mjs"></script>'
        '<a href="https://example.org/style.css">x</a><img src="missing.png">'
    )
    assert (index.content_type, cache) == ("text/html; charset=utf-8", "no-cache")
    script = files.find(f"{below}/pages/calls.mjs")
    assert script is not None
    assert script[0].content_type == "text/javascript; charset=utf-8"
    assert "immutable" in script[1]
    (folder / "pages" / "calls.mjs").write_text("export const page = 2;")
    changed = PageFiles(folder)
    assert changed.version != files.version
    assert changed.find(f"{below}/pages/calls.mjs") is None


@pytest.mark.parametrize(
    "path",
    [
        "../app.mjs",
        "pages/../../app.mjs",
        "/etc/passwd",
        "notes.py",
        "pages",
        "pages/",
        "%2e%2e/app.mjs",
        "missing.mjs",
    ],
)
def test_no_path_leads_out_of_the_folder_or_to_a_file_that_is_not_of_the_page(folder: Path, path: str) -> None:
    files = PageFiles(folder)
    assert files.find(HOME + path) is None
    assert files.find(f"{HOME}{files.version}/{path}") is None


async def test_a_browser_gets_the_files_with_headers_that_trust_nothing_else() -> None:
    async with console_bus() as (_, client):
        moved = await client.get("/console")
        assert (moved.status_code, moved.headers["location"]) == (307, "/console/")
        page = await client.get("/console/")
        assert page.headers["content-security-policy"] == POLICY
        style = await client.get("/console/style.css")
        assert style.status_code == 200
        assert style.headers["content-type"] == "text/css; charset=utf-8"
        assert style.headers["x-content-type-options"] == "nosniff"
        assert style.headers["x-frame-options"] == "DENY"
        assert style.headers["cross-origin-opener-policy"] == "same-origin"
        assert style.headers["referrer-policy"] == "no-referrer"
        known = {"If-None-Match": f'"other", W/{style.headers["etag"]}'}
        assert (await client.get("/console/style.css", headers=known)).status_code == 304
        head = await client.head("/console/style.css")
        assert (head.status_code, head.content, head.headers["content-length"]) == (200, b"", str(len(style.content)))
        assert (await client.post("/console/style.css")).status_code == 405
        for path in ("/console/%2e%2e/digest.py", "/console/..%2fdigest.py", "/console//etc/passwd", "/api/console/x"):
            assert (await client.get(path)).status_code == 404


async def test_programs_of_this_machine_may_do_everything() -> None:
    async with console_bus() as (bus, client):
        me = (await client.get("/api/console/me")).json()
        assert me["administer"] == ["*"]
        assert me["bus_id"] == bus.core.config.bus_id


@pytest.mark.parametrize("console", [True, False])
async def test_the_root_leads_to_the_console_or_says_that_it_is_off(console: bool) -> None:
    async with console_bus(console=console) as (_, http):
        answer = await http.get("/")
        assert answer.status_code == (307 if console else 404)
        if console:
            assert (await http.get(answer.headers["location"])).status_code == 200
        else:
            assert "its console is off" in answer.json()["detail"]
