"""Reads `_manifest.json`: whatever is in it, a file reaches only what it names, and never the tools themselves.

The oracle asks the system where paths lead and reads grants by itself; a repeated `grant` has to change nothing.
"""

from __future__ import annotations

import ipaddress
import json
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from lab.fuzz.choices import Choices
from lab.fuzz.json_texts import REFUSED, plain, text_of
from lab.fuzz.target import Target, hold
from toolbus.errors import SetupError
from toolbus.parts.dropin.manifest import FILE, FileGrants, Manifest, grant, load_manifest, read_manifest

FILES = ("clock.py", "relay.py", "_shared.py", "../out.py", "a/b.py", "no", ".hidden.py", "ünï.py", 3)
_PLAIN = "queue.db sub/queue.db data clock.py . .. / /etc link link/x loop ~ * sub/../clock.py sub/./clock.py // HOME"
PATHS = (FILE, *_PLAIN.split(), "./clock.py", "/proc/self/../..", "", " ", "a\0b", "x" * 300, 7, None)
TARGETS = (
    *("127.0.0.1:8000", "[::1]:80", "example.org:443", "0.0.0.0:80", "0:80", "0x7f.1:80", "*:80", "127.1:80", "h:0"),
    *("[::]:80", "[::ffff:0.0.0.0]:1", "224.0.0.1:1", "h:99999", "a b:1", "h", "", "127.0.0.1:080", "1.2.3.4.:80"),
)
WORDS = ("write", "read", "connect", "secrets", "memory_mb", "cpu_seconds", "allow", "wrong")
NUMBERS = (None, 0, 1, 128, 127, 60, 1.0, True, 1 << 20, 1 << 40, "128")
SECRETS = ("API_KEY", "a-b", "", "PATH", "Ä")


@cache
def folder() -> tempfile.TemporaryDirectory[str]:
    """Returns a folder of tools with a link out of it and a link in a circle; one for the life of the process."""
    made = tempfile.TemporaryDirectory(prefix="toolbus-fuzz-tools-")
    home = Path(made.name)
    (home / "sub").mkdir()
    for name in ("clock.py", "relay.py"):
        (home / name).touch()
    (home / "link").symlink_to("/etc")
    (home / "loop").symlink_to("loop")
    return made


def _entry(choose: Choices) -> Any:
    entry: dict[str, Any] = {}
    for word in choose.some(WORDS, 5):
        options: Any = PATHS if word in ("write", "read") else TARGETS if word == "connect" else SECRETS
        whole = word.endswith(("_mb", "_seconds"))
        entry[word] = (
            choose.pick(NUMBERS) if whole else choose.some(options) if choose.byte() % 8 else choose.pick(PATHS)
        )
    return entry


def _manifest(choose: Choices) -> Any:
    content: dict[Any, Any] = {}
    if choose.flag():
        content["allow"] = choose.some(FILES)
    if choose.flag():
        content["files"] = {str(choose.pick(FILES)): _entry(choose) for _ in range(choose.byte() % 3)}
    if choose.byte() % 16 == 15:
        content[choose.pick(WORDS)] = _entry(choose)
    return content


def _check(manifest: Manifest, content: Any, home: Path) -> None:
    hold(isinstance(content, dict) and set(content) <= {"allow", "files"}, f"unknown words were taken: {content!r}")
    allow = content.get("allow", ())
    hold(manifest.allow is None or list(manifest.allow) == allow, "the allow list was changed")
    hold("allow" not in content or manifest.allow is not None, "an allow list allows every file")
    for file in (*(manifest.allow or ()), *manifest.files):
        hold((home / file).parent == home and file.endswith(".py"), f"{file!r} is not a file of the folder")
    for file, grants in manifest.files.items():
        _check_grants(grants, content["files"][file], home)


