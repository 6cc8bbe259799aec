"""Build the C library for every level of processor when a wheel is made; see src/draftproof/native/build.py.

DRAFTPROOF_BUILD_NATIVE may be auto (the default; without a C compiler the wheel has no library, with a message), 1
(then an error) or 0 (never). An editable install builds nothing: the level that is needed is built at first use.
"""

import os
import platform
import re
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "DRAFTPROOF_BUILD_NATIVE"
OLDEST_GLIBC = 17  # of the manylinux tags


class NativeBuildHook(BuildHookInterface):
    """Add the libraries to a wheel, and the platform to its name."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it collects files."""
        value = os.environ.get(VARIABLE, "auto")
        if value not in ("auto", "0", "1"):
            sys.exit(f"{VARIABLE} is {value!r}: legal are auto, 0 and 1")
        if self.target_name != "wheel" or version == "editable" or value == "0":
            return
        if sys.platform != "linux":
            self._without(value, f"native operations are for Linux, and this is {sys.platform}")
            return
        self._folder = tempfile.TemporaryDirectory()
        made, failed = self._build(Path(self._folder.name))
        for line in failed:
            self._without(value, line)
        if made:
            for path in made:
                build_data["force_include"][str(path)] = f"draftproof/native/built/{path.name}"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{_platform(made)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Called when the wheel is written."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()

    def _build(self, folder: Path) -> tuple[list[Path], list[str]]:
        """Build a library for each level of this machine's architecture; returns them and the errors."""
        sys.path.insert(0, str(Path(self.root) / "src"))
        from draftproof.native import build as library  # needs only Python's own modules

        levels = [level for level in library.LEVELS if level.machine in (None, platform.machine())]

        def build(level: library.Level) -> Path | str:
            out = folder / f"{level.name}.so"
            try:
                library.compile_library(out, level)
            except ValueError as error:
                return f"no native library for {level.name}: {error}"
            return out

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            results = list(pool.map(build, levels))
        return [each for each in results if isinstance(each, Path)], [each for each in results if isinstance(each, str)]

    def _without(self, value: str, why: str) -> None:
        if value == "1":
            sys.exit(f"{VARIABLE} is 1, but {why}")
        self.app.display_warning(why)


def _platform(libraries: list[Path]) -> str:
    """The manylinux tag of the newest C library that the files need."""
    needed = {int(minor) for path in libraries for minor in re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes())}
    return f"manylinux_2_{max(needed | {OLDEST_GLIBC})}_{platform.machine()}"
