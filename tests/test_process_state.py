"""A file of tests leaves its process as it was."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

import toolbus.tools
from tests.support.process_state import (
    restored_environment,
    restored_imports,
    restored_loggers,
    restored_signals,
)
from toolbus.sdk.loader import load_plugin


def test_modules_from_elsewhere_and_other_names_of_toolbus_are_removed_and_libraries_stay(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("")
    (tmp_path / "main.py").write_text("import neighbour\nfrom toolbus.sdk import Plugin\nplugin = Plugin('calc')\n")
    path, modules = list(sys.path), set(sys.modules)
    sys.modules.pop("colorsys", None)
    with restored_imports():
        load_plugin(tmp_path / "main.py")
        sys.modules["tools"] = toolbus.tools
        import colorsys  # noqa: F401 - a module of the path

        assert {"neighbour", "tools", "colorsys"} <= sys.modules.keys()
    assert sys.path == path
    assert {each for each in set(sys.modules) - modules if each.startswith("toolbus_plugin_")} == set()
    assert not {"neighbour", "tools"} & sys.modules.keys()
    assert "colorsys" in sys.modules


def test_variables_folder_loggers_and_signals_are_as_before(tmp_path: Path) -> None:
    folder, handler = Path.cwd(), signal.getsignal(signal.SIGTERM)
    old, root = logging.getLogger("toolbus.test_process_state"), logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    with restored_environment(), restored_loggers(), restored_signals():
        os.environ["LEFT_BEHIND"] = "1"
        del os.environ["PATH"]
        os.chdir(tmp_path)
        old.propagate, old.disabled = False, True
        root.setLevel(level + 1)
        root.addHandler(logging.NullHandler())
        logging.getLogger("toolbus.test_process_state.new").setLevel(1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert "LEFT_BEHIND" not in os.environ
    assert os.environ["PATH"]
    assert Path.cwd() == folder
    assert (old.propagate, old.disabled) == (True, False)
    assert (root.level, root.handlers) == (level, handlers)
    assert logging.getLogger("toolbus.test_process_state.new").level == logging.NOTSET
    assert signal.getsignal(signal.SIGTERM) is handler
