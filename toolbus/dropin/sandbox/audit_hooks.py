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

import errno
import os
import resource
import sys
from typing import Any

from toolbus.dropin.sandbox.file_checks import Allowed, Check, file_checks, resolver, within
from toolbus.dropin.sandbox.network_checks import network_checks

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
