"""Cuts a tool's huge result for the model; the program still gets the whole result.

A cut depends only on the result, so a stored conversation is written the same way again, and prompt caches stay valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from toolbus.common.newest import NewestCacheBySize
from toolbus.common.text import dump_json, shorten
from toolbus.parts.models.dialects.conversation import Answered, Answers, HistoryItem
from toolbus.protocol.tool import MIB, Result, block_text, output_text
from toolbus.v1 import tool_pb2 as pb

MIN_RESULT_BYTES = 1_000  # leaves room for the mark of a cut, and for the beginning of changed arguments
MAX_EDITED = 1_000  # characters of changed arguments that a model reads
# Cached cuts, since each request writes the whole conversation again, and reading JSON of 4 MiB takes as long as a
# request.
_MAX_CACHED, _MAX_CACHED_BYTES = 64, 16 * MIB
_MAX_CHARACTER_BYTES = 4  # of one character in UTF-8
_DESCRIPTION_BYTES = 100  # that the text of a failure or of a described block adds
_CUT_EDIT = " …]"
_EDITED = "[The user changed the arguments of this call before it ran: "


class ResultCutter:
    """Cuts the results of one loop's conversations. For one event loop.

    Args:
        limit: the maximum of UTF-8 bytes of a result for the model; 0: any number.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # The whole result and its cut by the identity of the whole, which lives as long as its entry.
        self._cuts: NewestCacheBySize[int, tuple[Result, Result]] = NewestCacheBySize(
            _MAX_CACHED, _MAX_CACHED_BYTES, _size_of
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
        cached = self._cuts.get(id(result))
        if cached is None:
            cached = (result, cut_result(result, self._limit))
            self._cuts[id(result)] = cached
        return cached[1]


def with_edit(result: Result, edited_json: str) -> Result:
    """Returns the result of a call that ran with changed arguments, followed by these arguments, also after a cut."""
    block = pb.ContentBlock(text=pb.TextContent(text=f"{_EDITED}{shorten(edited_json, MAX_EDITED)}]"))
    return replace(result, content=(*result.content, block))


def cut_result(result: Result, limit: int) -> Result:
    """Returns a result whose text has at most ``limit`` bytes; a cut text ends with a mark and how to request less.

    Images stay: models that accept them get them as images, whose size each provider limits.
    """
    total = 0 if result.asks else len(result.text.encode())
    if total <= limit:
        return result
    content, edit = _split_edit(result, limit // 2)
    rest = _Budget(total, limit - sum(len(block.text.text.encode()) + 1 for block in edit))
    failure, (output, shown) = result.failure, result.shown
    error = result.error
    if failure:
        taken, is_cut = rest.take(failure)
        error = replace(error, message=taken) if error is not None and is_cut else error
    output_json = result.output_json
    if rest.is_full or not output:
        output_json = "null"
    else:
        taken, is_cut = rest.take(output)
        output_json = dump_json(taken) if is_cut or output != output_text(output_json) else output_json
    taken_blocks: list[pb.ContentBlock] = []
    shown_ids = set(map(id, shown))
    for block in (block for block in content if id(block) in shown_ids):
        if block.WhichOneof("kind") == "image":
            taken_blocks.append(block)
        elif not rest.is_full:
            taken, is_cut = rest.take(block_text(block))
            taken_blocks.append(pb.ContentBlock(text=pb.TextContent(text=taken)) if is_cut else block)
    return replace(result, output_json=output_json, error=error, content=(*taken_blocks, *edit))


def _split_edit(result: Result, limit: int) -> tuple[Sequence[pb.ContentBlock], Sequence[pb.ContentBlock]]:
    """Returns the content, and the block of changed arguments in at most ``limit`` bytes; empty without changes."""
    content = result.content
    if not content or not content[-1].text.text.startswith(_EDITED):
        return content, ()
    data = content[-1].text.text.encode()
    if len(data) <= limit:
        return content[:-1], content[-1:]
    text = data[: limit - len(_CUT_EDIT.encode())].decode("utf-8", "ignore") + _CUT_EDIT
    return content[:-1], (pb.ContentBlock(text=pb.TextContent(text=text)),)


def cut_text(text: str, limit: int) -> str:
    """Returns a text of at most ``limit`` bytes, marked where it is cut; 0: any number."""
    total = len(text.encode("utf-8", "replace"))
    return text if not limit or total <= limit else _Budget(total, limit).take(text)[0]


class _Budget:
    """The remaining bytes for the parts of a text, which a line break separates."""

    def __init__(self, total: int, limit: int) -> None:
        self.is_full = False  # whether a part was cut; later parts are dropped
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
    return _characters(cut[0]) + sum(block.ByteSize() for block in cut[0].content)


def _characters(result: Result) -> int:
    return len(result.output_json) + (len(result.error.message) if result.error is not None else 0)


def _may_exceed(result: Result, limit: int) -> bool:
    """Tells whether a result may be too long, without writing its text."""
    content = sum(block.ByteSize() + _DESCRIPTION_BYTES for block in result.content)
    return _characters(result) * _MAX_CHARACTER_BYTES + content + _DESCRIPTION_BYTES > limit
