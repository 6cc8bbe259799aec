"""The compiled forward: the lean one's logits whichever way a pass goes; one line where nothing can be compiled."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftproof import UserError
from draftproof.backends.lean.compiled import CompiledBackend
from support.helpers import CONFIGS, random_model


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no C++ compiler")
@pytest.mark.slow
@pytest.mark.parametrize("what", ["one", "batch"])
def test_the_program_gives_the_lean_logits(what):
    command = [sys.executable, "-m", "support.compiled_check", what]
    done = subprocess.run(command, cwd=Path(__file__).parents[3] / "tests", capture_output=True, text=True, check=False)
    assert done.stdout.endswith("equal\n"), done.stderr


def test_where_nothing_can_be_compiled_one_line_says_so(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    with pytest.raises(UserError, match=r"No working C\+\+ compiler found.*use backend lean"):
        CompiledBackend(random_model(CONFIGS["llama"]()), name="llama")


def test_a_model_without_a_lean_forward_cannot_be_compiled():
    with pytest.raises(UserError, match=r"gpt2 has no lean forward: .* is a Conv1D"):
        CompiledBackend(random_model(CONFIGS["gpt2"]()), name="gpt2")
