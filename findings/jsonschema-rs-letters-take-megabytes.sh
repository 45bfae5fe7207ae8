#!/bin/sh
# jsonschema-rs 0.60.3 takes 2 MB and 30 ms for each schema that asks for a name of up to 40 letters of any language.
#
# One would expect: a pattern of 14 characters that JSON Schema's own documents recommend for text of any language costs
# about as much as its ASCII form; or equal patterns are compiled once, as Python's `re` does.
# What happens: `\p{L}` becomes an automaton of some hundred ranges, which `{1,40}` repeats 40 times; each validator has one
# of its own. So 1,000 schemas with a name in them take 2 GB, and compiling them takes half a minute. `{1,}` in place of
# `{1,40}`, with "maxLength": 40 beside it, asks for the same and takes a small part of both.
#
# Prints the version, and for each pattern the memory and time of a validator. Exits with 1 when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check jsonschema-rs==0.60.3
"$folder/env/bin/python" - <<'PY'
import importlib.metadata
import resource
import time

import jsonschema_rs

COUNT = 40


def memory():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def cost(schema):
    before, began = memory(), time.perf_counter()
    validators = [jsonschema_rs.validator_for(schema) for _ in range(COUNT)]
    took = time.perf_counter() - began
    assert all(each.is_valid("Zoë") for each in validators)
    return max(0, memory() - before) / COUNT, took / COUNT


print("jsonschema-rs", importlib.metadata.version("jsonschema-rs"))
unbounded = cost({"type": "string", "pattern": r"^\p{L}+$", "maxLength": 40})
counted = cost({"type": "string", "pattern": r"^\p{L}{1,40}$"})
for name, (size, seconds) in (("\\p{L}+ with maxLength", unbounded), ("\\p{L}{1,40}", counted)):
    print(f"{name}: {size / 1e6:.2f} MB and {seconds * 1e3:.1f} ms for each of {COUNT} equal validators")
surprising = counted[0] > 1e6 and counted[1] > 10 * unbounded[1]
print("as described" if surprising else "this has changed")
raise SystemExit(0 if surprising else 1)
PY
