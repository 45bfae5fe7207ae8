"""Marks or removes links of an answer that stand in no result of a tool and no message of the user or program."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

from toolbus.parts.models.dialects.conversation import Answers, HistoryItem, Message
from toolbus.protocol.tool import Result

UnknownLinks = Literal["keep", "mark", "remove"]
UNKNOWN_LINKS: tuple[UnknownLinks, ...] = ("keep", "mark", "remove")

MARK, REMOVED = " [link from no tool]", "[link removed]"
MAX_HELD = 4_096  # characters of a stream that wait for the end of a word
_URL = re.compile(r"(?:https?://|www\.)[^\s<>\"'`)\]}|\\]+", re.IGNORECASE)
_LINK = re.compile(rf"(?P<open>\]\()?(?P<url>{_URL.pattern})(?P<close>\))?", re.IGNORECASE)
_SCHEME = re.compile(r"https?://", re.IGNORECASE)
_AFTER = ".,;:!?*_~"  # what stands behind a link in a sentence


class LinkFilter:
    """Filters the answers of one request.

    Args:
        items: the conversation so far: links of its results, and of messages that are not the model's, are known.
    """

    def __init__(self, items: Iterable[HistoryItem], unknown: UnknownLinks) -> None:
        self._known = {_normal(url) for text in _texts(items) for url in _URL.findall(text)}
        self._unknown = unknown
        self._held = ""  # the end of a stream, which may be the beginning of a link

    def filtered(self, text: str) -> str:
        """Returns a text with its unknown links marked, or without them."""
        return _LINK.sub(self._replacement, text)

    def _replacement(self, match: re.Match[str]) -> str:
        url = match["url"].rstrip(_AFTER)
        if _normal(url) in self._known:
            return match[0]
        rest, opened, closed = match["url"][len(url) :], match["open"] or "", match["close"] or ""
        if self._unknown == "mark":
            return f"{opened}{url}{rest}{closed}{MARK}" if closed else f"{opened}{url}{MARK}{rest}"
        return f"{'] ' if opened else ''}{REMOVED}{rest}{'' if opened else closed}"

    def stream(self, text: str, emit: Callable[[str], object]) -> None:
        """Passes a piece of an answer on, but the word at its end, which may go on in the next piece."""
        self._held += text
        end = max(self._held.rfind(blank) for blank in " \n\t\r") + 1
        if len(self._held) - end > MAX_HELD:
            end = len(self._held)
        if end:
            ready, self._held = self.filtered(self._held[:end]), self._held[end:]
            emit(ready)

    def finish(self, emit: Callable[[str], object]) -> None:
        """Passes the end of an answer on."""
        held, self._held = self._held, ""
        if held:
            emit(self.filtered(held))


def _normal(url: str) -> str:
    """Returns a link so that the same one compares equal: without its scheme, the host in lower case."""
    host, slash, path = _SCHEME.sub("", url.rstrip(_AFTER)).partition("/")
    return f"{host.lower()}{slash}{path}".rstrip("/")


def _texts(items: Iterable[HistoryItem]) -> Iterator[str]:
    for item in items:
        if isinstance(item, Message) and item.role != "assistant":
            yield item.text
        elif isinstance(item, Answers):
            for answered in item.answered:
                yield from _texts_of(answered.result)


def _texts_of(result: Result) -> Iterator[str]:
    try:
        yield from _strings(result.output)
    except ValueError:  # it is not JSON
        yield result.output_json
    if result.error is not None:
        yield result.error.message
    for block in result.content:
        yield from (block.text.text, block.resource_link.uri, block.resource.uri, block.resource.text)


def _strings(value: Any) -> Iterator[str]:
    """Yields the texts in a JSON value, keys included; without recursion, since results may be deep."""
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            waiting += [*each, *each.values()]
        elif isinstance(each, list):
            waiting += each
