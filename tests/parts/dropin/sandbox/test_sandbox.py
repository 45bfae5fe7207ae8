"""Tests what still works in the sandbox, its error texts, and when a process cannot be sandboxed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parts.dropin.sandbox.trial import ROOT
from tests.support.waiting import HANG_SECONDS
from toolbus.parts.dropin.sandbox import CpuGuard, Protection, clean_environment
from toolbus.protocol.tool import MIB

_START = "import os, sys\nfrom pathlib import Path\nfrom toolbus.parts.dropin.sandbox import SandboxGrants, apply\n"


def _run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _START + textwrap.dedent(code), *map(str, arguments)],
        env={**clean_environment(), "PYTHONSAFEPATH": ""},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.fixture(params=["True", "False"], ids=["landlock", "audit hooks alone"])
def landlock(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_what_is_granted_works(tmp_path: Path, listener: int, landlock: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("readable", encoding="utf-8")
    done = _run(
        """
        top, port = Path(sys.argv[1]), int(sys.argv[2])
        apply(
            SandboxGrants(write=(top / "folder", top / "new"), read=(top / "text",), connect=(("localhost", port),)),
            bus="127.0.0.1:1", landlock=sys.argv[3] == "True",
        )
        import asyncio, shutil, socket, sqlite3
        assert (top / "text").read_text() == "readable"
        assert (top / "new").read_text() == ""
        (top / "new").write_text("written")
        os.truncate(top / "new", 3)
        os.chdir(top / "folder")
        Path("a/b").mkdir(parents=True)
        Path("a/b/c").write_text("x")
        Path("a/b/c").rename("d")
        os.chmod("d", 0o600)
        assert os.listdir() in (["a", "d"], ["d", "a"])
        Path("d").unlink()
        shutil.copy(top / "text", "copied")
        with sqlite3.connect(str(top / "folder/base.db")) as held:
            held.execute("create table t (x)")
        socket.create_connection(("localhost", port)).close()
        async def connect():
            reader, writer = await asyncio.open_connection("localhost", port)
            writer.close()
        asyncio.run(connect())
        open(os.devnull, "w").close()
        print("done", (top / "new").read_text())
        """,
        *(tmp_path, listener, landlock),
    )
    assert (done.stdout, done.stderr) == ("done wri\n", "")


def test_python_and_its_libraries_work_without_any_grant(landlock: str) -> None:
    done = _run(
        """
        apply(SandboxGrants(), bus="127.0.0.1:1", landlock=sys.argv[1] == "True")
        import asyncio, concurrent.futures, datetime, getpass, logging, multiprocessing, platform, random, secrets, ssl
        import subprocess, tempfile, urllib.request, uuid, zoneinfo, collections, dataclasses, enum, inspect, typing
        import google.protobuf, grpc, grpc.aio, toolbus.sdk
        zoneinfo.ZoneInfo("Europe/Berlin"), ssl.create_default_context(), uuid.uuid4(), secrets.token_hex()
        collections.namedtuple("P", "x y", defaults=(1,))(1), dataclasses.make_dataclass("D", ["x"])(1)
        try: 1 / 0
        except ZeroDivisionError: logging.exception("shown")
        with concurrent.futures.ThreadPoolExecutor() as threads:
            assert list(threads.map(abs, [-1])) == [1]
        async def sleeps(): return await asyncio.to_thread(abs, -2)
        assert asyncio.run(sleeps()) == 2
        os.kill(os.getpid(), 0)
        print("done")
        """,
        landlock,
    )
    assert done.stdout == "done\n", done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_an_error_text_names_what_was_denied_and_how_to_fix_it() -> None:
    done = _run(
        """
        apply(SandboxGrants(), bus="127.0.0.1:1")
        for attempt in (lambda: open("/nowhere", "w"), lambda: open("/etc/shadow"), lambda: __import__("ctypes")):
            try: attempt()
            except OSError as error: print(error.errno, error.strerror)
            except ImportError as error: print(error)
        """
    )
    assert done.stdout.splitlines() == [
        "13 the sandbox denies writing '/nowhere': only granted files may be written; grant it in _manifest.json, "
        """under "write" of this tool file's entry""",
        "13 the sandbox denies reading '/etc/shadow': it may not be read; grant it in _manifest.json, "
        """under "write" or "read" of this tool file's entry""",
        "the sandbox denies the module ctypes: it can call native code or open files without a check",
    ]


