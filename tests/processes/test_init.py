"""The first process of a container waits for orphans, and takes no exit code from those that wait for their own."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.processes import environment
from tests.support.waiting import WAIT_SECONDS, until_sync

linux = pytest.mark.skipif(sys.platform != "linux", reason="orphans can be taken on without a namespace on Linux only")

# A process that takes on orphans, as the first one of a container does.
BEGIN = """
import asyncio, ctypes, os, pathlib, signal, subprocess, sys, time
first = os.getpid()
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
from toolbus.processes.lifeline import work_below_init
work_below_init()
assert os.getppid() == first

def of_init():
    found = []
    for path in [each / "stat" for each in pathlib.Path("/proc").iterdir() if each.name.isdigit()]:
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == first and path.parent.name != str(os.getpid()):
            found.append(state)
    return found
"""
ORPHANS = """
for _ in range(33):
    subprocess.run(["sh", "-c", "(sleep 0.01; exit 3) & exit 0"], check=True)
while of_init():
    time.sleep(0.01)
"""
OWN = """
async def own():
    started = [await asyncio.create_subprocess_exec("sh", "-c", f"exit {n}") for n in range(20)]
    return [await each.wait() for each in started]

assert asyncio.run(own()) == list(range(20))
assert [subprocess.run(["sh", "-c", f"exit {n}"]).returncode for n in range(20)] == list(range(20))
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", BEGIN + program]
    return subprocess.run(words, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)


@linux
@pytest.mark.parametrize(
    ("program", "code"),
    [
        (ORPHANS, 0),
        (OWN, 0),
        (ORPHANS + OWN + "sys.exit(7)", 7),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137),
        ("raise SystemExit('said')", 1),
    ],
    ids=["orphans", "own", "both", "killed", "text"],
)
def test_orphans_are_waited_for_and_the_exit_code_is_that_of_the_work(program: str, code: int) -> None:
    ran = run(program)
    assert ran.returncode == code, ran.stderr


@linux
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_reach_the_work_once(number: signal.Signals, tmp_path: Path) -> None:
    program = f"""
got = []
signal.signal({int(number)}, lambda *_: got.append(1))
print("ready", flush=True)
while not got:
    time.sleep(0.01)
time.sleep(0.1)
sys.exit(10 + len(got))
"""
    words = [sys.executable, "-c", BEGIN + program]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(WAIT_SECONDS) == 11


def _may_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    words = ["unshare", "--pid", "--fork", "--mount-proc", "true"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


LEAVES = """
import pathlib, subprocess, sys, time
for _ in range(5):
    subprocess.run(["setsid", "-f", "sh", "-c", "exit 3"], check=True)

def zombies():
    found = []
    for path in [each / "stat" for each in pathlib.Path("/proc").iterdir() if each.name.isdigit()]:
        try:
            found.append(path.read_text().rpartition(")")[2].split()[0] == "Z")
        except OSError:
            pass
    return sum(found)

for _ in range(1000):
    if not zombies():
        break
    time.sleep(0.01)
print("zombies:", zombies(), flush=True)
sys.exit(4)
"""


@pytest.mark.skipif(not _may_unshare(), reason="this user may make no namespace")
def test_the_command_line_is_such_a_process_where_it_is_the_first(tmp_path: Path) -> None:
    plugin = tmp_path / "leaves.py"
    plugin.write_text(LEAVES)
    program = f"import sys; sys.argv = ['toolbus', 'run', {str(plugin)!r}]; from toolbus.cli.command_line import main"
    words = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", f"{program}; main()"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=2 * WAIT_SECONDS, check=False)
    assert "zombies: 0" in ran.stdout + ran.stderr, ran.stderr


LEAVING_SERVER = """
import json, subprocess, sys
for line in sys.stdin:
    asked = json.loads(line)
    result = {}
    if asked["method"] == "initialize":
        result = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "leaves", "version": "1"}}
    elif asked["method"] == "tools/list":
        result = {"tools": [{"name": "leave", "inputSchema": {"type": "object"}}]}
    elif asked["method"] == "tools/call":
        subprocess.run(["setsid", "-f", "sh", "-c", "exit 3"], check=True)
        result = {"content": [{"type": "text", "text": "left"}]}
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


@pytest.mark.skipif(not _may_unshare(), reason="this user may make no namespace")
def test_a_bus_that_is_the_first_process_waits_for_what_a_mounted_server_leaves(tmp_path: Path) -> None:
    server, config = tmp_path / "server.py", tmp_path / "mcp.json"
    server.write_text(LEAVING_SERVER)
    config.write_text(json.dumps({"mcpServers": {"leaves": {"command": sys.executable, "args": [str(server)]}}}))
    options = ["serve", "--ephemeral", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--mcp-servers", str(config)]
    program = f"import sys; sys.argv = {['toolbus', *options]!r}; from toolbus.cli.command_line import main; main()"
    words = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", program]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment({})) as bus:
        try:
            assert bus.stdout is not None
            http = bus.stdout.readline().partition("http=")[2].split()[0]
            with httpx.Client(base_url=f"http://{http}", trust_env=False, timeout=WAIT_SECONDS) as client:
                until_sync(lambda: "leave" in client.get("/api/tools").text, "the mounted tool")
                (name,) = [each["name"] for each in client.get("/api/tools").json()["tools_by_role"]["default"]]
                for _ in range(10):
                    answer = client.post("/api/tools/invoke", json={"name": name, "arguments": {}}).json()
                    assert not answer["is_error"], answer
            (first,) = psutil.Process(bus.pid).children()
            until_sync(
                lambda: not [each for each in first.children(recursive=True) if each.status() == psutil.STATUS_ZOMBIE],
                "the end of all zombies",
            )
        finally:
            bus.kill()
