"""Lists attempts to break out of the sandbox, as a table; `trial.py` runs them.

Each attempt runs in a process of its own, which sandboxes itself first. An attempt that ends without an exception has
escaped. The names that its code finds: ``folder`` (granted for writing), ``outside`` (not granted, with the file
``secret``), ``home``, ``bus_data``, ``other_tool`` (a file), ``port`` and ``unix`` (a server listens there),
``inherited`` (a descriptor of the parent's), ``parent`` (its process id), ``bus`` (the bus's address for drop-in tools)
and ``bus_itself`` (its own address)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Breakout:
    """One attempt.

    Attributes:
        code: that it runs.
        layers: the layers that stop it, each alone: ``audit``, ``landlock``.
    """

    name: str
    code: str
    layers: frozenset[str] = frozenset({"audit", "landlock"})


def _both(name: str, code: str) -> Breakout:
    return Breakout(name, code)


def _audit(name: str, code: str) -> Breakout:
    return Breakout(name, code, frozenset({"audit"}))


def _kernel(name: str, code: str) -> Breakout:
    return Breakout(name, code, frozenset({"landlock"}))


# Tries to run a tool's code on the main thread, since only there a signal handler can be set.
_ON_MAIN = """
import signal, sys, threading
own, tried, called = threading.get_ident(), [], threading.Event()
def reach(*args, **more):
    if threading.get_ident() == own: return 0
    try:
        signal.signal(signal.SIGALRM, lambda number, frame: None)
        tried.append(None)
    except ValueError as error:
        tried.append(error)
    called.set()
    threading.Event().wait()
"""
_RAISE_FAILURE = """
os.kill(os.getpid(), signal.SIGTERM)
called.wait(5)
if None not in tried: raise tried[0]
"""
_LIBC = "import ctypes; libc = ctypes.CDLL(None, use_errno=True)"
# The types of ctypes outlive its modules. What they know of memory leads to any function of the C library.
_ANY_FUNCTION = """
import struct
c = next(each for each in object.__subclasses__() if each.__name__ == 'CDLL').__init__.__globals__
def peek(at, size):
    held = (c['c_char'] * size)()
    c['memmove'](held, at, size)
    return held.raw
