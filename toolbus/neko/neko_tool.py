"""Provides `llm_tool` as plugins import it from ``plugin.sdk``, with the options of that decorator."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from toolbus.functions import declaration
from toolbus.functions.tool_options import ToolOptions
from toolbus.neko.plugin_i18n import REFERENCE
from toolbus.tool import MAX_TIMEOUT_SECONDS

log = logging.getLogger(__name__)


def llm_tool(function: Any = None, /, **options: Any) -> Any:
    """Makes a method a tool that models may call. Returns the method itself.

    For an unknown option or a timeout above the limit it logs a warning, and the plugin still starts.

    Args:
        options: described in `ToolOptions`, none of them required.

    Raises:
        ValueError, TypeError: as for `toolbus.sdk.llm_tool`.
    """
    if function is not None:
        return declaration.llm_tool(function)
    return declaration.llm_tool(**adapted(options))


def adapted(options: Mapping[str, Any]) -> Any:
    """Returns a tool's options, without those that toolbus does not know, and with a timeout within its limit."""
    known = {key: value for key, value in options.items() if key in ToolOptions.__annotations__}
    shown = options.get("name") or "a tool"
    if dropped := sorted(options.keys() - known.keys()):
        log.warning("%s: toolbus has no option %s of llm_tool; it has no effect", shown, ", ".join(dropped))
    timeout = known.get("timeout")
    if isinstance(timeout, int | float) and timeout > MAX_TIMEOUT_SECONDS:
        known["timeout"] = MAX_TIMEOUT_SECONDS
        log.warning("%s: timeout is %g s, the limit of %g s is used", shown, timeout, MAX_TIMEOUT_SECONDS)
    description = known.get("description")
    if isinstance(description, Mapping) and REFERENCE in description:
        known["description"] = description.get("default") or description[REFERENCE]
    return known
