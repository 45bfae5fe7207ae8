"""Schemas in checked code are judged as the bus judges them, where they are written out."""

from pathlib import Path

import pytest

from toolbus.parts.moving.check.neko_rules import NEKO
from toolbus.parts.moving.check.source_file import Effect, System, check
from toolbus.parts.moving.check.stargazer_rules import STARGAZER

UNKNOWN = '{"type": "object", "properties": {"x": {"type": "strin"}}}'
PYTHON_TOOL = "async def run(x=''): return x\nTOOL_NAME = 't'\n"


@pytest.mark.parametrize(
    ("system", "text"),
    [
        (NEKO, f"\n\nf(parameters={UNKNOWN})\n"),
        (STARGAZER, f"{PYTHON_TOOL}TOOL_PARAMETERS = {UNKNOWN}\n"),
        (STARGAZER, f"{PYTHON_TOOL}TOOL_PARAMETERS: dict = {UNKNOWN}\n"),
        (STARGAZER, f"\n\nTOOLS = [{{'name': 't', 'parameters': {UNKNOWN}}}]\n"),
    ],
    ids=["keyword", "variable", "typed variable", "key"],
)
def test_a_schema_that_the_bus_refuses_has_its_line_and_its_fault(tmp_path: Path, system: System, text: str) -> None:
    file = tmp_path / "a.py"
    file.write_text(text)
    report = check(file, system)
    (found,) = report.findings
    assert (found.line, found.effect, report.runs) == (3, Effect.STOPS, False)
    assert '#/properties/x/type: "strin" is not a type: did you mean "string"' in found.what


@pytest.mark.parametrize("value", ["schema_of(int)", "{...}", "{**BASE, 'type': 'strin'}", "None", "{'type': object}"])
def test_a_schema_that_is_computed_is_not_looked_at(tmp_path: Path, value: str) -> None:
    file = tmp_path / "a.py"
    file.write_text(f"f(parameters={value})\n")
    assert check(file, NEKO).findings == ()


def test_a_schema_that_is_read_otherwise_than_it_is_written_is_a_note(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("f(parameters={'x': {'type': 'float'}})\n")
    report = check(file, NEKO)
    assert report.runs
    assert {each.effect for each in report.findings} == {Effect.NOTE}
    assert any('"float" is read as "number": write that' in each.what for each in report.findings)