base = c['_memmove_addr'] & ~0xFFF
while peek(base, 4) != b'\\x7fELF': base -= 0x1000
at, size, count = struct.unpack('<Q14xHH', peek(base + 0x20, 26))
headers = [struct.unpack('<IIQQQQ', peek(base + at + n * size, 40)) for n in range(count)]
(dynamic,) = [base + header[3] for header in headers if header[0] == 2]
found = dict(struct.unpack('<QQ', peek(dynamic + n * 16, 16)) for n in range(20))
symbols, texts = found[6], found[5]
def function(name):
    for n in range((texts - symbols) // 24):
        text, value = struct.unpack('<IxxxxQ', peek(symbols + n * 24, 16))
        if peek(texts + text, len(name) + 1) == name + b'\\0': return base + value
"""
_ON_BUS = """
import grpc
from toolbus.errors import Code
from toolbus.sdk import CallContext, SyncHost
from toolbus.v1 import tool_bus_service_pb2 as wire, tool_bus_service_pb2_grpc as rpc
def host(source, at=bus):
    return SyncHost(at, source=source, token='its token')
def call(name, **arguments):
    with host('dropin') as asking:
        error = asking.call(name, arguments, timeout=5, context=CallContext('root', {'level': '99'})).error
        if error and error.code in (Code.PERMISSION_DENIED, Code.NOT_FOUND): raise PermissionError(f'the bus: {error}')
def ask(what, request, at=bus):
    with grpc.insecure_channel(at) as channel:
        try: getattr(rpc.ToolBusServiceStub(channel), what)(request, timeout=5)
        except grpc.RpcError as error:
            who = 'the bus: ' if error.code() is grpc.StatusCode.PERMISSION_DENIED else ''
            if who or 'ermission' in error.details(): raise PermissionError(f'{who}{error.details()}')
"""
_CHECK = "if result < 0: raise PermissionError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))"

FILES = (
    _both("open for writing", "open(f'{outside}/new', 'w')"),
    _both("open for appending", "open(secret, 'a')"),
    _both("os.open", "os.open(f'{outside}/new', os.O_WRONLY | os.O_CREAT)"),
    _both("os.open with O_TMPFILE", "os.open(outside, os.O_RDWR | os.O_TMPFILE)"),
    _both("io.FileIO", "import io; io.FileIO(f'{outside}/new', 'x')"),
    _both("pathlib", "import pathlib; pathlib.Path(outside, 'new').write_text('x')"),
    _both("shutil.copy", "import shutil; shutil.copy(__file__, outside)"),
    _both("shutil.rmtree", "import shutil; shutil.rmtree(outside)"),
    _both("tempfile", "import tempfile; tempfile.mkstemp(dir=outside)"),
    _both("sqlite3", "import sqlite3; sqlite3.connect(f'{outside}/new.db').execute('create table t (x)')"),
    _both(
        "sqlite3 with a URI",
        """
        import sqlite3
        sqlite3.connect(f'file:{outside}/n.db', uri=True).execute('create table t (x)')
    """,
    ),
    _both(
        "sqlite3 ATTACH",
        """
        import sqlite3
        held = sqlite3.connect(':memory:')
        held.execute('attach ? as o', [f'{outside}/n.db'])
        held.execute('create table o.t (x)')
    """,
    ),
    _both("mmap", "import mmap; mmap.mmap(os.open(secret, os.O_RDWR), 0)"),
    _both("os.truncate", "os.truncate(secret, 0)"),
    _both("os.rename", "os.rename(secret, f'{folder}/mine')"),
    _both("os.replace over a file", "open(f'{folder}/x', 'w').close(); os.replace(f'{folder}/x', secret)"),
    _both("os.link", "os.link(secret, f'{folder}/mine')"),
    _both("os.symlink", "os.symlink(secret, f'{folder}/mine')"),
    _both("through a link that was there", "open(f'{folder}/link', 'w')"),
    _both("through dots", "open(f'{folder}/../outside/new', 'w')"),
    _both("relative to a directory", "os.open('new', os.O_WRONLY | os.O_CREAT, dir_fd=os.open(outside, os.O_RDONLY))"),
    _both("os.mkdir", "os.mkdir(f'{outside}/new')"),
    _both("os.rmdir", "os.rmdir(f'{outside}/empty')"),
    _both("os.unlink", "os.unlink(secret)"),
    _both("os.mkfifo", "os.mkfifo(f'{outside}/new')"),
    _both("os.mknod", "os.mknod(f'{outside}/new')"),
    _audit("os.chmod", "os.chmod(secret, 0o666)"),
    _audit("os.chown", "os.chown(secret, 1, 1)"),
    _audit("os.utime", "os.utime(secret)"),
    _audit("os.setuid", "os.setuid(os.getuid())"),
    _audit(
        "the clock",
        """
        import time
        try: time.clock_settime(-1, 0.0)  # no clock: the machine's is not to be touched where this gets out
        except OSError as error:
            if error.errno != 22: raise
    """,
    ),
    _audit("os.setxattr", "os.setxattr(secret, 'user.x', b'x')"),
    _both("shared memory", "import multiprocessing.shared_memory as m; m.SharedMemory(create=True, size=10).unlink()"),
    _both("dbm", "import dbm; dbm.open(f'{outside}/new', 'c')"),
    _both("a key log of TLS", "import ssl; ssl.create_default_context().keylog_filename = f'{outside}/new'"),
    _both("/proc/self/mem", "open('/proc/self/mem', 'r+b')"),
    _both("bytecode beside a module", "import json; open(f'{json.__path__[0]}/x.py', 'w')"),
)

READING = (
    _both("~/.ssh", "open(f'{home}/.ssh/id_ed25519').read()"),
    _both("listing home", "os.listdir(home)"),
    _both("the bus's data", "open(f'{bus_data}/bus.db', 'rb').read()"),
    _both("another tool's file", "open(other_tool).read()"),
    _both("/proc/self/root", "open(f'/proc/self/root{secret}').read()"),
    _both("the environment of the parent", "open(f'/proc/{parent}/environ').read()"),
    _both("a variable of the parent", "os.environ['BREAKOUT_SECRET']"),
    _both("the token in the environment", "os.environ['TOOLBUS_TOKEN']"),
    _both("/proc/self/environ", "open('/proc/self/environ').read()"),
    _both("an inherited descriptor", "os.read(inherited, 10)"),
    _both("a path of bytes", "os.open(b'/etc/shadow', os.O_RDONLY)"),
)

PROCESSES = (
    _both("os.system", "if os.system('exit 0'): raise PermissionError('the shell could not be executed')"),
    _both("subprocess", "import subprocess; subprocess.run(['/bin/true'])"),
    _both("os.execv", "os.execv('/bin/true', ['true'])"),
    _both("os.posix_spawn", "os.posix_spawn('/bin/true', ['true'], {})"),
    _audit("os.fork", "if os.fork() == 0: os._exit(0)"),
    _audit("multiprocessing by fork", "import multiprocessing as m; m.get_context('fork').Process(target=id).start()"),
    _both(
        "multiprocessing by spawn",
        """
        import multiprocessing as m
        process = m.get_context('spawn').Process(target=print)
        process.start()
        process.join()
        if process.exitcode: raise PermissionError('nothing could be executed')
    """,
    ),
    _both(
        "_posixsubprocess",
        """
        import subprocess
        from _posixsubprocess import fork_exec
        r, w = os.pipe()
        os.set_inheritable(w, False)
        pipes, rest = (-1, -1, -1, -1, -1, -1, r, w), (True, False, 0, None, None, None, -1, None, True)
        fork_exec([b'true'], [b'/bin/true'], True, (w,), None, None, *pipes, *rest)
        os.close(w)
        if answer := os.read(r, 100): raise PermissionError(answer)
    """,
    ),
    _both("kill of the parent", "os.kill(parent, 0)"),
    _audit("a fork bomb", "for _ in range(50): os.fork() or os._exit(0)"),
)

NETWORK = (
    _both("TCP", "import socket; socket.create_connection(('127.0.0.1', port), 5)"),
    _both("TCP over IPv6", "import socket; socket.socket(socket.AF_INET6).connect(('::ffff:127.0.0.1', port))"),
    _both("listening on a port", "import socket; socket.create_server(('127.0.0.1', 0))"),
    _both("UDP", "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', port))"),
    _both("a unix socket", "import socket; socket.socket(socket.AF_UNIX).connect(unix)"),
    _audit("netlink", "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)"),
    _both("a raw socket", "import socket; socket.socket(type=socket.SOCK_RAW, proto=1)"),
    _audit(
        "DNS",
        """
        import socket
        socket.getaddrinfo('localhost', 80)
    """,
    ),
    _both("HTTP", "import urllib.request; urllib.request.urlopen(f'http://127.0.0.1:{port}', timeout=5)"),
    _kernel(
        "grpc to another port",
        """
        import grpc
        call = grpc.insecure_channel(f'127.0.0.1:{port}').unary_unary('/x/y')
        try: call(b'', timeout=1)
        except grpc.RpcError as error:
            if 'ermission' in error.details(): raise PermissionError(error.details())
    """,
    ),
)

BUS = (
    _both("the bus as a host of no guarded source", f"{_ON_BUS}\nwith host('nobody') as it: it.ready()"),
    _both("a call at level 99", f"{_ON_BUS}\ncall('high')"),
    _both("draining the bus", f"{_ON_BUS}\ncall('toolbus:drain')"),
    _both("revoking a permission", f"{_ON_BUS}\ncall('toolbus:revoke', source='host')"),
    _both("reading the records", f"{_ON_BUS}\ncall('toolbus:calls')"),
    _both("listing what users may call", f"{_ON_BUS}\nask('List', wire.ListRequest())"),
    _both("clearing another source", f"{_ON_BUS}\nask('Clear', wire.ClearRequest(source='local'))"),
    _both("withdrawing another's tool", f"{_ON_BUS}\nask('Unregister', wire.UnregisterRequest(name='high'))"),
    _both("the bus's own port", "import socket; socket.create_connection(bus_itself.split(':'), 5)"),
    _kernel("the bus's own port by grpc", f"{_ON_BUS}\nask('List', wire.ListRequest(), bus_itself)"),
)

NATIVE = (
    _both("ctypes: open", f"{_LIBC}; result = libc.open(secret.encode(), 2)\n{_CHECK}"),
    _both("ctypes: system", f"{_LIBC}\nif libc.system(b'exit 0'): raise PermissionError('no shell')"),
    _both(
        "ctypes: connect",
        f"""{_LIBC}; import socket, struct
s = socket.socket()
result = libc.connect(s.fileno(), struct.pack('=HH4s8x', 2, socket.htons(port), bytes([127, 0, 0, 1])), 16)
{_CHECK}""",
    ),
    _both("ctypes: kill of the parent", f"{_LIBC}; result = libc.kill(parent, 0)\n{_CHECK}"),
    _both("ctypes: ptrace of the parent", f"{_LIBC}; result = libc.ptrace(16, parent, 0, 0)\n{_CHECK}"),
    _kernel(
        "types of ctypes left behind: open",
        f"""{_ANY_FUNCTION}
opening = c['CFUNCTYPE'](c['c_int'], c['c_char_p'], c['c_int'])(function(b'open'))
if opening(secret.encode(), 2) < 0: raise PermissionError('not permitted')""",
    ),
    _kernel(
        "types of ctypes left behind: connect",
        f"""{_ANY_FUNCTION}
import socket
number = c['c_int']
making = c['CFUNCTYPE'](number, number, number, number)(function(b'socket'))
connecting = c['CFUNCTYPE'](number, number, c['c_char_p'], number)(function(b'connect'))
address = struct.pack('=HH4s8x', 2, socket.htons(port), bytes([127, 0, 0, 1]))
if connecting(making(2, 1, 0), address, 16) < 0: raise PermissionError('not permitted')""",
    ),
    _kernel(
        "types of ctypes left behind: a unix socket",
        f"""{_ANY_FUNCTION}
number = c['c_int']
making = c['CFUNCTYPE'](number, number, number, number)(function(b'socket'))
if making(1, 1, 0) < 0: raise PermissionError('not permitted')""",
    ),
    _kernel("a session of its own", "os.setsid()"),
    _kernel("a process group of its own", "os.setpgid(0, 0)"),
    _audit(
        "ctypes left behind", "import toolbus.parts.dropin.sandbox.landlock as l; import sys; sys.modules['ctypes']"
    ),
    _audit(
        "a C extension from a granted folder",
        """
        import importlib.util as u
        u.module_from_spec(u.spec_from_file_location('_csv', f'{folder}/_csv.so'))
    """,
    ),
)

HOOK = (
    _audit(
        "builtins replaced",
        """
        import builtins
        names = ('type', 'str', 'isinstance', 'ascii', 'PermissionError', 'BaseException', 'OSError', 'int')
        before = {name: getattr(builtins, name) for name in names}
        for name in names: setattr(builtins, name, lambda *a: None)
        try: os.chmod(secret, 0o666)
        finally: vars(builtins).update(before)
    """,
    ),
    _audit(
        "modules replaced",
        """
        import sys
        for name in list(sys.modules):
            if 'sandbox' in name:
                for attribute in list(vars(sys.modules[name])): setattr(sys.modules[name], attribute, lambda *a: '')
                del sys.modules[name]
        import posixpath
        posixpath.realpath = os.fspath = lambda *a: folder
        os.chmod(secret, 0o666)
    """,
    ),
    _audit(
        "through the traceback",
        """
        try: os.chmod(secret, 0o666)
        except PermissionError as error: trace = error.__traceback__
        else: trace = None
        while trace:
            frame = trace.tb_frame
            for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
                if type(value) is dict and 'os.chmod' in value: value.clear()
            if frame.f_code.co_name == 'hook':
                for name in list(frame.f_globals): frame.f_globals[name] = None
                for name in frame.f_code.co_varnames: frame.f_locals[name] = None
            trace = trace.tb_next
        os.chmod(secret, 0o666)
    """,
    ),
    _audit(
        "through an argument of its own",
        """
        import sys
        class Evil:
            def __eq__(self, other): return self.look()
            __ne__ = __and__ = __rand__ = __lt__ = __eq__
            def __hash__(self): return self.look()
            def look(self):
                frame = sys._getframe()
                while frame:
                    found = frame.f_locals.get('checks')
                    if type(found) is dict: found.clear()
                    frame = frame.f_back
                return 0
        files = ('open', 'os.remove', 'os.chmod', 'os.rename', 'os.listdir', 'os.truncate', 'sqlite3.connect')
        sockets = ('socket.__new__', 'socket.connect', 'socket.sendto', 'socket.getaddrinfo')
        for event in (*files, *sockets, 'os.kill', 'resource.setrlimit', 'import'):
            for count in range(1, 6):
                try: sys.audit(event, *[Evil()] * count)
                except (PermissionError, ImportError): pass
        os.chmod(secret, 0o666)
    """,
    ),
    _audit(
        "a str that changes",
        """
        class Path(str):
            def startswith(self, *a): return True
            def split(self, *a): return folder.split('/')
            def __eq__(self, other): return True
            __hash__ = str.__hash__
        os.chmod(Path(secret), 0o666)
    """,
    ),
    _audit(
        "too deep a recursion",
        """
        def dive():
            try: dive()
            except RecursionError: os.chmod(secret, 0o666)
        dive()
    """,
    ),
    _audit(
        "garbage collector",
        """
        import gc
        for found in gc.get_objects():
            if type(found) is dict and 'os.chmod' in found: found.clear()
        os.chmod(secret, 0o666)
    """,
    ),
    _audit(
        "another interpreter",
        """
        import _xxsubinterpreters as other
        other.run_string(other.create(), f'import os; os.chmod({secret!r}, 0o666)')
    """,
    ),
    _audit("a fresh posix", "import sys; del sys.modules['posix']; import posix; posix.mkfifo(f'{outside}/new')"),
    _both("a signal handler", "import signal; signal.signal(signal.SIGALRM, lambda number, frame: None)"),
    _both(
        "replacing what takes signals",
        f"""{_ON_MAIN}
for name in ('sigwait', 'Signals', '_int_to_enum'): setattr(signal, name, reach)
for name in ('stdout', 'stderr'): setattr(sys, name, type('Stream', (), {{'flush': reach, 'write': reach}})())
{_RAISE_FAILURE}""",
    ),
    _both(
        "replacing what Python runs on Ctrl-C",
        f"""{_ON_MAIN}
sys.excepthook = reach
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
os.kill(os.getpid(), signal.SIGINT)
{_RAISE_FAILURE}""",
    ),
    _audit("sys.settrace", "import sys; sys.settrace(print)"),
    _audit("raising a limit", "import resource; resource.setrlimit(resource.RLIMIT_CPU, (-1, -1))"),
)

LIMITS = (
    _both("a memory hog", "x = bytearray(2 << 30)"),
    _both("a file without end", "f = open(f'{folder}/big', 'wb', 0); f.seek(1 << 30); f.write(b'x')"),
    _both("descriptors without end", "held = [os.pipe() for _ in range(2000)]"),
    # Not for each layer: the same limit of the kernel ends it beside any of them, after two seconds of the processor.
    Breakout("a CPU loop", "with protection.cpu.call():\n    while True: pass", layers=frozenset()),
)

ALL = (*FILES, *READING, *PROCESSES, *NETWORK, *NATIVE, *HOOK, *LIMITS, *BUS)
