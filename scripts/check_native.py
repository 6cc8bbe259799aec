"""Run the tests of the C code on builds that find errors: with sanitizers, and with what a processor lacks emulated.

    python scripts/check_native.py                   every build that can be made here
    python scripts/check_native.py sanitize          the levels that this processor runs, with address and UB sanitizers
    python scripts/check_native.py emulate           the levels that it does not run
    python scripts/check_native.py emulate x86-64-v4-amx portable    some levels only

A level that needs only another vendor's processor, or a matrix unit (AMX), is built as it is, with the matrix unit's
instructions by plain loops. The other levels with AVX-512 are emulated by SIMDe (Debian's libsimde-dev), in a build for
AVX2 or less: SIMDe and the processor's own AVX-512 do not mix. Levels of Arm processors are compiled by Debian's
cross-compiler and run by QEMU (tests/support/emulated.py).

Arguments after `--` go to pytest. It takes minutes, because sanitized code is slow.
"""

import ctypes
import functools
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # for support
SANITIZERS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
EMULATED = {
    "x86-64-v4": (),
    "x86-64-v4-fma": ("-DEMULATE_BF16", "-DWIDE_PRODUCTS"),
    "x86-64-v4-bf16": ("-DEMULATE_BF16",),
    "x86-64-v4-amx": ("-DEMULATE_BF16", "-DEMULATE_AMX"),
}
INCLUDE = f"-I{ROOT / 'scripts' / 'emulate'}"
SIMDE = Path("/usr/include/simde/x86/avx512.h")
KINDS = ("sanitize", "emulate")
FILES = (
    "native/test_native.py",
    "native/test_native_recurrent.py",
    "native/test_native_threads.py",
    "native/test_byte_products.py",
    "native/test_ggml.py",
    "native/test_own_types.py",
    "native/test_rows.py",
    "backends/lean/test_hybrid.py",
    "backends/lean/test_mixture.py",
    "backends/lean/test_modules.py",
    "backends/lean/test_rounded_kv.py",
    "backends/lean/test_same_bits.py",
    "backends/products/test_quantized.py",
    "backends/recurrent/test_recurrences.py",
)
NOT_OF_CODE = {"GenuineIntel", "amx_tile", "amx_bf16", "amx_int8"}  # without these a level's code runs all the same
LIBRARY, LEVEL = "DRAFTPROOF_CHECK_LIBRARY", "DRAFTPROOF_CHECK_LEVEL"


def builds(kinds: list[str], names: list[str]) -> list[tuple[str, str, str, tuple[str, ...]]]:
    """The builds to check: kind, level, the level whose flags the compiler gets, and extra flags."""
    from draftproof.native import build as library
    from support.emulated import PROCESSORS, missing

    found: list[tuple[str, str, str, tuple[str, ...]]] = []
    for level in library.LEVELS:
        if names and level.name not in names:
            continue
        if level.machine not in (None, platform.machine()):
            if "emulate" not in kinds or level.name not in PROCESSORS:
                continue
            if why := missing():
                print(f"{level.name} is left out: {why}")
            else:
                found.append(("emulate", level.name, level.name, ()))
            continue
        lacking = level.needs - library.processor()
        tiles = "amx_tile" in level.needs
        if "sanitize" in kinds and lacking <= NOT_OF_CODE:  # sanitizers do not see tiles
            seen = ("-DEMULATE_AMX", INCLUDE) if tiles else ()
            found.append(("sanitize", level.name, level.name, SANITIZERS + seen))
        if "emulate" in kinds and lacking and lacking <= NOT_OF_CODE:
            found.append(("emulate", level.name, level.name, ("-DEMULATE_AMX", INCLUDE) if tiles else ()))
        elif "emulate" in kinds and lacking and level.name in EMULATED:
            if not SIMDE.exists():
                sys.exit(f"{SIMDE} is missing: install libsimde-dev, or check with sanitizers only")
            under = next(each.name for each in library.choose() if "avx512f" not in each.needs)
            found.append(("emulate", level.name, under, ("-DEMULATE_AVX512", INCLUDE, *EMULATED[level.name])))
    return found


def check(kind: str, name: str, under: str, extra: tuple[str, ...], arguments: list[str]) -> int:
    """Build one library, and run the tests on it in a new process; returns pytest's exit status."""
    from draftproof.native import build as library
    from support.emulated import cross_compile

    library._TIMEOUT = 3600  # noqa: SLF001 - sanitized code takes long to compile
    runs = next(level for level in library.LEVELS if level.name == under)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "library.so"
        if runs.machine in (None, platform.machine()):
            library.compile_library(out, runs, extra=extra)
        else:
            cross_compile(runs, out)
        environment = os.environ | {LIBRARY: str(out), LEVEL: name, "OMP_NUM_THREADS": "2"}
        if kind == "sanitize":
            found = []
            for name_of in ("libasan.so", "libstdc++.so.6"):  # without the second, torch's exceptions end the process
                command = ["gcc", f"-print-file-name={name_of}"]
                found.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
            environment |= {
                "LD_PRELOAD": " ".join(found),
                "ASAN_OPTIONS": "detect_leaks=0",
                "UBSAN_OPTIONS": "print_stacktrace=1",
            }
        print(f"== {kind} {name}", flush=True)
        return subprocess.run([sys.executable, __file__, "run", *arguments], env=environment, check=False).returncode


def run(arguments: list[str]) -> int:
    """Run the tests in the new process, with the library in place of the one that would be chosen."""
    import pytest

    from draftproof.native import build as library
    from support.emulated import PROCESSORS, EmulatedLibrary

    level = next(level for level in library.LEVELS if level.name == os.environ[LEVEL])
    path = Path(os.environ[LIBRARY])
    here = level.machine in (None, platform.machine())
    loaded = ctypes.CDLL(str(path)) if here else EmulatedLibrary(path, PROCESSORS[level.name])

    def choose(name: str | None = None) -> list[library.Level]:
        if name not in (None, level.name):
            raise library.UnavailableError(f"only {level.name} is checked")
        return [level]

    library.choose, library.load = choose, functools.cache(lambda _: loaded)
    library.processor = lambda: level.needs  # this one's matrix unit would have bfloat16 left to torch
    files = [str(ROOT / "tests" / name) for name in FILES]
    return int(pytest.main(["-W", "ignore", "-m", "not builds", *files, *arguments]))


def main() -> int:
    """Check every requested build; returns 1 if one fails."""
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    words, rest = given[:end], given[end + 1 :]
    if given[:1] == ["run"]:
        return run(given[1:])

    from draftproof.native import build as library

    levels = [level.name for level in library.LEVELS]
    if unknown := set(words) - set(KINDS) - set(levels):
        sys.exit(f"expected {', '.join((*KINDS, *levels))}, got {', '.join(sorted(unknown))}")
    chosen = builds(
        [each for each in KINDS if each in words] or list(KINDS), [each for each in words if each in levels]
    )
    failed = [build for build in chosen if check(*build, rest)]
    for kind, name, *_ in failed:
        print(f"failed: {kind} {name}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
