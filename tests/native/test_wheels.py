"""Wheels with libraries: their names and what is in them, which scripts/wheels.py checks; what is taken from them."""

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from draftproof.native import build as library
from draftproof.native.structures import AttentionArguments
from support.native_levels import LEVELS

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("wheels", ROOT / "scripts" / "wheels.py")
wheels = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(wheels)


def library_file(system):
    """The beginning of a library of a system, as its format wants it."""
    _, _, beginnings = wheels.SYSTEMS[system]
    start = 64 if system.endswith("windows") else 0
    made = bytearray(b"MZ" + bytes(58) + start.to_bytes(4, "little") + bytes(64) if start else bytes(64))
    for place, expected in beginnings.items():
        made[start + place : start + place + len(expected)] = expected
    return bytes(made) + b"draftproof_attach"


def wheel(folder, system, files=None):
    """A wheel with only libraries; `files` replaces some of them, None leaves one out."""
    tag, suffix, _ = wheels.SYSTEMS[system]
    made = {f"{level}{suffix}": library_file(system) for level in wheels.LEVELS[system]} | (files or {})
    path = folder / f"draftproof-1-py3-none-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in made.items():
            if content is not None:
                archive.writestr(f"draftproof/native/built/{name}", content)
    return path


@pytest.mark.parametrize("system", wheels.SYSTEMS)
def test_wheels_that_are_whole_pass(system, tmp_path):
    assert wheels.check(wheel(tmp_path, system), system).keys() == wheels.LEVELS[system]


def test_the_levels_are_those_of_the_library():
    """By hand in the script; none is forgotten."""
    named = set().union(*wheels.LEVELS.values())
    assert named == {level.name for level in library.LEVELS}


def test_the_program_that_runs_libraries_has_their_structure():
    """Where fields are others, it crashes on the emulated processor."""
    source = (ROOT / "scripts" / "emulate" / "wheel.c").read_text(encoding="utf-8")
    written = source.partition("typedef struct {")[2].partition("} attention;")[0]
    fields = [name.strip(" *\n") for part in written.split(";") for name in part.split(",") if name.strip()]
    assert [field.split()[-1].strip("*") for field in fields] == [name for name, _ in AttentionArguments._fields_]


WRONG = {
    "another system": {"x86-64-v3.so": library_file("aarch64-linux")},
    "a level missing": {"x86-64-v3.so": None},
    "a level too many": {"neon.so": library_file("x86_64-linux")},
    "without functions": {"portable.so": library_file("x86_64-linux").replace(b"attach", b"atta")},
}


@pytest.mark.parametrize("mistake", WRONG)
def test_wheels_that_are_not_are_refused(mistake, tmp_path):
    with pytest.raises(ValueError, match=r"is not a library|missing or too many|does not have the functions"):
        wheels.check(wheel(tmp_path, "x86_64-linux", WRONG[mistake]), "x86_64-linux")


def test_a_wheel_with_another_name_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected a wheel for win_amd64"):
        wheels.check(wheel(tmp_path, "x86_64-linux"), "x86_64-windows")


def package(folder, system, *, without=(), libraries=None):
    """A wheel that pip installs, with empty files by the names of the package's own."""
    path = wheel(folder, system, libraries)
    names = wheels._files(ROOT / "src" / "draftproof")
    with zipfile.ZipFile(path, "a") as archive:
        for name in names - set(without):
            archive.writestr(f"draftproof/{name}", "")
        tag = path.stem.split("-", 2)[2]
        written = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: false\nTag: "
        archive.writestr("draftproof-1.dist-info/WHEEL", f"{written}{tag}\n")
        archive.writestr("draftproof-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: draftproof\nVersion: 1\n")
        archive.writestr("draftproof-1.dist-info/RECORD", "")
    return path


@pytest.mark.grid(2)
@pytest.mark.parametrize("system", wheels.SYSTEMS)
def test_pip_installs_a_wheel_for_its_system(system, tmp_path):
    assert wheels.install(package(tmp_path, system), system) > 0
    others = [each for each in wheels.SYSTEMS if each != system]
    with pytest.raises(subprocess.CalledProcessError):
        wheels.install(package(tmp_path, system), others[0])


@pytest.mark.grid(1)
@pytest.mark.parametrize("without", ["peak.py", "native/c/pool.c", "py.typed"])
def test_a_file_that_is_missing_after_installation_is_seen(without, tmp_path):
    assert without in wheels._files(ROOT / "src" / "draftproof")
    with pytest.raises(ValueError, match=rf"installed: \['{without}'\] are missing"):
        wheels.install(package(tmp_path, "x86_64-windows", without=[without]), "x86_64-windows")


# --- what is taken from a wheel ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "machine", "has", "best"),
    [
        ("darwin", "arm64", {"AdvSIMD", "arm.FEAT_DotProd"}, "neon-dotprod"),
        ("darwin", "arm64", {"AdvSIMD", "arm.FEAT_DotProd", "arm.FEAT_I8MM", "arm.FEAT_BF16"}, "neon-i8mm-bf16"),
        ("win32", "AMD64", {"avx2", "fma3", "f16c"}, "x86-64-v3"),
        ("win32", "AMD64", {"avx2", "fma3", "avx512_f", "avx512_bw", "avx512_vl", "avx512_dq"}, "x86-64-v4"),
        ("win32", "AMD64", set(), "portable"),
    ],
)
def test_levels_of_other_systems(system, machine, has, best, monkeypatch, tmp_path):
    import torch

    monkeypatch.setattr(library.sys, "platform", system)
    monkeypatch.setattr(library.platform, "machine", lambda: machine)
    monkeypatch.setattr(library.platform, "processor", lambda: "Intel64 Family 6 Model 85 Stepping 4, GenuineIntel")
    monkeypatch.setattr(library, "_apple_says", lambda name: name.removeprefix("hw.optional.") in has)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"cpu_name": "x", **dict.fromkeys(has, True)})
    monkeypatch.setattr(library, "PACKAGED", tmp_path)
    level = library.choose()[0]
    assert level.name == best
    with pytest.raises(library.UnavailableError, match=f"no library for {best} on {system}"):
        library.load.__wrapped__(level)
    packaged = tmp_path / f"{best}{library.SUFFIXES[system]}"
    packaged.write_bytes(b"")
    opened = []
    loaded = ctypes.CDLL(None)
    monkeypatch.setattr(library.ctypes, "CDLL", lambda path: opened.append(path) or loaded)
    assert library.load.__wrapped__(level) is loaded
    assert opened == [str(packaged)]


@pytest.mark.slow
@pytest.mark.skipif(not LEVELS or sys.platform != "linux", reason="no native operations on this machine")
@pytest.mark.parametrize("system", wheels.SYSTEMS)
def test_a_wheel_by_zig_is_made_installed_and_used_where_it_can_be(system, tmp_path):
    if wheels.zig_here() is None:
        pytest.skip("neither the variable ZIG nor the package ziglang names Zig")
    command = [sys.executable, str(ROOT / "scripts" / "wheels.py"), system, "--out", str(tmp_path)]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert all(f"`{level}`" in done.stdout for level in wheels.LEVELS[system])
    said = done.stderr.strip().splitlines()[-1]
    if system == f"{library.machine()}-linux":
        assert f"{library.choose()[0].name} " in said
    elif system in wheels.RUNNERS and shutil.which(wheels.RUNNERS[system][1][0]):
        assert f"{system}: run by " in said
        assert all(f"'{level}'" in said for level in wheels.LEVELS[system])
    else:
        assert f"{system}: not run" in said
        pytest.skip(f"made and installed, but {said.partition(': ')[2]}")
