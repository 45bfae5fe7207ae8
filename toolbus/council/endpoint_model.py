"""Asks the model behind an endpoint of the tool loop one question at a time, for every provider."""

from __future__ import annotations

import json

from toolbus.council.language_model import Completion, Question
from toolbus.council.sampling import left_to_endpoint, place_of, refused_places, sampling_options, with_options
from toolbus.dialects.conversation import HistoryItem, Json, Message, Turn
from toolbus.dialects.dialect import EndpointError
from toolbus.dialects.endings import end_text
from toolbus.dialects.export import Export
from toolbus.dialects.wire_names import NameTable
from toolbus.loop.endpoint import Endpoint
from toolbus.tool import Tool


class EndpointModel:
    """Answers questions with the model of an endpoint, and remembers the options that it refuses.

    Args:
        model: instead of the endpoint's own; "" for that one.
    """

    def __init__(self, endpoint: Endpoint, model: str) -> None:
        self._endpoint = endpoint
        self._model = model  # "": the endpoint's own
        self._refused: set[str] = set()  # places of options that this endpoint refuses

    def __repr__(self) -> str:
        return f"<model of {self._endpoint!r}>"

    async def __call__(self, question: Question) -> Completion:
        dialect = self._endpoint.dialect
        items: list[HistoryItem] = [Message(each["role"], each["content"]) for each in question.messages]  # type: ignore[arg-type]
        while True:
            refused = frozenset(self._refused)  # another question may learn more while this one waits
            export = self._export(question)
            wire = next(iter(export.names.to_bus), "") if export is not None else ""
            options = sampling_options(dialect.name, question, wire)
            for option in left_to_endpoint(dialect.name, question, self._endpoint.options):
                del options[option]
            request = with_options(dialect.request(items, export), dialect.name, options, refused)
            if model := question.model or self._model:
                request["model"] = model
            try:
                return _completion(await self._turn(request, export))
            except Exception as error:
                places = {place_of(dialect.name, option, refused) for option in options} - {""}
                newly_refused = refused_places(error, places | ({"tools"} if wire else set()))
                if not newly_refused:
                    raise
                self._refused |= newly_refused  # grows each time, so the loop ends

    def _export(self, question: Question) -> Export | None:
        """Returns the function to force as the dialect exports it; None without one, or if tools are refused."""
        if question.function is None or "tools" in self._refused:
            return None
        schema = json.dumps(question.function.get("parameters") or {"type": "object"})
        description = question.function.get("description") or ""
        export = self._endpoint.dialect.export([Tool(question.function["name"], description, schema)])
        return export if export.tools else None

    async def _turn(self, request: Json, export: Export | None) -> Turn:
        turn = Turn()
        async for piece in self._endpoint.answer(request, export.names if export is not None else NameTable.empty()):
            if isinstance(piece, Turn):
                turn = piece
        return turn


def _completion(turn: Turn) -> Completion:
    """Returns a turn as a completion. Only one function was offered, so a call with any name means that one.

    Raises:
        EndpointError: the answer was refused, failed or cut before there was anything in it.
    """
    call = turn.calls[0] if turn.calls else None
    has_answer = call.whole if call is not None else bool(turn.text)
    if turn.ending != "complete" and not has_answer:
        raise EndpointError(f"its answer is {turn.ending}: {end_text(turn)}", turn)
    return Completion(turn.text, None if call is None else call.arguments_json)
