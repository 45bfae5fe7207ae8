"""Says how many file descriptors this process may open: what every connection, file and process takes one of."""

from __future__ import annotations

import contextlib

ENOUGH = 65_536  # programs that close all descriptors one by one get slow with many more
LEAST = 64  # of connections, however few descriptors there are
_UNKNOWN = 1 << 20  # where the system has no limit, as on Windows


def raise_descriptor_limit() -> None:
    """Raises the soft limit of this process to `ENOUGH`, as far as the hard limit allows; most shells set 1,024."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = ENOUGH if hard == resource.RLIM_INFINITY else min(ENOUGH, hard)
        if soft != resource.RLIM_INFINITY and soft < most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def share_of_descriptors(share: float) -> int:
    """Returns a share of the descriptors, from 0 to 1, for connections of one kind, so that others find some left."""
    with contextlib.suppress(ImportError, OSError):
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != resource.RLIM_INFINITY:
            return max(LEAST, int(soft * share))
    return _UNKNOWN
