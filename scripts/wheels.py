"""Make wheels with the C library for every level of processors, for four systems, on any of them, and check them.

    python scripts/wheels.py                            all of them, into dist/
    python scripts/wheels.py x86_64-linux --out DIR     some only

Zig's C compiler makes the libraries: the command of the variable ZIG, else the package `ziglang`, which is downloaded
into a temporary folder where it is not installed. Each wheel is opened again: every level of the system must be there,
for its kind of processor, in its system's format. Pip must install it for that system, with every module. A wheel for
this system is also used: its library must compute in a process that finds no compiler. Where there is QEMU (qemu-user,
and the C library of Debian's gcc-aarch64-linux-gnu) or Wine (the command of the variable WINE, else wine64), all
libraries for it run functions on their own threads (scripts/emulate/wheel.c), with the same bits for each number of
threads.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "ziglang==0.17.1"
# The wheel's platform, how its libraries' names end, and what they begin with, by place in the file.
ELF, MACH_O, PE = b"\x7fELF\x02\x01\x01", b"\xcf\xfa\xed\xfe", b"PE\0\0"
SYSTEMS = {
    "x86_64-linux": ("manylinux_2_17_x86_64", ".so", {0: ELF, 18: struct.pack("<H", 62)}),
    "aarch64-linux": ("manylinux_2_17_aarch64", ".so", {0: ELF, 18: struct.pack("<H", 183)}),
    "arm64-macos": ("macosx_11_0_arm64", ".dylib", {0: MACH_O + struct.pack("<I", 0x0100000C)}),
    "x86_64-windows": ("win_amd64", ".dll", {0: PE + struct.pack("<H", 0x8664)}),
}
_X86 = {"x86-64-v4-fma", "x86-64-v4-bf16", "x86-64-v4", "x86-64-v3-vnni", "x86-64-v3", "portable"}
_ARM = {"neon-i8mm-bf16", "neon-dotprod", "neon", "portable"}
LEVELS = {
    "x86_64-linux": _X86 | {"x86-64-v4-amx"},
    "aarch64-linux": _ARM,
    "arm64-macos": _ARM,
    "x86_64-windows": _X86,
}
LIBRARIES = "draftproof/native/built/"
DRIVER = ROOT / "scripts" / "emulate" / "wheel.c"
QEMU = ["qemu-aarch64", "-cpu", "max", "-L", "/usr/aarch64-linux-gnu"]
RUNNERS = {  # and the system's name for Zig
    "aarch64-linux": ("aarch64-linux-gnu", QEMU),
    "x86_64-windows": ("x86_64-windows-gnu", shlex.split(os.environ.get("WINE") or "wine64")),
}
USE = """
from pathlib import Path
from draftproof.native import build, dispatch
assert build.PACKAGED == Path({folder!r}, "draftproof", "native", "built"), build.PACKAGED
assert next(build._compilers(), None) is None
best, home = build.choose()[0], Path({folder!r}, "home")
assert dispatch.levels()["float32"] == best.name
assert not home.joinpath("native").exists(), "built here"
from draftproof import Engine, SamplingParams
(out,) = Engine.load("embedded:stories").generate(["Once upon a time"], SamplingParams(max_tokens=8, temperature=0.0))
print(best.name, repr(out.text))
"""


def zig_here() -> str | None:
    """The command of Zig on this machine; None if there is none."""
    found = importlib.util.find_spec("ziglang")
    packaged = None if found is None or found.origin is None else str(Path(found.origin).parent / "zig")
    return os.environ.get("ZIG") or packaged


def zig(folder: Path) -> str:
    """The command of Zig; it is downloaded into the folder where there is none."""
    if (here := zig_here()) is not None:
        return here
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", str(folder), PACKAGE], check=True)
    return str(folder / "ziglang" / "zig")


def build(system: str, command: str, out: Path) -> Path:
    """Make the wheel of a system."""
    environment = os.environ | {"DRAFTPROOF_BUILD_NATIVE": system, "ZIG": command}
    made = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(ROOT)]
    subprocess.run(made, env=environment, check=True, stdout=subprocess.DEVNULL)
    return max(out.glob(f"*-{SYSTEMS[system][0]}.whl"), key=lambda path: path.stat().st_mtime)


def check(wheel: Path, system: str) -> dict[str, int]:
    """The sizes of a wheel's libraries, by level.

    Raises:
        ValueError: the wheel is for another system, or a library is missing or is not what it should be.
    """
    tag = SYSTEMS[system][0]
    if not wheel.name.endswith(f"-py3-none-{tag}.whl"):
        raise ValueError(f"{wheel.name}: expected a wheel for {tag}")
    with zipfile.ZipFile(wheel) as archive:
        named = [name for name in archive.namelist() if name.startswith(LIBRARIES)]
        return _sizes(wheel.name, system, {name.removeprefix(LIBRARIES): archive.read(name) for name in named})


def _sizes(where: str, system: str, libraries: dict[str, bytes]) -> dict[str, int]:
    _, suffix, beginnings = SYSTEMS[system]
    sizes = {}
    for name, content in libraries.items():
        start = struct.unpack_from("<I", content, 60)[0] if content.startswith(b"MZ") else 0
        for place, expected in beginnings.items():
            if content[start + place :][: len(expected)] != expected:
                raise ValueError(f"{where}: {name} is not a library for {system}")
        if b"draftproof_attach" not in content:
            raise ValueError(f"{where}: {name} does not have the functions of the library")
        sizes[name.removesuffix(suffix)] = len(content)
    if missing := LEVELS[system] ^ sizes.keys():
        raise ValueError(f"{where}: expected {sorted(LEVELS[system])}, and {sorted(missing)} are missing or too many")
    return sizes


def install(wheel: Path, system: str) -> int:
    """Install a wheel for its system into a folder by pip; the bytes of the package there.

    Raises:
        CalledProcessError: pip finds that it is not for the system.
        ValueError: a module or other file of the package is missing or too many, or a library is as in `check`.
    """
    with tempfile.TemporaryDirectory() as folder:
        for_it = ["--platform", SYSTEMS[system][0], "--only-binary=:all:", "--no-deps", "--target", folder]
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", *for_it, str(wheel)], check=True)
        there = Path(folder, "draftproof")
        libraries = {path.name: path.read_bytes() for path in Path(folder, LIBRARIES).glob("*")}
        _sizes(f"{wheel.name}, installed", system, libraries)
        if different := _files(ROOT / "src" / "draftproof") ^ _files(there):
            raise ValueError(f"{wheel.name}, installed: {sorted(different)} are missing or too many")
        return sum(path.stat().st_size for path in there.rglob("*") if path.suffix != ".pyc" and path.is_file())


def _files(package: Path) -> set[str]:
    """The files of a package, without those that Python or a compiler makes of others."""
    found = {path.relative_to(package) for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    return {path.as_posix() for path in found if path.parts[:2] != ("native", "built")}


def use(wheel: Path) -> str:
    """Install a wheel into a folder and generate with it where there is no compiler: the level and the text."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, str(wheel)]
        subprocess.run(command, check=True)
        kept = {
            name: value for name, value in os.environ.items() if name != "CC" and not name.startswith("DRAFTPROOF_")
        }
        there = {"PATH": "", "PYTHONPATH": folder, "DRAFTPROOF_HOME": str(Path(folder, "home"))}
        code = [sys.executable, "-c", USE.format(folder=folder)]
        return subprocess.run(code, env=kept | there, check=True, capture_output=True, text=True).stdout.strip()


