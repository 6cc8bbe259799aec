"""Calls of the command line in this process, as tests make them, and what processes of their own are given."""

import os

from typer.testing import CliRunner

from draftproof.cli import app


def environment(**more):
    """What users start a process with: a model that was checked by an earlier one needs no transformers."""
    return os.environ | {"DRAFTPROOF_CHECKED": "1"} | more


def call(*words, code=0):
    """Run `draftproof WORDS`; checks the exit code, and that an error is one line on stderr and nothing on stdout."""
    result = CliRunner().invoke(app, list(map(str, words)), prog_name="draftproof")
    assert result.exit_code == code, result.output
    if code:
        assert result.stdout == ""
        assert result.stderr.startswith("draftproof: error: ")
        assert result.stderr.count("\n") == 1
        assert "Traceback" not in result.stderr
    return result
