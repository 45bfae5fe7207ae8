"""Installs an audit hook: Python reports what it is about to do, and the hook denies what is not granted.

The hook names in its error text what is denied, works on every platform, and sees what Landlock does not: addresses,
UDP, host names, processes, signals, modes of files. It is not a boundary against native code, nor against code that
knows the interpreter well enough to write to its memory: there Landlock has to be active. Known ways round it without
Landlock: ATTACH in a granted SQLite database, grpc's own connections, other libraries that open files or connect in C,
a second copy of a built-in module. Even with Landlock: listening without a bind, asking whether a file exists, and on
Linux the types of ctypes, which the call of Landlock leaves in the interpreter: native calls can be built from them.

Python cannot remove an audit hook. What it uses is in closures (see `file_checks`), and its frame, which a traceback
shows, holds nothing when it raises. A signal handler could inspect a check while it runs, and only the main thread can
set one: so no tool's code may run there, see `run_beside_main`.
"""

from __future__ import annotations

import _socket
import errno
import os
import posix
import resource
import socket
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Checks the audit events about files: one check for each event that opens, changes or lists them.
#
# A check takes an event's arguments and returns why it is denied, or an empty text. Checks are closures over
# everything that they use, builtins included: a tool can replace what is in a module, and cannot reach a closure.
# They compare exact types only and call no method of an argument, which may be of a tool's own class.

Check = Callable[[tuple[Any, ...]], str]

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_MAX_LINKS = 40  # as the kernel

# Event → how many of its first arguments are paths, and which arguments are the directories they are relative to.
_IN_FOLDER: dict[str, tuple[int, tuple[int, ...]]] = {
    "os.remove": (1, (1,)),
    "os.rmdir": (1, (1,)),
    "os.mkdir": (1, (2,)),
    "os.rename": (2, (2, 3)),
}
_ON_FILE: dict[str, tuple[int, tuple[int, ...]]] = {
    "os.truncate": (1, ()),
    "os.chmod": (1, (2,)),
    "os.utime": (1, (3,)),
}
_READING = ("os.listdir", "os.scandir", "os.chdir", "os.getxattr", "os.listxattr")

WRITE_FIX = """only granted files may be written; grant it in _manifest.json, under "write" of this tool file's entry"""
READ_FIX = """it may not be read; grant it in _manifest.json, under "write" or "read" of this tool file's entry"""


@dataclass(frozen=True, slots=True)
class Allowed:
    """What the hook allows.

    Attributes:
        read: resolved paths, with everything below them.
        write: likewise; a file, or a directory with everything below it.
        connect: hosts and ports.
        unix: the path of the bus's unix socket, empty if it has none.
        kernel: whether Landlock checks paths too. If not, what an event leaves open is denied.
        limits: its one item is the limit on processor time that is being set now, see `CpuGuard`.
    """

    read: tuple[str, ...]
    write: tuple[str, ...]
    connect: tuple[tuple[str, int], ...]
    unix: str
    kernel: bool
    limits: list[object]


def file_checks(allowed: Allowed) -> dict[str, Check]:
    """Returns the checks of all events about files, by event."""
    change = _change_checks(allowed)
    return {
        "open": _open_check(allowed),
        "sqlite3.connect": _database_check(allowed),
        **{event: change(*shape, beneath=True) for event, shape in _IN_FOLDER.items()},
        **{event: change(*shape, beneath=False) for event, shape in _ON_FILE.items()},
        **dict.fromkeys(_READING, _list_check(allowed)),
    }


def within(roots: tuple[str, ...]) -> Callable[[str], bool]:
    """Returns a function that tells whether a resolved path is one of these or below one."""
    exact = frozenset(roots)
    prefixes = tuple(root.rstrip("/") + "/" for root in roots)
    return lambda path: path in exact or path.startswith(prefixes)