def _check_grants(grants: FileGrants, content: dict[str, Any], home: Path) -> None:
    here = home.resolve()
    for path in (*grants.write, *grants.read):
        hold(path.is_absolute() and path == path.resolve() and path != Path("/"), f"{path} is not where it leads")
    for path in grants.write:
        tools = [here / FILE, here / "clock.py", here]
        hold(not any(each == path or each.is_relative_to(path) for each in tools), f"{path} holds tools")
    for words, paths in ((content.get("write", []), grants.write), (content.get("read", []), grants.read)):
        for word, path in zip(words, paths, strict=True):
            hold(Path(word).is_absolute() or path.is_relative_to(here), f"{word!r} leads out, to {path}")
    for target in grants.connect:
        hold(1 <= target.port <= 65535 and "*" not in target.host, f"{target} is not a single place")
        try:
            address = ipaddress.ip_address(target.host)
        except ValueError:
            hold(not target.host.rpartition(".")[2].isdigit(), f"{target} is an address to some resolvers")
        else:
            mapped = getattr(address, "ipv4_mapped", None) or address
            hold(not mapped.is_unspecified and not mapped.is_multicast, f"{target} is more than one place")
    hold(all(name.isidentifier() and name.isascii() for name in grants.secrets), f"{grants.secrets} are not variables")
    for number, least in ((grants.memory_mb, 128), (grants.cpu_seconds, 1)):
        hold(number is None or (type(number) is int and number >= least), f"{number!r} is not a bound")


def run(data: bytes) -> None:
    """Reads a manifest, and grants a file more than it had."""
    choose, home = Choices(data), Path(folder().name)
    text = json.dumps(_manifest(choose)) if choose.flag() else text_of(data[1:])
    try:
        manifest = read_manifest(text, home)
    except SetupError as refusal:
        hold(FILE in str(refusal), f"a refusal that does not name the file: {refusal}")
        return
    content = plain(text)
    hold(content is not REFUSED, f"what is not JSON was taken: {text!r:.300}")
    _check(manifest, content, home)
    if choose.byte() % 8 == 0 and text.isascii():
        _grant_more(text, choose, home)


def _grant_more(text: str, choose: Choices, home: Path) -> None:
    (home / FILE).write_text(text, "utf-8")
    before, entry = load_manifest(home), _entry(choose)
    try:
        grant(home, "clock.py", entry)
    except SetupError:
        hold((home / FILE).read_text("utf-8") == text, "a refused grant changed the manifest")
        return
    after = load_manifest(home)
    hold(after.allows("clock.py"), "a granted file is not allowed")
    hold(after.grants("relay.py") == before.grants("relay.py"), "another file's grants were changed")
    was, now = before.grants("clock.py"), after.grants("clock.py")
    for word in ("write", "read", "connect", "secrets"):
        hold(set(getattr(was, word)) <= set(getattr(now, word)), f"a grant of {word} was lost")
    hold(not grant(home, "clock.py", entry), "the same grant changed something the second time")


def seeds() -> Iterator[bytes]:
    """A good manifest, and every path, target and word once in a generated one."""
    yield b'\0{"allow": ["clock.py"], "files": {"clock.py": {"read": ["/etc/localtime"], "memory_mb": 256}}}'
    yield b'\0{"files": {"relay.py": {"write": ["queue.db"], "connect": ["127.0.0.1:8000"], "secrets": ["API_KEY"]}}}'
    yield b'\0{"allow": null}'
    yield b'\0{"allow": [], "allow": ["clock.py"]}'
    for place in range(max(len(PATHS), len(TARGETS), len(NUMBERS))):
        for word in range(len(WORDS) - 2):
            yield bytes([1, 0, 1, 1, 0, 1, word, *([place] if word > 3 else [1, 1, place]), 0, 0, 1, word, 1, 1, place])
    yield bytes([1, 1, 2, 0, 1, 0, 0, 1, 1, 2, 2, 1, 1, 0])


TARGET = Target("manifests", "a tool file reaches what its manifest names, and never tools or grants", run, seeds, 1024)
