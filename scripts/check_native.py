"""Run the tests of the C code on builds that find errors: with sanitizers, and with what a processor lacks emulated.

    python scripts/check_native.py                   every build that can be made here
    python scripts/check_native.py sanitize          the levels that this processor runs, with address and UB sanitizers
    python scripts/check_native.py emulate           the levels that it does not run
    python scripts/check_native.py emulate x86-64-v4-amx portable    some levels only
    python scripts/check_native.py emulate --out docs/results/emulated    writes the tests of each file, too
    python scripts/check_native.py mutants           faults in the code, each of which some tests must see
    python scripts/check_native.py mutants ggml.h    those in some files only

A level that needs only another vendor's processor, or a matrix unit (AMX), is built as it is, with the matrix unit's
instructions by plain loops. The other levels with AVX-512 are emulated by SIMDe (Debian's libsimde-dev), in a build for
AVX2 or less: SIMDe and the processor's own AVX-512 do not mix. Levels of Arm processors are compiled by Debian's
cross-compiler and run by QEMU (tests/support/emulated.py).

Arguments after `--` go to pytest. It takes minutes, because sanitized code is slow.
"""

import ctypes
import functools
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
MUTANTS = "mutants"
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
LIBRARY, LEVEL, COUNTS = "DRAFTPROOF_CHECK_LIBRARY", "DRAFTPROOF_CHECK_LEVEL", "DRAFTPROOF_CHECK_COUNTS"
ONLY = "DRAFTPROOF_CHECK_FILES"  # files of tests, if not all
REMARKS = {
    "neon": "QEMU's Cortex-A57",
    "neon-dotprod": "QEMU's Neoverse N1",
    "neon-i8mm-bf16": "all that QEMU's processor has",
    "x86-64-v4-amx": "this processor, with the matrix unit's instructions by plain loops",
}
Counted = dict[str, dict[str, float]]  # by file: tests by outcome, and seconds


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


def check(
    kind: str, name: str, under: str, extra: tuple[str, ...], arguments: list[str]
) -> tuple[subprocess.CompletedProcess[bytes], Counted]:
    """Build one library, and run the tests on it in a new process; returns how it ended, and what was counted."""
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
        counts = Path(folder) / "counts.json"
        environment = os.environ | {LIBRARY: str(out), LEVEL: name, COUNTS: str(counts), "OMP_NUM_THREADS": "2"}
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
        ended = subprocess.run([sys.executable, __file__, "run", *arguments], env=environment, check=False)
        return ended, json.loads(counts.read_text(encoding="utf-8")) if counts.exists() else {}


class Tally:
    """A plug-in of pytest: the outcomes and the time of the tests of each file, written when they have run."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._found: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count a test."""
        found = self._found[report.nodeid.partition("::")[0]]
        found["seconds"] += report.duration
        if report.when == "call" or not report.passed:
            found[report.outcome] += 1

    def pytest_sessionfinish(self) -> None:
        """Write what was counted."""
        self._out.write_text(json.dumps(self._found), encoding="utf-8")


def page(found: Mapping[str, Counted], out: Path, facts: Mapping[str, Any]) -> None:
    """Write the tests of each level and file, as far as they have run."""
    from draftproof.results import Results, table

    outcomes = ("passed", "skipped", "failed")
    rows = [
        (level, name, *(int(each.get(key, 0)) for key in outcomes), f"{each['seconds'] / 60:.1f}")
        for level, files in found.items()
        for name, each in files.items()
    ]
    lines = [
        *(f"- `{level}`: {REMARKS.get(level, 'emulated')}." for level in found),
        "",
        *table(("level", "tests", *outcomes, "minutes"), rows),
    ]
    Results("Levels of processors that are not here, emulated", lines, {"levels": found}, facts).write(out)