def resolver() -> Callable[..., str]:
    """Returns a function that resolves a str or bytes to the path that the kernel will use; empty for a loop of links.

    `os.path.realpath` consists of functions that a tool can replace.
    """
    kind, text, error, readlink, getcwd = type, str, OSError, posix.readlink, posix.getcwd
    max_links = _MAX_LINKS

    def resolve(path: Any, follow_last: bool = True) -> str:
        path = path if kind(path) is text else path.decode("utf-8", "surrogateescape")
        absolute = path.startswith("/")
        done = [] if absolute else getcwd().split("/")[1:]
        todo = [part for part in path.split("/")[::-1] if part and part != "."]
        links = 0
        while todo:
            part = todo.pop()
            if part == "..":
                done = done[:-1]
                continue
            done.append(part)
            if not todo and not follow_last:
                break
            try:
                target = readlink("/" + "/".join(done))
            except error:  # not a link, or it does not exist
                continue
            links += 1
            if links > max_links:
                return ""
            done = [] if target.startswith("/") else done[:-1]
            todo += [step for step in target.split("/")[::-1] if step and step != "."]
        return "/" + "/".join(done)

    return resolve


def _open_check(allowed: Allowed) -> Check:
    kind, text, data, number, show = type, str, bytes, int, ascii
    resolve, may_write, kernel = resolver(), within((*allowed.write, "/dev/null")), allowed.kernel
    may_read = within((*allowed.read, *allowed.write))
    writing, is_folder = _WRITING, _folder_test()
    write_fix, read_fix = WRITE_FIX, READ_FIX

    def check(args: tuple[Any, ...]) -> str:
        path, mode, flags = args
        if kind(path) is number:
            return ""  # an open descriptor: it was checked when it was opened
        if kind(path) is not text and kind(path) is not data:
            return "the sandbox denies a path that is not str or bytes: use os.fspath(path)"
        by_mode = kind(mode) is text and ("w" in mode or "a" in mode or "x" in mode or "+" in mode)
        writes = by_mode or kind(flags) is not number or flags & writing
        real = resolve(path)
        if writes:
            return "" if may_write(real) else f"the sandbox denies writing {show(real)}: {write_fix}"
        if mode is None and kernel and (path[:1] not in ("/", b"/")):
            return ""  # it may be relative to a directory other than the working directory: the kernel checks it
        if not may_read(real):
            return f"the sandbox denies reading {show(real)}: {read_fix}"
        if mode is None and not kernel and is_folder(real):
            return f"the sandbox denies a descriptor of the directory {show(real)}: it could reach any path; use paths"
        return ""

    return check


def _folder_test() -> Callable[[str], bool]:
    error, status, mask, folder = OSError, posix.stat, stat.S_IFMT(0o177777), stat.S_IFDIR

    def is_folder(path: str) -> bool:
        try:
            return status(path).st_mode & mask == folder
        except error:
            return False

    return is_folder


def _change_checks(allowed: Allowed) -> Callable[..., Check]:
    kind, text, data, number, show = type, str, bytes, int, ascii
    resolve, kernel, fix = resolver(), allowed.kernel, WRITE_FIX
    may_write = within(allowed.write)
    granted = frozenset(allowed.write)

    def changes(paths: int, folders: tuple[int, ...], *, beneath: bool) -> Check:
        """Returns a check.

        Args:
            beneath: the granted path itself may not be changed, and a link at the end of a path is not followed.
        """

        def check(args: tuple[Any, ...]) -> str:
            for at in folders:
                if kind(args[at]) is not number or args[at] != -1:
                    # Landlock does not cover modes and times.
                    return "" if kernel and beneath else "the sandbox denies dir_fd: use a whole path"
            for path in args[:paths]:
                if kind(path) is number:
                    if folders:
                        return "the sandbox denies changing modes and times by a descriptor: use the file's path"
                    continue  # a file that was opened for writing is truncated
                if kind(path) is not text and kind(path) is not data:
                    return "the sandbox denies a path that is not str or bytes: use os.fspath(path)"
                real = resolve(path, not beneath)
                if not may_write(real) or (beneath and real in granted):
                    return f"the sandbox denies changing {show(real)}: {fix}"
            return ""

        return check

    return changes


def _list_check(allowed: Allowed) -> Check:
    kind, text, data, number, show = type, str, bytes, int, ascii
    resolve, may_read, fix = resolver(), within((*allowed.read, *allowed.write)), READ_FIX

    def check(args: tuple[Any, ...]) -> str:
        path = "." if args[0] is None else args[0]
        if kind(path) is number:
            return ""
        if kind(path) is not text and kind(path) is not data:
            return "the sandbox denies a path that is not str or bytes: use os.fspath(path)"
        real = resolve(path)
        return "" if may_read(real) else f"the sandbox denies listing {show(real)}: {fix}"

    return check


