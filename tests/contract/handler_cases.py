from __future__ import annotations

from toolbus.protocol.tool import CallError, Result


def failure(result: Result) -> CallError:
    assert result.is_error
    assert result.error is not None
    return result.error
