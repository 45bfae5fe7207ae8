"""Makes the keys of a bus in the volume of a pod, and checks its data directory as a bus does; a program of its own."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.support.other_user import become_nobody
from toolbus.bus.keys.keyring import Keyring
from toolbus.common.path_ownership import make_directory
from toolbus.parts.identity.key_store import KeyStore


def use(data: Path) -> str:
    """Makes the keys; returns how many there are, and whose the directory is."""
    KeyStore(data / "keys").init(["toolbus.toolbus.svc"])
    make_directory(data, "the data directory")
    return f"{len(Keyring(data / 'keys').keys)} {data.stat().st_uid}"


def main() -> None:
    """Does it in the folder that the last argument names, as nobody with the option --as-nobody."""
    if "--as-nobody" in sys.argv:
        with tempfile.TemporaryDirectory() as elsewhere:
            use(Path(elsewhere) / "data")  # loads what it needs, which others may not read
        become_nobody()
    for _ in range(2):  # the pod starts, and starts again
        print(use(Path(sys.argv[-1])))


if __name__ == "__main__":
    main()