def _database_check(allowed: Allowed) -> Check:
    """Checks connections of SQLite, which opens files in C: without Landlock only granted ones are allowed."""
    kind, text, data, show = type, str, bytes, ascii
    resolve, may_write, kernel, fix = resolver(), within(allowed.write), allowed.kernel, WRITE_FIX

    def check(args: tuple[Any, ...]) -> str:
        path = args[0]
        if kernel:
            return ""
        if kind(path) is not text and kind(path) is not data:
            return "the sandbox denies a path that is not str or bytes: use os.fspath(path)"
        if path[:5] not in ("file:", b"file:") and path not in ("", ":memory:", b"", b":memory:"):
            real = resolve(path)
            if may_write(real):
                return ""
        return f"the sandbox denies SQLite {show(path)}: {fix}"

    return check


# Landlock knows ports but not addresses, and no protocol besides TCP; here both are checked. Checks are closures for
# the reason that `file_checks` gives.

NETWORK_FIX = 'grant it in _manifest.json, under "connect" of this tool file\'s entry'


def network_checks(allowed: Allowed) -> dict[str, Check]:
    """Returns the checks of all events about sockets, by event."""
    connect = _connect_check(allowed)
    return {
        "socket.__new__": _new_check(),
        "socket.connect": connect,
        "socket.sendto": connect,
        "socket.sendmsg": connect,
        "socket.getaddrinfo": _name_check(allowed),
        "socket.gethostbyname": _name_check(allowed),
        "socket.gethostbyaddr": _name_check(allowed),
    }


def _new_check() -> Check:
    """Allows TCP sockets, and unix sockets: an event loop wakes itself over a pair of them."""
    show, stream, exact_type, number = ascii, int(socket.SOCK_STREAM), type, int
    inet = frozenset(map(int, (socket.AF_INET, socket.AF_INET6)))
    local = frozenset((-1, int(socket.AF_UNIX)))  # -1: taken from a descriptor that exists already
    tcp = frozenset((-1, 0, int(socket.IPPROTO_TCP)))
    names = {int(socket.SOCK_DGRAM): "a UDP socket", int(socket.SOCK_RAW): "a raw socket"}

    def check(args: tuple[Any, ...]) -> str:
        _, family, kind, protocol = args
        if exact_type(family) is not number or exact_type(kind) is not number or exact_type(protocol) is not number:
            return "the sandbox denies a socket whose family, type or protocol is not an int"
        if family in local or (family in inet and kind & 0xF == stream and protocol in tcp):
            return ""
        what = f"a socket of family {show(family)}, type {show(kind)}"
        if family in inet and kind & 0xF in names:
            what = names[kind & 0xF]
        return f"the sandbox denies {what}: tools may use TCP only, to what _manifest.json grants"

    return check


def _connect_check(allowed: Allowed) -> Check:
    kind, text, data, pair, number, show, length = type, str, bytes, tuple, int, ascii, len
    exact, unix, resolve, fix = frozenset(allowed.connect), allowed.unix, resolver(), NETWORK_FIX
    is_granted = _address_test(allowed)

    def check(args: tuple[Any, ...]) -> str:
        address = args[1]
        if address is None:  # the socket is connected already
            return ""
        if kind(address) is pair and length(address) >= 2:
            host, port = address[0], address[1]
            if kind(host) is text and kind(port) is number:
                if (host, port) in exact or is_granted(host, port):
                    return ""
                return f"the sandbox denies a connection to {show(host)} port {port}: {fix}"
        elif unix and (kind(address) is text or kind(address) is data) and resolve(address) == unix:
            return ""
        return "the sandbox denies a connection to anything but (host, port): pass a str and an int"

    return check


def _address_test(allowed: Allowed) -> Callable[[str, int], bool]:
    """Returns a function that tells whether an address is one of a granted host name, now or before."""
    grants, resolve_name, error, stream = allowed.connect, _socket.getaddrinfo, OSError, int(socket.SOCK_STREAM)
    known: set[tuple[object, int]] = set()
    numeric = _numeric_test()

    def is_granted(host: str, port: int) -> bool:
        if not numeric(host):
            return False
        if (host, port) in known:
            return True
        for name, granted in grants:
            if granted == port and not numeric(name):
                try:
                    addresses = resolve_name(name, port, 0, stream)
                except error:
                    continue
                for entry in addresses:
                    known.add((entry[4][0], port))
        return (host, port) in known

    return is_granted


