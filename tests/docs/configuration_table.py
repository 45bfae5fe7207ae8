"""Writes the reference page's table of settings from their declarations: ``make settings``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from tests.docs.pages import ROOT
from toolbus.bus.serve_settings import serve_settings
from toolbus.common.setting import Option, Setting

PAGE = ROOT / "docs" / "reference" / "configuration.md"
_HEAD = "| key | default | option | meaning |\n| --- | --- | --- | --- |\n"
_TABLE = re.compile(re.escape(_HEAD) + r"(?:\|.*\n)*")


def rows() -> Iterator[str]:
    """Yields a row for each setting that has a variable, and for each switch."""
    for each in serve_settings():
        if each.kind.of_text is not None:
            yield _row(each.name, _default(each), each.option, each.help)
        if each.switch is not None:
            yield _row(each.switch.name, "`false`", each.switch.option, each.switch.help)


def _row(name: str, default: str, option: Option | None, meaning: str) -> str:
    shown = f" `{option.word(name)}` " if option is not None else " "
    return f"| `{name}` | {default} |{shown}| {meaning} |\n"


def _default(each: Setting) -> str:
    return each.shown or ("none" if each.default is None else f"`{json.dumps(each.default)}`")


def written(page: str) -> str:
    """Returns the page with its table as the declarations have it."""
    return _TABLE.sub(lambda found: _HEAD + "".join(rows()), page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")
