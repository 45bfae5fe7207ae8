"""Provides `self.i18n` and `tr`: a plugin's own texts in several languages, from JSON files in its folder."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger("toolbus.neko.plugin_i18n")

REFERENCE = "$i18n"
DEFAULT_LOCALE = "en"
DEFAULT_FOLDER = "i18n"
MASTER = "{MASTER_NAME}"
_HAN = re.compile("[\u4e00-\u9fff]")
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
        texts = folder / str(chosen.get("locales_dir") or DEFAULT_FOLDER)
        return load_plugin_i18n_from_dir(texts, default_locale=str(chosen.get("default_locale") or DEFAULT_LOCALE))

    def t(self, key: str, *, locale: str | None = None, default: str = "", **params: object) -> str:
        """Returns a text with its placeholders filled; if no language has it, the default, then the key."""
        for each in _locales(locale, self.default_locale):
            text = self.messages.get(each, {}).get(key)
            if isinstance(text, str):
                return _fill(text, params)
        return _fill(default or key, params)

    def resolve(self, value: Any, *, locale: str | None = None) -> Any:
        """Returns a value in which every reference of `tr` is replaced by its text."""
        return resolve_i18n_refs(value, self, locale=locale)


# What plugins import in addition to the class, with the names that they have there.


def load_plugin_i18n_from_dir(locales_dir: str | Path, *, default_locale: str = DEFAULT_LOCALE) -> PluginI18n:
    """Returns the texts of the JSON files in a folder, one for each language; a file that cannot be read is skipped."""
    messages: dict[str, dict[str, object]] = {}
    for file in sorted(Path(locales_dir).glob("*.json")):
        try:
            texts = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as problem:
            log.warning("%s cannot be read, so its texts are missing: %s", file, problem)
            continue
        if isinstance(texts, dict):
            messages[file.stem] = texts
    return PluginI18n(messages, default_locale=default_locale)


def load_plugin_i18n_from_meta(plugin_meta: Mapping[str, Any]) -> PluginI18n:
    """Returns the texts of the plugin whose plugin.toml is ``config_path``; none without that key.

    Args:
        plugin_meta: the section ``[plugin]``, with ``i18n`` in it, and ``config_path``.
    """
    path = plugin_meta.get("config_path")
    return PluginI18n.of_folder(Path(path).parent, plugin_meta.get("i18n")) if path else PluginI18n()


def clear_plugin_i18n_cache() -> None:
    """Does nothing: every call reads the files."""


def is_i18n_ref(value: object) -> bool:
    """Tells whether a value is a reference of `tr`."""
    return isinstance(value, Mapping) and isinstance(value.get(REFERENCE), str)


def resolve_i18n_refs(value: Any, i18n: PluginI18n, *, locale: str | None = None) -> Any:
    """Returns a value in which every reference of `tr` is replaced by its text."""
    if isinstance(value, Mapping):
        if isinstance(key := value.get(REFERENCE), str):
            params = value.get("params")
            filled = dict(params) if isinstance(params, Mapping) else {}
            return i18n.t(key, locale=locale, default=str(value.get("default") or ""), **filled)
        return {each: resolve_i18n_refs(inner, i18n, locale=locale) for each, inner in value.items()}
    return [resolve_i18n_refs(each, i18n, locale=locale) for each in value] if isinstance(value, list) else value


def locale_candidates(locale: str | None, default_locale: str | None = None) -> list[str]:
    """Returns the languages in which a text is looked up, the preferred first."""
    return list(dict.fromkeys(_locales(locale, default_locale)))


def interpolate_text(text: str, params: Mapping[str, object] | None = None) -> str:
    """Returns a text with its placeholders filled."""
    return _fill(text, params or {})


def _locales(*preferred: str | None) -> Iterator[str]:
    for each in preferred:
        if each:
            yield from (each, each.partition("-")[0])
    yield from (DEFAULT_LOCALE, "zh-CN")  # as in N.E.K.O., whose authors always write these two


def with_master_name(text: str) -> str:
    """Returns a text with the user's name in place of `{MASTER_NAME}`, as that system writes it before models read it.

    The variable MASTER_NAME has the name; without it the word is "the user", in a text in Chinese "用户".
    """
    if MASTER not in text:
        return text
    name = os.environ.get("MASTER_NAME") or ("用户" if _HAN.search(text) else "the user")
    return text.replace(MASTER, name)


def _fill(text: str, params: Mapping[str, object]) -> str:
    text = with_master_name(text) if "MASTER_NAME" not in params else text
    return _PLACEHOLDER.sub(lambda match: str(params.get(match[1] or match[2], match[0])), text) if params else text