def _numeric_test() -> Callable[[str], bool]:
    families, pton, errors = (int(socket.AF_INET), int(socket.AF_INET6)), _socket.inet_pton, (OSError, ValueError)

    def numeric(host: str) -> bool:
        for family in families:
            try:
                pton(family, host)
            except errors:
                continue
            return True
        return False

    return numeric


def _name_check(allowed: Allowed) -> Check:
    """Allows look-ups of granted names only, since a look-up sends the name out; numeric addresses are not sent."""
    kind, text, data, show, fix = type, str, bytes, ascii, NETWORK_FIX
    names, numeric = frozenset(host.lower() for host, _ in allowed.connect), _numeric_test()

    def check(args: tuple[Any, ...]) -> str:
        host = args[0]
        if host is None:
            return ""
        if kind(host) is data:
            host = host.decode("ascii", "replace")
        if kind(host) is text and (host.lower() in names or numeric(host)):
            return ""
        return f"the sandbox denies looking up {show(host) if kind(host) is text else 'a name'}: {fix}"

    return check


# Events that are denied whatever their arguments, by what they do.
_DENIED: dict[str, tuple[str, ...]] = {
    "starting a process": (
        *("subprocess.Popen", "os.system", "os.exec", "os.spawn", "os.posix_spawn", "os.startfile"),
        *("os.fork", "os.forkpty", "pty.spawn"),
    ),
    "making a link": ("os.link", "os.symlink"),
    "changing a file's owner or attributes": (
        *("os.chown", "os.chflags", "os.lchmod", "os.setxattr", "os.removexattr"),
    ),
    "signals to a group of processes": ("os.killpg",),
    "listening on a socket": ("socket.bind",),
    "this use of the network": ("socket.sethostname", "socket.getnameinfo"),
    "calling native code": (
        *("ctypes.dlopen", "ctypes.dlsym", "ctypes.dlsym/handle", "ctypes.call_function", "ctypes.cdata"),
        *("ctypes.cdata/buffer", "ctypes.addressof", "ctypes.string_at", "ctypes.wstring_at", "ctypes.PyObj_FromPtr"),
        *("ctypes.set_errno", "ctypes.get_errno", "ctypes.memoryview_at"),
        *("sqlite3.enable_load_extension", "sqlite3.load_extension"),
    ),
    "access to the interpreter's internals": (
        *("sys.settrace", "sys.setprofile", "sys.addaudithook", "sys.monitoring.register_callback"),
        *("sys._current_frames", "sys._current_exceptions", "sys.remote_exec", "setopencodehook"),
        *("gc.get_objects", "gc.get_referrers", "gc.get_referents"),
        "cpython.PyInterpreterState_New",  # another interpreter would have no hook
    ),
    "writing to the system log": ("syslog.syslog", "syslog.openlog", "syslog.setlogmask", "syslog.closelog"),
    "controlling a device": ("fcntl.ioctl",),
    "changing a limit of another process": ("resource.prlimit",),
}

# Modules that open files, call native code or start interpreters without an audit event.
_DENIED_MODULES = (
    *("ctypes", "_ctypes", "_ctypes_test", "_testcapi", "_testinternalcapi", "_xxsubinterpreters", "_interpreters"),
    *("_dbm", "_gdbm", "_posixshmem", "readline", "_tkinter"),
)

# Functions without an audit event. They are removed from their modules, which a tool may find a way round.
_UNAUDITED_POSIX = (
    *("mkfifo", "mknod", "chroot", "pidfd_open", "setns", "unshare", "setpriority"),
    *("setuid", "setgid", "seteuid", "setegid", "setreuid", "setregid", "setresuid", "setresgid", "setgroups"),
)
_UNAUDITED: dict[str, tuple[str, ...]] = {
    "posix": _UNAUDITED_POSIX,
    "os": _UNAUDITED_POSIX,
    "signal": ("pidfd_send_signal",),
    "_signal": ("pidfd_send_signal",),
    "time": ("clock_settime", "clock_settime_ns"),
    "_posixsubprocess": ("fork_exec",),
    "subprocess": ("_fork_exec",),
}


