"""The program that measures MCP clients of others: its table, and a row of the client that is installed here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lab.mcp_clients import __main__ as mcp_clients

pytestmark = pytest.mark.lab


async def test_a_client_that_is_installed_is_driven_through_all_that_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_clients, "NOTICE_SECONDS", 2.0)
    command = [sys.executable, str(mcp_clients.HERE / "python_client.py"), "mcp"]
    row = await mcp_clients.measure(mcp_clients.Library("mcp", "mcp"), command, tmp_path)
    assert len(row) == len(mcp_clients.HEAD)
    assert not [cell for cell in row if cell.startswith("error")]
    assert row[0] == "`mcp`"


def test_the_page_has_a_row_for_each_client_that_is_measured() -> None:
    page = mcp_clients.PAGE.read_text(encoding="utf-8")
    measured = page.partition(mcp_clients.BEGIN)[2].partition(mcp_clients.END)[0]
    assert f"| {' | '.join(mcp_clients.HEAD)} |" in measured
    for library in mcp_clients.LIBRARIES:
        assert f"`{library.package}`" in measured
