"""Reads the docstring of a function: its summary, and the description of each parameter.

It knows the three layouts that Python authors use (Google ``Args:``, reST ``:param name:``, numpy ``Parameters`` with
a rule below it). Of any other docstring it reads the first paragraph. It never fails: it leaves out text that it cannot
read.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# Chinese authors write full-width colons.
_HEADER = re.compile(r"(?:Keyword |Other )?(?:Args|Arguments|Parameters|Params|Attributes|参数)\s*[:：]", re.IGNORECASE)
_OTHER_HEADER = re.compile(r"(?:Returns?|Yields?|Raises|Examples?|Notes?|See Also|References|Warnings?|Todo)\s*:")
_GOOGLE_ENTRY = re.compile(r"\*{0,2}(?P<name>\w+)\s*(?:\(.*?\))?\s*[:：]\s*(?P<text>.*)")
_REST_ENTRY = re.compile(r":(?:param|parameter|arg|argument)\s+(?:[^:]*\s)?\*{0,2}(?P<name>\w+)\s*:\s*(?P<text>.*)")
_NUMPY_NAMES = re.compile(r"\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*(?=\s*(?::|$))")
_RULE = re.compile(r"-{3,}")


@dataclass(frozen=True, slots=True)
class Docstring:
    """The parts of a docstring for models.

    Attributes:
        summary: the first paragraph, on one line.
        parameters: the description of each parameter that has one, on one line.
    """

    summary: str
    parameters: Mapping[str, str]


def parse(text: str | None) -> Docstring:
    """Reads a docstring as it stands in the source, indentation included."""
    lines = inspect.cleandoc(text or "").splitlines()
    parts_of: dict[str, list[str]] = {}
    for read in (_rest, _numpy, _google):
        for name, part in read(lines):
            parts_of.setdefault(name, []).append(part)
    described = {name: " ".join(filter(None, parts)) for name, parts in parts_of.items()}
    return Docstring(_summary(lines), {name: text for name, text in described.items() if text})


def _summary(lines: list[str]) -> str:
    summary: list[str] = []
    for index, line in enumerate(lines):
        bare = line.strip()
        underlined = index + 1 < len(lines) and _RULE.fullmatch(lines[index + 1].strip())
        starts = _HEADER.fullmatch(bare) or _OTHER_HEADER.fullmatch(bare) or re.match(r":\w+[^:]*:", bare)
        if not bare or starts or underlined:
            break
        summary.append(bare)
    return " ".join(summary)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _google(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yields (name, part of its text) from the indented block below each ``Args:``."""
    inside = False
    base = -1  # indent of the entries of this block; -1 before the first
    name = ""
    for line in lines:
        bare = line.strip()
        if not bare:
            continue
        if not inside or _indent(line) == 0:
            inside, base, name = _HEADER.fullmatch(bare) is not None, -1, ""
            continue
        base = _indent(line) if base < 0 else base
        entry = _GOOGLE_ENTRY.fullmatch(bare) if _indent(line) <= base else None
        if entry:
            name = entry["name"]
            yield name, entry["text"]
        elif name and _indent(line) > base:
            yield name, bare


def _rest(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yields (name, part of its text) from ``:param name: text`` and the indented lines that follow."""
    name = ""
    for line in lines:
        bare = line.strip()
        entry = _REST_ENTRY.fullmatch(bare)
        if entry:
            name = entry["name"]
            yield name, entry["text"]
        elif name and bare and _indent(line) > 0 and not bare.startswith(":"):
            yield name, bare
        else:
            name = ""


def _numpy(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yields (name, part of its text) from the section below ``Parameters`` and its rule."""
    inside = False
    names: list[str] = []
    for index, line in enumerate(lines):
        bare = line.strip()
        if index + 1 < len(lines) and _RULE.fullmatch(lines[index + 1].strip()):
            inside, names = _HEADER.fullmatch(bare + ":") is not None, []
        elif not inside or not bare or _RULE.fullmatch(bare):
            continue
        elif _indent(line) == 0:
            match = _NUMPY_NAMES.match(bare)
            names = [each.strip().lstrip("*") for each in match[0].split(",")] if match else []
        else:
            for name in names:
                yield name, bare
