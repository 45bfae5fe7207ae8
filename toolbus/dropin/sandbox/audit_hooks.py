"""Audit hooks: Python tells us what it is about to do, and we refuse what is not granted.

They say in words what is refused and work on every platform, and they see what Landlock does not: addresses, UDP, names
asked for, processes, signals, modes of files. They are no border against native code, nor against who knows the
interpreter well enough to write to its memory: where that matters, Landlock has to be active. Known ways round them
without it: ATTACH in a granted SQLite database, grpc's own connections, other libraries that open files or connect in
C, a second copy of a built-in module. Even with it: listening without a bind, asking whether a file exists, and on
Linux the types of ctypes, which the call of Landlock leaves in the interpreter: from them native calls can be built.

The hook stays: Python has no way to remove one, what it uses is in closures (see `file_checks`), and its frame, which a
traceback shows, holds nothing when it raises. A signal handler could look into a check while it runs, and only the main
thread can set one: so no tool's code may run there, see `run_beside_main`.
"""

from __future__ import annotations

import errno
import os
import resource
import sys
from typing import Any

from toolbus.dropin.sandbox.file_checks import Allowed, Check, file_checks, resolver, within
from toolbus.dropin.sandbox.network_checks import network_checks

# Refused whatever the arguments, by what it would do.
_REFUSED: dict[str, tuple[str, ...]] = {
    "start a process": (
        *("subprocess.Popen", "os.system", "os.exec", "os.spawn", "os.posix_spawn", "os.startfile"),
        *("os.fork", "os.forkpty", "pty.spawn"),
    ),
    "make a link": ("os.link", "os.symlink"),
    "change a file's owner or attributes": (*("os.chown", "os.chflags", "os.lchmod", "os.setxattr", "os.removexattr"),),
    "signal a group of processes": ("os.killpg",),
    "offer a connection": ("socket.bind",),
    "use the network by this": ("socket.sethostname", "socket.getnameinfo"),
    "call native code": (
        *("ctypes.dlopen", "ctypes.dlsym", "ctypes.dlsym/handle", "ctypes.call_function", "ctypes.cdata"),
        *("ctypes.cdata/buffer", "ctypes.addressof", "ctypes.string_at", "ctypes.wstring_at", "ctypes.PyObj_FromPtr"),
        *("ctypes.set_errno", "ctypes.get_errno", "ctypes.memoryview_at"),
        *("sqlite3.enable_load_extension", "sqlite3.load_extension"),
    ),
    "look into the interpreter": (
        *("sys.settrace", "sys.setprofile", "sys.addaudithook", "sys.monitoring.register_callback"),
        *("sys._current_frames", "sys._current_exceptions", "sys.remote_exec", "setopencodehook"),
        *("gc.get_objects", "gc.get_referrers", "gc.get_referents"),
        "cpython.PyInterpreterState_New",  # another interpreter would have no hook
    ),
    "write to the system's log": ("syslog.syslog", "syslog.openlog", "syslog.setlogmask", "syslog.closelog"),
    "control a device": ("fcntl.ioctl",),
    "change a limit of another process": ("resource.prlimit",),
}

# Modules that open files, call native code or start interpreters without telling.
_REFUSED_MODULES = (
    *("ctypes", "_ctypes", "_ctypes_test", "_testcapi", "_testinternalcapi", "_xxsubinterpreters", "_interpreters"),
    *("_dbm", "_gdbm", "_posixshmem", "readline", "_tkinter"),
)

# Functions that audit hooks are not told of. They are taken out of their modules, which is not out of reach.
_OF_POSIX = (
    *("mkfifo", "mknod", "chroot", "pidfd_open", "setns", "unshare", "setpriority"),
    *("setuid", "setgid", "seteuid", "setegid", "setreuid", "setregid", "setresuid", "setresgid", "setgroups"),
)
_UNTOLD: dict[str, tuple[str, ...]] = {
    "posix": _OF_POSIX,
    "os": _OF_POSIX,
    "signal": ("pidfd_send_signal",),
    "_signal": ("pidfd_send_signal",),
    "time": ("clock_settime", "clock_settime_ns"),
    "_posixsubprocess": ("fork_exec",),
    "subprocess": ("_fork_exec",),
}


