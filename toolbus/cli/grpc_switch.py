"""Sets undocumented switches of grpcio, which halve a round trip (197 → 110 µs) of the commands."""

from __future__ import annotations

import os

_EXPERIMENTS = "-event_engine_client,-event_engine_listener"


def set_switch() -> None:
    """Sets them, unless the user has set some; before grpc is imported, which reads them."""
    if os.environ.get("TOOLBUS_GRPC_EXPERIMENTS") != "keep":
        os.environ.setdefault("GRPC_EXPERIMENTS", _EXPERIMENTS)


def clear_switch() -> None:
    """Unsets them again, for a command that starts programs of its user."""
    if os.environ.get("GRPC_EXPERIMENTS") == _EXPERIMENTS:
        del os.environ["GRPC_EXPERIMENTS"]
