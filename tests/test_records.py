from __future__ import annotations

from toolbus.errors import Code
from toolbus.records import CallRecord, Records


def test_records_come_newest_first_with_how_long_the_caller_waited() -> None:
    records = Records()
    records.add("1", "a", "plugin", "host", 10.0, 10.5, 0)
    records.add("2", "b", "plugin", "host", 11.0, 13.0, Code.TOOL)
    assert list(records) == [
        CallRecord("2", "b", "plugin", "host", 11.0, 13.0, Code.TOOL),
        CallRecord("1", "a", "plugin", "host", 10.0, 10.5, Code.UNSPECIFIED),
    ]
    assert [record.seconds for record in records] == [2.0, 0.5]


def test_only_the_newest_are_kept_and_all_are_counted() -> None:
    records = Records(keep=3)
    for number in range(10):
        records.add(str(number), "t", "plugin", "host", 0.0, 1.0, number % 2 * Code.CANCELLED)
    assert [record.call_id for record in records] == ["9", "8", "7"]
    assert len(records) == 3
    assert records.outcomes == {0: 5, Code.CANCELLED: 5}


def test_a_code_of_a_newer_protocol_reads_as_internal_and_hides_no_other_record() -> None:
    records = Records()
    records.add("1", "t", "plugin", "host", 0.0, 1.0, Code.TOOL)
    records.add("2", "t", "plugin", "host", 0.0, 1.0, 99)
    assert [record.code for record in records] == [Code.INTERNAL, Code.TOOL]
    assert records.outcomes == {Code.TOOL: 1, Code.INTERNAL: 1}
