from __future__ import annotations

from pathlib import Path

import pytest

from toolbus.processes.plugin_process import main

RUNS_ITSELF = """
import asyncio
from toolbus import Plugin
plugin = Plugin("itself")
asyncio.run(plugin.close())  # as at the end of a `plugin.run()` outside of a `__main__` guard
"""


def test_a_plugin_that_its_file_has_run_already_is_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "itself.py"
    file.write_text(RUNS_ITSELF)
    assert main([str(file)]) == 0
    assert capsys.readouterr().err == ""