def test_a_denied_socket_is_named_by_its_kind() -> None:
    done = _run(
        """
        import socket
        apply(SandboxGrants(), bus="127.0.0.1:1")
        for attempt in (
            lambda: socket.socket(type=socket.SOCK_DGRAM),
            lambda: socket.create_connection(("127.0.0.1", 9)),
        ):
            try: attempt()
            except OSError as error: print(error.strerror)
        """
    )
    assert done.stdout.splitlines() == [
        "the sandbox denies a UDP socket: tools may use TCP only, to what _manifest.json grants",
        "the sandbox denies a connection to '127.0.0.1' port 9: grant it in _manifest.json, "
        """under "connect" of this tool file's entry""",
    ]


def test_the_text_of_a_protection_names_the_active_layers() -> None:
    guard = CpuGuard(30)
    assert Protection(7, "", True, True, 546 * MIB, 30, guard).as_text() == (
        "Landlock ABI 7, seccomp, audit hooks, 546 MiB of address space, 30 s CPU a call and a minute without calls"
    )
    assert Protection(0, "darwin has none", False, True, 0, 5, guard).as_text() == (
        "no Landlock (darwin has none), no seccomp, audit hooks, memory unlimited, "
        "5 s CPU a call and a minute without calls"
    )


@pytest.mark.parametrize(
    ("before", "error"),
    [
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "2 threads run"),
        ("import grpc", "grpc is imported already"),
        ("grants = SandboxGrants(write=(Path('/nowhere/at/all'),))", "'/nowhere/at/all' cannot be created or opened"),
    ],
)
def test_a_process_that_cannot_be_sandboxed_ends_with_the_reason(before: str, error: str) -> None:
    done = _run(f"grants = SandboxGrants()\n{before}\napply(grants, bus='127.0.0.1:1')\nprint('went on')")
    assert done.stdout == ""
    assert error in done.stderr


def test_a_granted_file_that_does_not_exist_is_created_for_its_owner_only(tmp_path: Path) -> None:
    done = _run("apply(SandboxGrants(write=(Path(sys.argv[1]),)), bus='127.0.0.1:1')", tmp_path / "new")
    assert done.stderr == ""
    assert os.stat(tmp_path / "new").st_mode & 0o777 == 0o600


def test_only_the_named_descriptors_stay_open() -> None:
    done = _run(
        """
        kept, other = os.pipe()
        os.write(other, b"x")
        apply(SandboxGrants(), bus="127.0.0.1:1", keep_fds=[kept])
        print(os.read(kept, 2))
        try: os.close(other)
        except OSError as error: print(error.strerror)
        """
    )
    assert done.stdout == "b'x'\nBad file descriptor\n", done.stderr


def test_limits_are_set_and_cannot_be_raised() -> None:
    done = _run(
        """
        import resource
        apply(SandboxGrants(file_bytes=1000), bus="127.0.0.1:1")
        for name in ("CORE", "NOFILE", "FSIZE"): print(resource.getrlimit(getattr(resource, f"RLIMIT_{name}")))
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        assert soft == hard and 736 << 20 < hard < 864 << 20
        for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NPROC):
            try: resource.setrlimit(kind, (-1, -1))
            except PermissionError: print("denied")
        """
    )
    assert done.stdout.splitlines() == ["(0, 0)", "(256, 256)", "(1000, 1000)", *["denied"] * 3], done.stderr


def test_processor_time_is_limited_during_calls_and_between_them_once_it_is_watched() -> None:
    done = _run(
        """
        import resource, threading
        protection = apply(SandboxGrants(cpu_seconds_per_call=7), bus="127.0.0.1:1")
        def soft(): return resource.getrlimit(resource.RLIMIT_CPU)[0]
        seen = [soft()]
        with protection.cpu.call():
            seen.append(soft())
            with protection.cpu.call(): seen.append(soft())
            seen.append(soft())
        seen.append(soft())
        set_once, stop = threading.Event(), threading.Event()
        def pause(seconds):
            set_once.set()
            stop.wait()
        threading.Thread(target=protection.cpu.watch, args=(pause,), daemon=True).start()
        set_once.wait(20)
        seen.append(soft())
        with protection.cpu.call(): pass
        print(*seen, soft())
        """
    )
    assert done.stdout == "-1 8 8 8 -1 8 8\n", done.stderr
