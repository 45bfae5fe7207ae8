#!/bin/sh
# pymdown-extensions 13.1.2 (superfences, with Markdown 3.11.3): a fence with a word that it does not know is no fence.
#
# One would expect: CommonMark lets an info string have any words, of which the first is the language; GitHub and other
# renderers show such a block as code, and leave the rest of the page alone.
# What happens: with an empty line in the code, the opening line is read as text, and the closing line opens a block that
# ends at the next fence: text becomes code, code becomes text, and headings in between are lost, with their anchors.
#
# Prints the versions, and the headings and blocks of one page with and without such a word. Exits with 1 when that
# changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --disable-pip-version-check pymdown-extensions==13.1.2 Markdown==3.11.3
"$folder/env/bin/python" - <<'PY'
import importlib.metadata
import re

import markdown

PAGE = """```INFO
first = 1

second = 2
```

## Between

```text
third
```
"""

for name in ("pymdown-extensions", "Markdown"):
    print(name, importlib.metadata.version(name))
seen = {}
for info in ("python", "python example"):
    page = markdown.markdown(PAGE.replace("INFO", info), extensions=["pymdownx.superfences", "toc"])
    seen[info] = (re.findall(r"<h2 id=\"([^\"]*)\"", page), len(re.findall("<pre", page)))
    print(f"info string {info!r}: headings {seen[info][0]}, blocks of code {seen[info][1]}")
assert seen["python"] == (["between"], 2), seen
assert seen["python example"][0] == [], seen
PY