def run(arguments: list[str]) -> int:
    """Run the tests in the new process, with the library in place of the one that would be chosen."""
    import pytest

    from draftproof.native import build as library
    from support.emulated import PROCESSORS, EmulatedLibrary

    level = next(level for level in library.LEVELS if level.name == os.environ[LEVEL])
    path = Path(os.environ[LIBRARY])
    here = level.machine in (None, platform.machine())
    library.choose()  # which also asks the system for tiles
    loaded = ctypes.CDLL(str(path)) if here else EmulatedLibrary(path, PROCESSORS[level.name])

    def choose(name: str | None = None) -> list[library.Level]:
        if name not in (None, level.name):
            raise library.UnavailableError(f"only {level.name} is checked")
        return [level]

    library.choose, library.load = choose, functools.cache(lambda _: loaded)
    library.processor = lambda: level.needs  # this one's matrix unit would have bfloat16 left to torch
    files = [str(ROOT / "tests" / name) for name in os.environ.get(ONLY, " ".join(FILES)).split()]
    longer = () if here else ("--timeout", "3600")  # a test of two minutes takes more than its time under emulation
    options = ["-W", "ignore", "-m", "not builds", *longer, *files, *arguments]
    return int(pytest.main(options, [Tally(Path(os.environ[COUNTS]))]))


def survivors(files: list[str], arguments: list[str]) -> list[str]:
    """The faults that no test sees, of those whose code this processor runs; compiled without optimization."""
    from draftproof.native import build as library
    from support.native_mutants import MUTANTS as EVERY

    levels, unseen = {level.name: level for level in library.choose()}, []
    best = next(iter(levels))
    chosen = [each for each in EVERY if each.level in (None, *levels)]
    known = {each.file for each in EVERY}
    if unknown := set(files) - known:
        sys.exit(f"expected files with faults ({', '.join(sorted(known))}), got {unknown.pop()}")
    chosen = [each for each in chosen if not files or each.file in files]
    for number, mutant in enumerate(chosen, 1):
        level = levels[mutant.level or best]
        with tempfile.TemporaryDirectory() as folder:
            source, out = Path(folder) / "c", Path(folder) / "library.so"
            mutant.write(source)
            library.compile_library(out, level, extra=("-O0",), source=source)
            environment = os.environ | {LIBRARY: str(out), LEVEL: level.name, ONLY: mutant.tests}
            environment[COUNTS] = str(Path(folder) / "counts.json")
            command = [sys.executable, __file__, "run", "-x", "-q", "--no-header", "--tb=no", *arguments]
            ended = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
        seen = ended.returncode == 1 or ended.returncode < 0  # a test failed, or the process; else it says nothing
        print(
            f"{number} of {len(chosen)}, {'seen' if seen else 'NOT SEEN'}: {mutant.name} ({mutant.tests})", flush=True
        )
        if not seen:
            unseen.append(mutant.name)
            print(ended.stdout[-2000:], ended.stderr[-2000:])
    return unseen


def main() -> int:
    """Check every requested build; returns 1 if one fails."""
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    words, rest = given[:end], given[end + 1 :]
    if given[:1] == ["run"]:
        return run(given[1:])
    if words[:1] == [MUTANTS]:
        return int(bool(survivors(words[1:], rest)))
    out = None
    if "--out" in words:
        place = words.index("--out")
        if place + 1 == len(words):
            sys.exit("expected a path after --out, got nothing (do `--out docs/results/emulated`)")
        out = Path(words[place + 1])
        del words[place : place + 2]

    from draftproof.native import build as library
    from draftproof.provenance import run_facts

    levels = [level.name for level in library.LEVELS]
    if unknown := set(words) - set(KINDS) - set(levels):
        sys.exit(f"expected {', '.join((*KINDS, *levels))}, or {MUTANTS} alone, got {', '.join(sorted(unknown))}")
    chosen = builds(
        [each for each in KINDS if each in words] or list(KINDS), [each for each in words if each in levels]
    )
    facts, found, failed = run_facts(), {}, []
    for kind, name, under, extra in chosen:
        ended, found[name] = check(kind, name, under, extra, rest)
        if ended.returncode:
            failed.append(f"{kind} {name}")
        if out is not None:
            page(found, out, facts)
    for each in failed:
        print(f"failed: {each}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
