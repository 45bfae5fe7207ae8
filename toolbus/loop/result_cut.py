"""Cuts a tool's huge result for the model; the program still has the whole one.

A cut depends on the result alone, so a stored conversation is written the same way again, and prompt caches hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from toolbus.dialects.conversation import Answered, Answers, HistoryItem
from toolbus.newest import NewestCacheBySize
from toolbus.result_text import block_text, failure_of, output_text, text_of
from toolbus.text import dump_json
from toolbus.tool import MIB, Result
from toolbus.v1 import tool_pb2 as pb

MIN_RESULT_BYTES = 1_000  # leaves room for what a cut says of itself
# Cut results that are remembered, since each request writes the whole conversation again, and reading JSON of 4 MiB
# takes as long as a request.
_MAX_REMEMBERED, _MAX_REMEMBERED_BYTES = 64, 16 * MIB
_MOST_BYTES = 4  # of one character in UTF-8
_DESCRIPTION_BYTES = 100  # what a text adds to a failure, or to a block that it describes


class ResultCutter:
    """Cuts the results of one loop's conversations. For one event loop.

    Args:
        limit: bytes of UTF-8 that a model gets of a result at most; 0: any number.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # The whole result and its cut by the identity of the whole, which lives as long as its entry.
        self._cuts: NewestCacheBySize[int, tuple[Result, Result]] = NewestCacheBySize(
            _MAX_REMEMBERED, _MAX_REMEMBERED_BYTES, _size_of
        )

    def cut_items(self, items: Sequence[HistoryItem]) -> Sequence[HistoryItem]:
        """Returns a conversation with results as a model gets them."""
        if not self._limit:
            return items
        return [self._cut_answers(item) if isinstance(item, Answers) else item for item in items]

    def _cut_answers(self, answers: Answers) -> Answers:
        if not any(_may_exceed(each.result, self._limit) for each in answers.answered):
            return answers
        return Answers(tuple(Answered(each.call, self.cut(each.result)) for each in answers.answered))

    def cut(self, result: Result) -> Result:
        """Returns a result as a model gets it."""
        if not self._limit or not _may_exceed(result, self._limit):
            return result
        remembered = self._cuts.get(id(result))
        if remembered is None:
            remembered = (result, cut_result(result, self._limit))
            self._cuts[id(result)] = remembered
        return remembered[1]


def cut_result(result: Result, limit: int) -> Result:
    """Returns a result whose text has at most ``limit`` bytes; where it is cut, it says so, and how to get less.

    Images stay: the models that see them get them as images, of which each provider limits the size.
    """
    total = 0 if result.asks else len(text_of(result).encode())
    if total <= limit:
        return result
    rest = _Budget(total, limit)
    failure, output = failure_of(result), output_text(result.output_json)
    error = result.error
    if failure:
        taken, is_cut = rest.take(failure)
        error = replace(error, message=taken) if error is not None and is_cut else error
    output_json = result.output_json
    if rest.is_full or output in ("", "null", failure):
        output_json = "null"
    else:
        taken, is_cut = rest.take(output)
        output_json = dump_json(taken) if is_cut else output_json
    content: list[pb.ContentBlock] = []
    for block in result.content:
        if block.WhichOneof("kind") == "image":
            content.append(block)
        elif not rest.is_full:
            taken, is_cut = rest.take(block_text(block))
            content.append(pb.ContentBlock(text=pb.TextContent(text=taken)) if is_cut else block)
    return replace(result, output_json=output_json, error=error, content=tuple(content))


def cut_text(text: str, limit: int) -> str:
    """Returns a text of at most ``limit`` bytes, marked where it is cut; 0: any number."""
    total = len(text.encode("utf-8", "replace"))
    return text if not limit or total <= limit else _Budget(total, limit).take(text)[0]


class _Budget:
    """The bytes that are left for a text whose parts come one after the other, a line break between them."""

    def __init__(self, total: int, limit: int) -> None:
        self.is_full = False  # whether a part was cut; parts after it are left out
        size = len(_mark(total, limit).encode())
        self._mark = _mark(total, limit - size)
        self._left = limit - size

    def take(self, text: str) -> tuple[str, bool]:
        """Returns a part and whether it was cut: at the end of a character, and marked."""
        data = text.encode("utf-8", "replace")
        if len(data) <= self._left:
            self._left -= len(data) + 1
            return text, False
        self.is_full = True
        return data[: max(self._left, 0)].decode("utf-8", "ignore") + self._mark, True


def _mark(total: int, shown: int) -> str:
    return (
        f" …\n[The result is cut here: it has {total:,} bytes, and the first {shown:,} are shown. To read what is "
        "missing, call the tool so that it returns less at once: a part, a page, fewer fields or a narrower search.]"
    )


def _size_of(cut: tuple[Result, Result]) -> int:
    return len(cut[0].output_json) + sum(block.ByteSize() for block in cut[0].content)


def _may_exceed(result: Result, limit: int) -> bool:
    """Tells whether a result may be too long, without writing its text."""
    characters = len(result.output_json) + (len(result.error.message) if result.error is not None else 0)
    content = sum(block.ByteSize() + _DESCRIPTION_BYTES for block in result.content)
    return characters * _MOST_BYTES + content + _DESCRIPTION_BYTES > limit
