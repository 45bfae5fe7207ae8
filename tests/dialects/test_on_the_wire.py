"""Compares what each provider's official client sends with what the tools say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.dialects.sample_tools import PLAIN
from tests.support.wire_capture import Capture, capturing
from toolbus.dialects import DIALECTS


@pytest.fixture(scope="module")
def capture() -> Iterator[Capture]:
    with capturing() as running:
        yield running


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_plain_tool_leaves_the_process_with_its_name_description_and_arguments(
    dialect: str, capture: Capture
) -> None:
    sent = capture.sent(dialect, [PLAIN])
    (tool,) = sent.tools
    assert (tool.name, tool.description) == (PLAIN.name, PLAIN.description)
    assert tool.schema is not None
    assert set(tool.schema["properties"]) == {"city", "days", "unit"}
    assert tool.schema["properties"]["city"]["description"] == "Name of the city."
