"""Build the C library for every level of processor when a wheel is made; see src/draftproof/native/build.py.

DRAFTPROOF_BUILD_NATIVE may be
    auto    (the default) for this system; without a C compiler the wheel has no library, with a message;
    0       never;
    1       as auto, but an error where a library cannot be built;
    SYSTEM  as 1, for one of `SYSTEMS`, by the command `zig` or that of the variable ZIG (scripts/wheels.py).

An editable install builds nothing: the level that is needed is built at first use.
"""

import dataclasses
import itertools
import os
import platform
import re
import shlex
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "DRAFTPROOF_BUILD_NATIVE"
OLDEST_GLIBC = 17  # of the manylinux tags


@dataclass(frozen=True)
class System:
    """A system that wheels can be made for on any other.

    Attributes:
        target: its name for Zig's C compiler.
        platform: as `sys.platform`.
        machine: as `platform.machine` on Linux.
        tag: of the wheel; None asks the libraries.
    """

    target: str
    platform: str
    machine: str
    tag: str | None = None


SYSTEMS = {
    "x86_64-linux": System("x86_64-linux-gnu.2.17", "linux", "x86_64"),
    "aarch64-linux": System("aarch64-linux-gnu.2.17", "linux", "aarch64"),
    "arm64-macos": System("aarch64-macos.11.0", "darwin", "aarch64", "macosx_11_0_arm64"),
    "x86_64-windows": System("x86_64-windows-gnu", "win32", "x86_64", "win_amd64"),
}


class NativeBuildHook(BuildHookInterface):
    """Add the libraries to a wheel, and the platform to its name."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects files."""
        value = os.environ.get(VARIABLE, "auto")
        legal = "auto", "0", "1", *SYSTEMS
        if value not in legal:
            sys.exit(f"{VARIABLE}: expected one of {', '.join(legal)}, got {value!r}")
        if self.target_name != "wheel" or version == "editable" or value == "0":
            return
        if value not in SYSTEMS and sys.platform != "linux":
            self._without(value, f"they are compiled for this system on Linux, and this is {sys.platform}")
            return
        sys.path.insert(0, str(Path(self.root) / "src"))
        from draftproof.native import build as library  # needs only Python's own modules

        system = SYSTEMS.get(value, System("", sys.platform, platform.machine()))
        compile_library = library.compile_library if value not in SYSTEMS else partial(_by_zig, system)
        levels = [level for level in library.LEVELS if level.machine in (None, system.machine)]
        if system.platform != "linux":  # only there a process can ask for the registers of a matrix unit
            levels = [level for level in levels if "amx_tile" not in level.needs]
        self._folder = tempfile.TemporaryDirectory()
        folder, suffix = Path(self._folder.name), library.SUFFIXES[system.platform]
        places = [folder / f"{level.name}{suffix}" for level in levels]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            failed = list(filter(None, pool.map(partial(_build, compile_library), places, levels)))
        for line in failed:
            self._without(value, line)
        made = [path for path in places if path.exists()]
        if made:
            for path in made:
                build_data["force_include"][str(path)] = f"draftproof/native/built/{path.name}"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{system.tag or _manylinux(made, system.machine)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Called when the wheel is written."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()

    def _without(self, value: str, why: str) -> None:
        if value != "auto":
            sys.exit(f"{VARIABLE} is {value}, but {why}")
        self.app.display_warning(why)


def _build(compile_library: Callable[[Path, Any], None], out: Path, level: Any) -> str | None:
    """Build the library of a level; why it could not be built."""
    try:
        compile_library(out, level)
    except ValueError as error:
        return f"no native library for {level.name}: {error}"
    return None


def _by_zig(system: System, out: Path, level: Any) -> None:
    """Build the library of a level for another system."""
    from draftproof.native.build import compile_library

    command = [*shlex.split(os.environ.get("ZIG") or "zig"), "cc", "-target", system.target]
    flags = tuple(itertools.chain.from_iterable(map(_of_zig, level.flags)))
    compile_library(out, dataclasses.replace(level, flags=flags), extra=("-s",), compilers=[command])


def _of_zig(flag: str) -> list[str]:
    """A flag of GCC as those of Clang inside Zig: by Zig's own ones it would build a C library for each level, too."""
    march = re.fullmatch(r"-march=armv8(\.\d)?-a\+?(.*)", flag)
    if march is not None:
        names = [f"v8{march[1]}a" if march[1] else "", *march[2].split("+")]
    elif flag.startswith("-m"):
        names = [flag.removeprefix("-m")]
    else:
        return [flag]
    return [word for name in names if name for word in ("-Xclang", "-target-feature", "-Xclang", f"+{name}")]


def _manylinux(libraries: list[Path], machine: str) -> str:
    """The manylinux tag of the newest C library that the files need."""
    needed = {int(minor) for path in libraries for minor in re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes())}
    return f"manylinux_2_{max(needed | {OLDEST_GLIBC})}_{machine}"