def run(wheel: Path, system: str, command: str) -> str:
    """Hashes of what a wheel's libraries compute, by level, or why that is not known.

    Raises:
        CalledProcessError: the bits of one depend on the number of threads.
    """
    if system not in RUNNERS:
        return "not run"
    target, runner = RUNNERS[system]
    if shutil.which(runner[0]) is None:
        return f"not run: {runner[0]} not found"
    hashes = {}
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        program = str(Path(folder, "wheel.exe"))
        subprocess.run([command, "cc", "-target", target, "-O1", str(DRIVER), "-o", program], check=True)
        for name in archive.namelist():
            if name.startswith(LIBRARIES):
                printed = Path(folder, "printed")  # no pipe: Wine's own processes would keep it open
                with printed.open("w", encoding="utf-8") as file:
                    subprocess.run([*runner, program, archive.extract(name, folder)], check=True, stdout=file)
                hashes[Path(name).stem] = printed.read_text(encoding="utf-8").strip()
    return f"run by {runner[0]}: {hashes}"


def main() -> None:
    """Make and check the requested wheels, and print the sizes of what is in them."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("systems", nargs="*", metavar="SYSTEM", help=f"of {', '.join(SYSTEMS)}; all of them if left out")
    made.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder for the wheels")
    options = made.parse_args()
    if unknown := set(options.systems) - SYSTEMS.keys():
        made.error(f"expected {', '.join(SYSTEMS)}, got {', '.join(sorted(unknown))}")
    here = f"{platform.machine()}-{sys.platform}"
    with tempfile.TemporaryDirectory() as folder:
        command = zig(Path(folder))
        print("| wheel | MB | installed, MB | libraries, installed, MB |\n|---|---|---|---|")
        for system in options.systems or SYSTEMS:
            wheel = build(system, command, options.out)
            sizes, installed = check(wheel, system), install(wheel, system)
            parts = ", ".join(f"`{level}` {size / 1e6:.2f}" for level, size in sorted(sizes.items()))
            whole = f"{wheel.stat().st_size / 1e6:.2f} | {installed / 1e6:.2f}"
            print(f"| `{wheel.name}` | {whole} | {sum(sizes.values()) / 1e6:.2f}: {parts} |", flush=True)
            if system == here:
                print(f"{system}: {use(wheel)}", file=sys.stderr)
            else:
                print(f"{system}: {run(wheel, system, command)}", file=sys.stderr)


if __name__ == "__main__":
    main()
