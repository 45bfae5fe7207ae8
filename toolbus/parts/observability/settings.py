"""Declares the settings of a bus for traces: which collector gets spans, and of how many calls."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from toolbus.bus.loopback import mask
from toolbus.common.setting import NUMBER, WHOLE, CheckedRecord, ValueKind, setting
from toolbus.errors import SetupError
from toolbus.protocol.limits import MAX_SPANS_PER_SECOND

TRACES_PATH = "/v1/traces"  # of OTLP over HTTP
VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")  # first one wins


def _check_collector(name: str, url: str | None) -> None:
    if url is None:
        return
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is not a number, a bracket that is not closed
        fits = False
    if not fits or parts.query or parts.fragment or not url.isprintable() or " " in url:
        raise SetupError(
            f"{name} {mask(url)!r} is not http://HOST:PORT or https://HOST:PORT: write for example "
            "http://127.0.0.1:4318, or off"
        )


def _check_ratio(name: str, ratio: float) -> None:
    if not 0.0 <= ratio <= 1.0:  # NaN fails this too
        raise SetupError(f"{name} is {ratio:g}, it must be from 0 (none) to 1 (all)")


def _check_most(name: str, most: int) -> None:
    if most < 1:
        raise SetupError(f"{name} is {most}, it must be at least 1: without traces none is sampled")


@dataclass(frozen=True, slots=True)
class TraceSettings(CheckedRecord):
    """Where the spans of calls go; None as ``traces``: calls are not traced."""

    traces: str | None = setting(
        None,
        ValueKind(lambda reader: None if reader.value == "off" else reader.text()),
        "the URL of an OpenTelemetry collector (OTLP over HTTP) that gets [spans of calls](../start/traces.md); "
        "`/v1/traces` is added if it has no path. Default: `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or "
        "`OTEL_EXPORTER_OTLP_ENDPOINT`; `off` sends none. Needs `toolbus[otel]`",
        check=_check_collector,
    )
    trace_ratio: float = setting(
        0.0, NUMBER, "the share of calls without a trace for which the bus begins one: 0 to 1", check=_check_ratio
    )
    trace_most: int = setting(
        MAX_SPANS_PER_SECOND,
        WHOLE,
        "how many calls are sampled in a second at most; further calls are not sampled",
        check=_check_most,
    )

    @property
    def url(self) -> str:
        """Where spans are posted; "" where they are not."""
        if self.traces is None:
            return ""
        return self.traces if urlsplit(self.traces).path.strip("/") else f"{self.traces.rstrip('/')}{TRACES_PATH}"

    @staticmethod
    def derive(settings: Mapping[str, Any], above_file: Collection[str], environ: Mapping[str, str]) -> dict[str, Any]:
        """Returns the collector that OpenTelemetry's variables name, where no setting names one.

        That of traces has its path, the other needs one.
        """
        disabled = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
        if "traces" in settings or disabled or environ.get("OTEL_TRACES_EXPORTER") == "none":
            return {}
        variable = next((each for each in VARIABLES if environ.get(each)), "")
        if not variable:
            return {}
        written = environ[variable]
        url = written if variable == VARIABLES[0] else f"{written.rstrip('/')}{TRACES_PATH}"
        if why := _unusable(environ, url):
            shown = mask(written)
            return {"ignored": [f"{variable} is {shown!r:.300}, and {why}; calls are not traced (TOOLBUS_TRACES=off)"]}
        return {"traces": url}


def _unusable(environ: Mapping[str, str], url: str) -> str:
    """Returns why the bus cannot export to a collector that OpenTelemetry's variables name; empty if it can.

    They are set for all programs of a machine or cluster, so one that the bus cannot use does not stop it.
    """
    for variable in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := environ.get(variable, ""):
            if not protocol.startswith("http"):
                return f"{variable} is {protocol!r:.40}; the bus sends http/protobuf: name a port in TOOLBUS_TRACES"
            break
    try:
        _check_collector("", url)
    except SetupError:
        return "it is not an address such as http://127.0.0.1:4318: name one in TOOLBUS_TRACES"
    try:
        found = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:  # of a package above it
        found = False
    return "" if found else "the extra for it is not installed: install 'toolbus[otel]'"
