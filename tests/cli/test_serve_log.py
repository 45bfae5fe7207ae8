"""The log of ``toolbus serve``."""

import logging

from toolbus.bus.serve_settings import settle
from toolbus.cli import serve_log


def test_the_log_of_a_bus_has_no_line_for_each_request_to_a_sidecar() -> None:
    names = ("httpx", "uvicorn", "asyncio")
    before = [logging.getLogger(name).level for name in names]
    try:
        serve_log.log_to_stderr(settle({}, {}, None))
        assert not logging.getLogger("httpx").isEnabledFor(logging.INFO)
    finally:
        for name, level in zip(names, before, strict=True):
            logging.getLogger(name).setLevel(level)
