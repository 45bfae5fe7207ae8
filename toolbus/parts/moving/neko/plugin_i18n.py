"""Provides `self.i18n` and `tr`: a plugin's own texts in several languages, from JSON files in its folder."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

REFERENCE = "$i18n"
DEFAULT_LOCALE = "en"
_PLACEHOLDER = re.compile(r"\{\{\s*([\w.-]+)\s*\}\}|\{\s*([A-Za-z_][\w.-]*)\s*\}")


def tr(key: str, *, default: str = "", **params: Any) -> dict[str, Any]:
    """Returns a reference to a text, which `PluginI18n.resolve` replaces by the text itself.

    Raises:
        ValueError: the key is empty.
    """
    if not str(key or "").strip():
        raise ValueError("tr() needs the key of a text: pass one that is not empty")
    reference: dict[str, Any] = {REFERENCE: str(key).strip()}
    if default:
        reference["default"] = default
    if params:
        reference["params"] = params
    return reference


class PluginI18n:
    """A plugin's texts by language and key.

    Args:
        messages: the texts by language.
        default_locale: the language for texts that are requested without one.
    """

    def __init__(
        self, messages: Mapping[str, Mapping[str, object]] | None = None, *, default_locale: str = DEFAULT_LOCALE
    ) -> None:
        self.messages = {locale: dict(texts) for locale, texts in (messages or {}).items()}
        self.default_locale = default_locale or DEFAULT_LOCALE

    @classmethod
    def of_folder(cls, folder: Path, section: object = None) -> PluginI18n:
        """Returns the texts of a plugin's folder.

        Args:
            section: ``[plugin.i18n]`` of its plugin.toml, with `locales_dir` (``i18n``) and `default_locale`.
        """
        chosen = section if isinstance(section, Mapping) else {}
        messages: dict[str, dict[str, object]] = {}
        for file in sorted((folder / str(chosen.get("locales_dir") or "i18n")).glob("*.json")):
            try:
                texts = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as problem:
                log.warning("%s cannot be read, so its texts are missing: %s", file, problem)
                continue
            if isinstance(texts, dict):
                messages[file.stem] = texts
        return cls(messages, default_locale=str(chosen.get("default_locale") or DEFAULT_LOCALE))

    def t(self, key: str, *, locale: str | None = None, default: str = "", **params: object) -> str:
        """Returns a text with its placeholders filled; if no language has it, the default, then the key."""
        for each in _locales(locale, self.default_locale):
            text = self.messages.get(each, {}).get(key)
            if isinstance(text, str):
                return _fill(text, params)
        return _fill(default or key, params)

    def resolve(self, value: Any, *, locale: str | None = None) -> Any:
        """Returns a value in which every reference of `tr` is replaced by its text."""
        if isinstance(value, Mapping):
            if isinstance(key := value.get(REFERENCE), str):
                params = value.get("params")
                filled = dict(params) if isinstance(params, Mapping) else {}
                return self.t(key, locale=locale, default=str(value.get("default") or ""), **filled)
            return {each: self.resolve(inner, locale=locale) for each, inner in value.items()}
        return [self.resolve(each, locale=locale) for each in value] if isinstance(value, list) else value


def _locales(*preferred: str | None) -> Iterator[str]:
    for each in preferred:
        if each:
            yield from (each, each.partition("-")[0])
    yield from (DEFAULT_LOCALE, "zh-CN")  # as in N.E.K.O., whose authors always write these two


def _fill(text: str, params: Mapping[str, object]) -> str:
    return _PLACEHOLDER.sub(lambda match: str(params.get(match[1] or match[2], match[0])), text) if params else text
