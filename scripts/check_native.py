"""Run the tests of the C code on builds that find errors in it: with sanitizers, and with AVX-512 emulated by SIMDe.

    python scripts/check_native.py                   every build that can be made here
    python scripts/check_native.py sanitize          the levels that this processor runs, with address and UB sanitizers
    python scripts/check_native.py emulate           the AVX-512 code on a processor without it (needs libsimde-dev)

Arguments after `--` go to pytest. It takes minutes, because sanitized code is slow.
"""

import ctypes
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SANITIZERS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
EMULATED = {
    "x86-64-v4": (),
    "x86-64-v4-fma": ("-DEMULATE_BF16", "-DWIDE_PRODUCTS"),
    "x86-64-v4-bf16": ("-DEMULATE_BF16",),
    "x86-64-v4-amx": ("-DEMULATE_BF16", "-DEMULATE_AMX"),
}
INCLUDE = f"-I{ROOT / 'scripts' / 'emulate'}"
SIMDE = Path("/usr/include/simde/x86/avx512.h")
LIBRARY, LEVEL = "DRAFTPROOF_CHECK_LIBRARY", "DRAFTPROOF_CHECK_LEVEL"


def builds(kinds: list[str]) -> list[tuple[str, str, tuple[str, ...]]]:
    """The builds to check: kind, level, and extra flags for the compiler."""
    from draftproof.errors import UserError
    from draftproof.kernels import library

    found = []
    for level in library.LEVELS:
        try:
            library.choose(level.name)
        except UserError:
            if "emulate" in kinds and level.name in EMULATED:
                if not SIMDE.exists():
                    sys.exit(f"{SIMDE} is missing: install libsimde-dev, or check with sanitizers only")
                found.append(("emulate", level.name, ("-DEMULATE_AVX512", INCLUDE, *EMULATED[level.name])))
        else:
            if "sanitize" in kinds:
                seen = ("-DEMULATE_AMX", INCLUDE) if "amx_tile" in level.needs else ()  # sanitizers do not see tiles
                found.append(("sanitize", level.name, SANITIZERS + seen))
    return found


def check(kind: str, name: str, extra: tuple[str, ...], arguments: list[str]) -> int:
    """Build one library, and run the tests on it in a new process; returns pytest's exit status."""
    from draftproof.kernels import library

    name_of_build = None if kind == "emulate" else name  # an emulated level is built for this processor
    runs = library.choose(name_of_build)[0]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "library.so"
        library.compile_library(out, runs, extra=extra)
        environment = os.environ | {LIBRARY: str(out), LEVEL: name, "OMP_NUM_THREADS": "2"}
        if kind == "sanitize":
            command = ["gcc", "-print-file-name=libasan.so"]
            asan = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
            environment |= {"LD_PRELOAD": asan, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
        print(f"== {kind} {name}", flush=True)
        return subprocess.run([sys.executable, __file__, "run", *arguments], env=environment, check=False).returncode


def run(arguments: list[str]) -> int:
    """Run the tests in the new process, with the library in place of the one that would be chosen."""
    import pytest

    from draftproof.kernels import library

    level = next(level for level in library.LEVELS if level.name == os.environ[LEVEL])
    loaded = ctypes.CDLL(os.environ[LIBRARY])

    def choose(name: str | None = None) -> list[library.Level]:
        if name not in (None, level.name):
            raise library.UnavailableError(f"only {level.name} is checked")
        return [level]

    library.choose, library.load = choose, functools.cache(lambda _: loaded)
    sys.path.insert(0, str(ROOT / "tests"))
    files = [str(ROOT / "tests" / name) for name in ("test_native.py", "test_quantized.py")]
    return int(pytest.main(["-q", "-W", "ignore", "-m", "not builds", *files, *arguments]))


def main() -> int:
    """Check every requested build; returns 1 if one fails."""
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    kinds, rest = given[:end], given[end + 1 :]
    if given[:1] == ["run"]:
        return run(given[1:])
    if unknown := set(kinds) - {"sanitize", "emulate"}:
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; legal are sanitize and emulate")
    failed = [build for build in builds(kinds or ["sanitize", "emulate"]) if check(*build, rest)]
    for kind, name, _ in failed:
        print(f"failed: {kind} {name}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
