"""Lets this package see Python as Windows has it: without the modules and functions of POSIX, and with Windows' names.

Only imports by modules of the package are changed: torch and the standard library go on as they are here.
"""

import builtins
import ctypes
import fcntl
import mmap
import types
from importlib import import_module
from pathlib import Path

MODULES = {
    *("crypt", "curses", "fcntl", "grp", "nis", "posix", "pty", "pwd", "readline", "resource", "spwd", "syslog"),
    *("termios", "tty"),
}
ABSENT = {  # Python's documentation: "Availability: Unix", or not Windows
    "os": (
        *("EX_OK", "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_SYNC", "WNOHANG", "WIFEXITED", "chown"),
        *("confstr", "fchdir", "fchown", "fork", "forkpty", "getegid", "geteuid", "getgid", "getgroups", "getloadavg"),
        *("getpgid", "getsid", "getuid", "killpg", "lchown", "lockf", "memfd_create", "mkfifo", "nice", "openpty"),
        *("pathconf", "posix_fadvise", "posix_spawn", "pread", "preadv", "pwrite", "pwritev", "register_at_fork"),
        *("sched_getaffinity", "sched_setaffinity", "sched_yield", "sendfile", "setpgid", "setsid", "setuid"),
        *("statvfs", "sync", "sysconf", "tcgetpgrp", "ttyname", "uname", "wait", "wait3", "wait4", "waitid"),
    ),
    "mmap": ("MADV_DONTNEED", "MADV_NOHUGEPAGE", "MAP_ANONYMOUS", "MAP_NORESERVE", "MAP_PRIVATE", "PROT_READ"),
    "signal": ("SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGSTOP", "SIGUSR1", "setitimer", "pthread_sigmask"),
    "select": ("epoll", "poll"),
    "socket": ("AF_UNIX", "SO_REUSEPORT"),
    "sys": ("abiflags",),
    "platform": (),
    "ctypes": (),
    "time": ("clock_gettime", "CLOCK_MONOTONIC"),
}
WORKING_SET, PEAK, FREE = 300 << 20, 400 << 20, 5 << 30  # what this kernel32 says


class _Map(mmap.mmap):
    """A map of a file as Windows has it."""

    @property
    def madvise(self):
        raise AttributeError("madvise")

    def __new__(cls, fileno, length, *, access=0, offset=0):
        return super().__new__(cls, fileno, length, access=access, offset=offset)


def _no_pipes(*lists):
    if any(not hasattr(each, "recv") for one in lists[:3] for each in one):
        raise OSError(10038, "an operation was attempted on something that is not a socket")
    raise NotImplementedError


class _Kernel:
    """The two functions of kernel32.dll that fill structures; offsets are those of Microsoft's headers."""

    class GetCurrentProcess:
        restype = None

        def __new__(cls):
            return -1

    @staticmethod
    def K32GetProcessMemoryInfo(_, found, size):  # noqa: N802 - Windows' name
        filled = (ctypes.c_char * size).from_address(ctypes.addressof(found._obj))
        assert int.from_bytes(filled[:4], "little") == size == 72
        filled[8:24] = PEAK.to_bytes(8, "little") + WORKING_SET.to_bytes(8, "little")
        return 1

    @staticmethod
    def GlobalMemoryStatusEx(found):  # noqa: N802
        filled = (ctypes.c_char * 64).from_address(ctypes.addressof(found._obj))
        assert int.from_bytes(filled[:4], "little") == 64
        filled[16:24] = FREE.to_bytes(8, "little")
        return 1


def _library(path):
    """Windows has no library without a name."""
    if path is None:
        raise TypeError("bad argument type for built-in operation")
    return ctypes.CDLL(path)


def _locking(file, mode, size):
    """msvcrt's locks of parts of files, by those of POSIX."""
    assert size == 1
    fcntl.lockf(file, fcntl.LOCK_EX if mode == 1 else fcntl.LOCK_EX | fcntl.LOCK_NB, size)


def _copy(of, /, **other):
    """A copy of a module with what Windows has."""
    made = types.ModuleType(of)
    made.__dict__.update({name: value for name, value in vars(import_module(of)).items() if name not in ABSENT[of]})
    made.__dict__.update(other)
    return made


def install():
    """Have the package see Windows in this process."""
    locks = types.ModuleType("msvcrt")
    locks.LK_LOCK, locks.LK_NBLCK, locks.locking = 1, 2, _locking
    other = {
        "mmap": {"mmap": _Map},
        "select": {"select": _no_pipes},
        "sys": {"platform": "win32"},
        "os": {"name": "nt"},
        "platform": {"system": lambda: "Windows", "machine": lambda: "AMD64"},
        "ctypes": {"CDLL": _library, "WinDLL": lambda *_, **__: _Kernel},
    }
    seen = {name: _copy(name, **other.get(name, {})) for name in ABSENT} | {"msvcrt": locks}
    usual = builtins.__import__

    def imported(name, globals=None, locals=None, fromlist=(), level=0):  # noqa: A002 - the names of the arguments
        if (globals or {}).get("__name__", "").partition(".")[0] != "draftproof" or level:
            return usual(name, globals, locals, fromlist, level)
        if name.partition(".")[0] in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return seen[name] if name in seen else usual(name, globals, locals, fromlist, level)

    builtins.__import__ = imported


def modules():
    """The names of all modules of the package, without importing them."""
    root = Path(__file__).parents[2] / "src"
    for path in sorted((root / "draftproof").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[-1] != "__main__":
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
