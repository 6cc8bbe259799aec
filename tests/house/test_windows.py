"""The package as Windows' Python would run it: nothing of POSIX is imported or called. Windows itself is not here.

A process of its own sees the standard library without what Windows lacks (support/windows_view.py). So this does not
show what Windows does with its files, processes, signals and sockets, nor that torch and the C library run on it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from draftproof import Engine, SamplingParams, grammar_compile
from draftproof.native import build as library
from draftproof.native.dispatch import VARIABLE
from support import windows_view
from support.native_levels import have, needs_native

ROOT = Path(__file__).parents[2]
NEEDED = {"anthropic", "lm_eval", "ray", "vllm", "xllamacpp"}  # packages that few have: their modules may be left out
BEGIN = """
import importlib, json, sys
from support import windows_view
windows_view.install()
"""
ALL = """
left = {}
for name in windows_view.modules():
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        left[name] = error.name
print(json.dumps(left))
"""
GENERATED = """
import torch
from draftproof import Engine, SamplingParams, files, grammar_compile, peak
from draftproof.models.gguf_file import GGUFFile
from draftproof.native import build, dispatch
build.PACKAGED = files.Path(sys.argv[2])
grammar_compile.__file__ = sys.argv[3]
engine = Engine.load("embedded:stories", "embedded:stories-draft")
def text(**options):
    (out,) = engine.generate(["Once upon a time"], SamplingParams(max_tokens=16, temperature=0.0, **options))
    return out.text
made = {"text": text(), "regex": text(grammar="regex:[a-c]{5}[0-9]"), "levels": dispatch.levels()}
for wrong in ("[", "its process ends"):
    try:
        text(grammar=f"regex:{wrong}")
    except ValueError as error:
        made[wrong] = str(error)
made["after it"] = text(grammar="regex:[a-c]{5}[a-c]")
made["memory"] = [peak.process_peak(), peak.resident(), peak.available(torch.device("cpu"))]
made["in profile"] = files.own_folder(files.home()) is not None
made["trusted"] = files.why_distrusted(files.home())
made["outside"] = files.why_distrusted(files.Path("/usr"))
with files.locked(files.home() / "lock", lambda: None):
    made["locked"] = True
file = GGUFFile(files.Path(sys.argv[1]))
for tensor in file.tensors.values():
    assert tensor.content.numel() == tensor.nbytes
    tensor.release()
made["tensors"] = len(file.tensors)
print(json.dumps(made))
"""


def seen_as_windows(code, folder, *arguments, **variables):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
        "HOME": str(folder),  # the profile
        "DRAFTPROOF_HOME": str(folder / "kept"),
        "PYTHONWARNINGS": "ignore",
        **variables,
    }
    command = [sys.executable, "-c", BEGIN + code, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)


def test_every_module_can_be_imported(tmp_path):
    done = seen_as_windows(ALL, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    left = json.loads(done.stdout.splitlines()[-1])
    assert set(left.values()) <= NEEDED, left


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    """A GGUF file with one tensor."""
    import numpy as np
    from gguf import GGUFWriter

    path = tmp_path_factory.mktemp("gguf") / "one.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("one", np.arange(64, dtype=np.float32).reshape(2, 32))
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        write()
    return path


def without_fork(path):
    """The script that tries grammars, which takes the way that it has on Windows; one grammar ends it."""
    script = Path(grammar_compile.__file__).read_text(encoding="utf-8")
    here, tries = 'if sys.platform == "win32":\n', "        return _found(tokenizer, kind, text)\n"
    assert here + tries in script
    ends = '        if text == "its process ends":\n            raise MemoryError\n'
    path.write_text(script.replace(here + tries, "if True:\n" + ends + tries), encoding="utf-8")
    return path


@needs_native
@pytest.mark.parametrize("native", ["portable", pytest.param("0", marks=pytest.mark.slow)])
def test_the_embedded_pair_generates(native, tmp_path, gguf, monkeypatch):
    """The text of this system, with torch's operations and with a library that is packaged by Windows' name."""
    packaged = tmp_path / "packaged"
    packaged.mkdir()
    have("portable")
    monkeypatch.setenv(VARIABLE, native)
    shutil.copy(library.load(library.level_named("portable"))._name, packaged / "portable.dll")
    done = seen_as_windows(
        GENERATED, tmp_path, gguf, packaged, without_fork(tmp_path / "compile.py"), DRAFTPROOF_NATIVE=native
    )
    assert done.returncode == 0, done.stderr[-3000:]
    made = json.loads(done.stdout.splitlines()[-1])
    engine = Engine.load("embedded:stories", "embedded:stories-draft")
    (out,) = engine.generate(["Once upon a time"], SamplingParams(max_tokens=16, temperature=0.0))
    assert made["text"] == out.text
    assert made["levels"].get("float32") == (None if native == "0" else "portable")
    assert re.fullmatch("[a-c]{5}[0-9]", made["regex"])
    assert "cannot be read" in made["["]
    assert "cannot be used: it takes too long or too much memory to compile" in made["its process ends"]
    assert re.fullmatch("[a-c]{6}", made["after it"])
    assert made["memory"] == [windows_view.PEAK, windows_view.WORKING_SET, windows_view.FREE]
    assert made["in profile"] is True
    assert made["trusted"] is None
    assert "outside your profile" in made["outside"]
    assert made["locked"] is True
    assert made["tensors"] == 1


LACKING = {
    "import resource": "No module named 'resource'",
    "import fcntl": "No module named 'fcntl'",
    "import os; os.getuid()": "has no attribute 'getuid'",
    "import os; os.fork()": "has no attribute 'fork'",
    "import mmap; mmap.mmap(-1, 4096).madvise(mmap.MADV_DONTNEED)": "madvise",
    "import select; select.select([0], [], [], 0)": "not a socket",
    "import ctypes; ctypes.CDLL(None)": "bad argument",
}


@pytest.mark.parametrize("code", LACKING)
def test_what_windows_lacks_is_missed(code, tmp_path):
    """A module of the package that uses it fails."""
    done = seen_as_windows(f"exec({code!r}, {{'__name__': 'draftproof.wrong'}})", tmp_path)
    assert done.returncode == 1
    assert LACKING[code] in done.stderr
    assert seen_as_windows(f"exec({code!r}, {{'__name__': 'torch.right'}})", tmp_path).returncode == 0