def install(allowed: Allowed) -> None:
    """Adds the hook to this process, until its end, and removes the functions that have no audit event."""
    _remove_unaudited()
    _add_hook(_checks(allowed))


def _checks(allowed: Allowed) -> dict[str, Check]:
    checks = {event: _deny_always(what) for what, events in _DENIED.items() for event in events}
    checks |= file_checks(allowed) | network_checks(allowed)
    checks["import"] = _import_check(allowed)
    checks["os.kill"] = _kill_check()
    checks["resource.setrlimit"] = _limit_check(allowed)
    return checks


def _add_hook(checks: dict[str, Check]) -> None:
    def hook(
        event: str,
        args: tuple[Any, ...],
        # Defaults, not closure: from Python 3.13 on, code that holds a frame can write to the closure's variables.
        checks: dict[str, Check] = checks,
        permission_error: type[Exception] = PermissionError,
        import_error: type[Exception] = ImportError,
        any_error: type[BaseException] = BaseException,
        number: int = errno.EACCES,
    ) -> None:
        if event not in checks:
            return
        try:
            reason = checks[event](args)
        except any_error:  # no memory, too deep a recursion: its frames must not reach a tool
            reason = "the sandbox could not check this, so it denies it"
        if not reason:
            return
        del checks, args
        if event == "import":
            raise import_error(reason)  # libraries that can work without a module expect this one
        raise permission_error(number, reason)

    sys.addaudithook(hook)


def _deny_always(what: str) -> Check:
    reason = f"the sandbox denies {what}: no grant allows it; change the tool so that it works without"
    return lambda args: reason


def _import_check(allowed: Allowed) -> Check:
    kind, text = type, str
    # Imported already: a fresh copy of one would have the removed functions again.
    builtin = (name for name in _UNAUDITED if name in sys.builtin_module_names)
    denied = frozenset((*_DENIED_MODULES, *builtin, *(() if allowed.kernel else ("_cffi_backend",))))
    resolve, may_write, may_read = resolver(), within(allowed.write), within(allowed.read)

    def check(args: tuple[Any, ...]) -> str:
        name, file = args[0], args[1]
        if kind(name) is not text:
            return "the sandbox denies an import whose name is not a str"
        if name.partition(".")[0] in denied or name.rpartition(".")[2] in denied:
            return f"the sandbox denies the module {name}: it can call native code or open files without a check"
        if file is None:
            return ""
        if kind(file) is not text:
            return "the sandbox denies a native module whose path is not a str"
        path = resolve(file)
        if path.rpartition("/")[2].partition(".")[0] in denied or may_write(path) or not may_read(path):
            return f"the sandbox denies the native module {path}: install it outside of what tools can write"
        return ""

    return check


def _kill_check() -> Check:
    own, kind, number = os.getpid(), type, int

    def check(args: tuple[Any, ...]) -> str:
        if kind(args[0]) is number and args[0] == own:
            return ""
        return "the sandbox denies signals to another process: no grant allows them"

    return check


def _limit_check(allowed: Allowed) -> Check:
    own, cpu, kind, number = allowed.limits, resource.RLIMIT_CPU, type, int

    def check(args: tuple[Any, ...]) -> str:
        if kind(args[0]) is number and args[0] == cpu and args[1] is not None and args[1] is own[0]:
            return ""
        return "the sandbox denies changing a limit: grant more memory_mb or cpu_seconds, or make the tool use less"

    return check


def _remove_unaudited() -> None:
    """Removes ctypes, and the functions that have no audit event, from all modules."""
    import signal  # noqa: F401  # asyncio imports all three later: what is removed has to be loaded now
    import subprocess  # noqa: F401
    import time  # noqa: F401

    def deny(*args: object, **options: object) -> Any:
        reason = "the sandbox denies this: no grant allows it; change the tool so that it works without"
        raise PermissionError(errno.EACCES, reason)

    for name, functions in _UNAUDITED.items():
        for function in functions:
            if hasattr(sys.modules[name], function):
                setattr(sys.modules[name], function, deny)
    names = [name for name in sys.modules if name.partition(".")[0] in ("ctypes", "_ctypes")]
    removed = {id(module): module for module in map(sys.modules.pop, names)}
    for module in list(sys.modules.values()):
        for name in [name for name, value in vars(module).items() if id(value) in removed]:
            delattr(module, name)
