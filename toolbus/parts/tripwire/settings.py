"""Declares which names of fields count as those of secrets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from toolbus.common.reader import Reader
from toolbus.common.setting import TEXT, TEXTS, check_settings, setting, table
from toolbus.errors import InvalidRequest, SetupError


def _allowed(reader: Reader) -> dict[str, tuple[str, ...]]:
    return {tool: TEXTS.read(names) for tool, names in reader.entries().items()}


@dataclass(frozen=True, slots=True)
class TripwireSettings:
    """The rules of a bus's tripwire, and the names that it allows."""

    tripwire: str = setting(
        "default", TEXT, "the rules that recognize secrets by their names: `default` or `synchronet`"
    )
    tripwire_allow: Mapping[str, tuple[str, ...]] = setting(dict, table(_allowed))

    def __post_init__(self) -> None:
        from toolbus.parts.tripwire.tripwire import Tripwire

        check_settings(self)
        try:
            Tripwire(self.tripwire, self.tripwire_allow)  # type: ignore[arg-type]  # it checks the preset
        except InvalidRequest as error:
            raise SetupError(str(error)) from None
