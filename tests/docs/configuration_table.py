"""Writes the reference page's list of settings from their declarations: ``make settings``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from tests.docs.pages import ROOT
from toolbus.bus.serve_settings import serve_settings
from toolbus.common.setting import Option, Setting

PAGE = ROOT / "docs" / "reference" / "configuration.md"
_HEAD = "in parentheses its option and its default:\n\n"
_LIST = re.compile(re.escape(_HEAD) + r"(?:(?:- |  ).*\n)*")
_WORDS = re.compile(r"(?:`[^`]*`|[^\s`])+")  # code is not broken
_WIDTH = 120


def entries() -> Iterator[str]:
    """Yields an entry for each setting that has a variable, and for each switch."""
    for each in serve_settings():
        if each.kind.of_text is not None:
            yield _entry(each.name, _default(each), each.option, each.help)
        if each.switch is not None:
            yield _entry(each.switch.name, "`false`", each.switch.option, each.switch.help)


def _entry(name: str, default: str, option: Option | None, meaning: str) -> str:
    details = [f"`{option.word(name)}`"] if option is not None else []
    details += [default] if default else []
    lines, line = [], "-"
    for word in _WORDS.findall(f"`{name}` ({', '.join(details)}): {meaning}"):
        if len(line) + 1 + len(word) > _WIDTH:
            lines.append(line)
            line = " "
        line += f" {word}"
    return "\n".join([*lines, line, ""])


def _default(each: Setting) -> str:
    return each.shown or ("none" if each.default is None else f"`{json.dumps(each.default)}`")


def written(page: str) -> str:
    """Returns the page with its list as the declarations have it."""
    return _LIST.sub(lambda found: _HEAD + "".join(entries()), page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")
