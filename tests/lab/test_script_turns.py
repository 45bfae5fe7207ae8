"""The count of what a model reads for one task, with scripts and without."""

import pytest

from lab.script_turns import measure

pytest.importorskip("quickjs")


async def test_a_script_takes_fewer_requests_and_a_fraction_of_the_characters() -> None:
    by_call, at_once, script = await measure(8)
    assert [each["requests"] for each in (by_call, at_once, script)] == [10, 3, 2]
    assert [each["calls"] for each in (by_call, at_once, script)] == [9, 9, 1]
    assert script["characters"] < at_once["characters"] < by_call["characters"] / 2
