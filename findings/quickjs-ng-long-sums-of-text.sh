#!/bin/sh
# quickjs-ng 0.17.0.2 (Python): a text that a script has put together with `+` cannot be returned once it is long.
#
# One would expect: a string is a string; evaluating an expression returns it as `str`, however it was made.
# What happens: the engine keeps a long sum as a rope, and the binding knows no such value: from somewhere between 8,192
# and 9,000 characters on, `eval` raises TypeError "Unknown quickjs tag: -6". The same text after `.slice(0)` is returned.
# So a script that works in tests with short texts fails in production with long ones.
#
# Prints the version and what each length gives. Exits with 1 when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check quickjs-ng==0.17.0.2
cat > finding.py <<'PYTHON'
import sys
from importlib.metadata import version

import quickjs

SUM = "(() => { let text = ''; for (let i = 0; i < %d; i += 1) text += 'a'; return text%s })()"


def given(length: int, after: str) -> str:
    try:
        return f"{len(quickjs.Context().eval(SUM % (length, after)))} characters"
    except TypeError as error:
        return f"TypeError: {error}"


print("quickjs-ng", version("quickjs-ng"))
seen = {}
for length in (100, 8192, 9000, 100_000):
    for after in ("", ".slice(0)"):
        seen[length, after] = given(length, after)
        print(f"{length:>6} text{after:<10} {seen[length, after]}")
long = [seen[length, ""] for length in (9000, 100_000)]
expected = long == ["TypeError: Unknown quickjs tag: -6"] * 2 and seen[8192, ""] == "8192 characters"
expected = expected and all(seen[length, ".slice(0)"] == f"{length} characters" for length in (100, 8192, 9000, 100_000))
print("as described" if expected else "this has changed")
sys.exit(0 if expected else 1)
PYTHON
venv/bin/python finding.py