def install(allowed: Allowed) -> None:
    """Has the hook watch this process, from now to its end, and takes out what hooks are not told of."""
    _disarm()
    _watch(_checks(allowed))


def _checks(allowed: Allowed) -> dict[str, Check]:
    checks = {event: _always(what) for what, events in _REFUSED.items() for event in events}
    checks |= file_checks(allowed) | network_checks(allowed)
    checks["import"] = _import_check(allowed)
    checks["os.kill"] = _kill_check()
    checks["resource.setrlimit"] = _limit_check(allowed)
    return checks


def _watch(checks: dict[str, Check]) -> None:
    def hook(
        event: str,
        args: tuple[Any, ...],
        # Defaults, not closure: from Python 3.13 on, who holds a frame can write to the closure's variables.
        checks: dict[str, Check] = checks,
        refused: type[Exception] = PermissionError,
        not_there: type[Exception] = ImportError,
        anything: type[BaseException] = BaseException,
        number: int = errno.EACCES,
    ) -> None:
        if event not in checks:
            return
        try:
            why = checks[event](args)
        except anything:  # whatever it was (no memory, too deep a recursion), its frames must not get out
            why = "the sandbox could not check this, so it refuses it"
        if not why:
            return
        del checks, args
        if event == "import":
            raise not_there(why)  # what libraries that can do without a module expect
        raise refused(number, why)

    sys.addaudithook(hook)


def _always(what: str) -> Check:
    sentence = f"the sandbox refuses to {what}: no grant allows it; have the tool do without"
    return lambda args: sentence


def _import_check(allowed: Allowed) -> Check:
    kind, text = type, str
    again = (name for name in _UNTOLD if name in sys.builtin_module_names)  # imported already: a fresh one has it all
    refused = frozenset((*_REFUSED_MODULES, *again, *(() if allowed.kernel else ("_cffi_backend",))))
    resolve, may_write, may_read = resolver(), within(allowed.write), within(allowed.read)

    def check(args: tuple[Any, ...]) -> str:
        name, file = args[0], args[1]
        if kind(name) is not text:
            return "the sandbox imports by names that are str"
        if name.partition(".")[0] in refused or name.rpartition(".")[2] in refused:
            return f"the sandbox refuses the module {name}: it would call native code or open files unseen"
        if file is None:
            return ""
        if kind(file) is not text:
            return "the sandbox loads native modules from paths that are str"
        path = resolve(file)
        if path.rpartition("/")[2].partition(".")[0] in refused or may_write(path) or not may_read(path):
            return f"the sandbox refuses the native module {path}: it may not stand where a tool can write"
        return ""

    return check


def _kill_check() -> Check:
    own, kind, number = os.getpid(), type, int

    def check(args: tuple[Any, ...]) -> str:
        if kind(args[0]) is number and args[0] == own:
            return ""
        return "the sandbox refuses to signal another process: no grant allows it"

    return check


def _limit_check(allowed: Allowed) -> Check:
    ours, cpu, kind, number = allowed.limits, resource.RLIMIT_CPU, type, int

    def check(args: tuple[Any, ...]) -> str:
        if kind(args[0]) is number and args[0] == cpu and args[1] is not None and args[1] is ours[0]:
            return ""
        return "the sandbox refuses to change a limit: grant memory_mb, or have the tool use less"

    return check


def _disarm() -> None:
    """Takes ctypes and the functions that hooks are not told of out of all modules."""
    import signal  # noqa: F401  # asyncio imports all three: what is to go has to be there
    import subprocess  # noqa: F401
    import time  # noqa: F401

    def refuse(*args: object, **options: object) -> Any:
        raise PermissionError(errno.EACCES, "the sandbox refuses this: no grant allows it; have the tool do without")

    for name, functions in _UNTOLD.items():
        for function in functions:
            if hasattr(sys.modules[name], function):
                setattr(sys.modules[name], function, refuse)
    gone = [sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in ("ctypes", "_ctypes")]
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()):
            if any(value is one for one in gone):
                delattr(module, name)
