"""Facts about a run and the header made from them: the same for every results file, and nothing private in it."""

import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from draftproof import provenance
from draftproof.provenance import header, measured_at, run_facts, without_directory
from draftproof.results import Results, columns, finite, median_and_range, table


def test_facts_of_this_run():
    facts = run_facts()
    assert set(facts) == {"commit", "modified", "date", "command", "versions", "machine", "load_average"}
    assert {"processor", "flags", "cores", "threads", "architecture", "native"} <= set(facts["machine"])
    assert set(facts["machine"]["flags"]) <= {"avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16"}
    assert {"draftproof", "python", "torch", "transformers"} <= set(facts["versions"])
    text = json.dumps(facts)
    assert socket.gethostname() not in text
    assert str(Path.home()) not in text


FACTS = {
    "commit": "abc1234567",
    "modified": True,
    "date": "2026-11-22T01:02:03+00:00",
    "command": ["draftproof", "bench", "run", "--out", "my runs"],
    "versions": {"draftproof": "0.1.0", "torch": "2.13.0"},
    "machine": {
        "architecture": "x86_64",
        "threads": 2,
        "cores": 4,
        "native": ["float32", "bfloat16"],
        "processor": "Some CPU",
        "flags": ["avx2", "avx512f"],
    },
    "load_average": 0.25,
}


def test_the_header_gives_every_fact():
    assert header(FACTS) == [
        "- Measured at commit abc1234567, with changes that are not committed, 2026-11-22T01:02:03+00:00.",
        "- Command: `draftproof bench run --out 'my runs'`",
        (
            "- Machine: Some CPU; with avx2, avx512f, without avx512_bf16, avx512_vnni, amx_bf16; threads: 2; cores: "
            "4; x86_64; native kernels for float32 and bfloat16; load average 0.2."
        ),
        "- Versions: draftproof 0.1.0, torch 2.13.0.",
    ]


def test_a_header_without_facts_says_that_they_are_unknown():
    facts = FACTS | {"commit": None, "modified": False, "load_average": None}
    facts["machine"] = FACTS["machine"] | {"native": [], "flags": [], "processor": ""}
    first, _, machine, _ = header(facts)
    assert first.startswith("- Measured at an unknown commit (installed package), 2026")
    assert "processor unknown; with none of these flags, without avx2" in machine
    assert "native kernels for nothing; load average unknown" in machine
    assert measured_at(facts | {"commit": "abc"}) == "measured at commit abc, 2026-11-22T01:02:03+00:00"


def test_the_header_of_an_older_file_has_the_facts_that_are_known():
    facts = {"commit": "abc", "modified": False, "date": "2026-11-21", "command": ["draftproof", "audit"]}
    facts |= {"versions": {}, "machine": {"threads": 2}, "note": "Of an earlier state."}
    assert header(facts) == [
        "- Measured at commit abc, 2026-11-21.",
        "- Command: `draftproof audit`",
        "- Machine: processor unknown; flags unknown; threads: 2; native kernels unknown; load average unknown.",
        "- Versions: unknown.",
        "- Note: Of an earlier state.",
    ]


def git(folder, *words):
    identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    subprocess.run([shutil.which("git"), *identity, *words], cwd=folder, check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_packages_own_checkout(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    git(tmp_path, "init")
    (tmp_path / "other.txt").write_text("x")
    git(tmp_path, "add", "other.txt")
    git(tmp_path, "commit", "-m", "x")
    (package / "provenance.py").write_text("")
    assert provenance._commit(package) == (None, False), "an installed package inside another checkout"
    git(tmp_path, "add", "package")
    git(tmp_path, "commit", "-m", "y")
    commit, modified = provenance._commit(package)
    assert len(commit) >= 10
    assert not modified
    (tmp_path / "other.txt").write_text("changed outside the package")
    assert provenance._commit(package) == (commit, False)
    (package / "new.py").write_text("")
    assert provenance._commit(package) == (commit, True)


def test_without_git_the_commit_is_unknown(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_facts()["commit"] is None


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("/home/me/models/mine", "mine"),
        ("--out=/tmp/x/y", "--out=y"),
        ("feature_head:/a/b/head", "feature_head:head"),
        ("relative/path", "relative/path"),
        ("fixed:4", "fixed:4"),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1"),
        ("--reference-url=https://localhost/v1", "--reference-url=https://localhost/v1"),
        ("https://me:secret@host/v1", "https://host/v1"),
        ("--model=file:///home/me/mine", "--model=file:mine"),
    ],
)
def test_directories_are_cut_from_command_lines(word, shown):
    assert without_directory(word) == shown


def test_results_are_written_whole_with_one_header(tmp_path):
    found = Results("Title", ["text", "", *table(("a", "b"), [(1, "x")])], {"rows": [float("nan")]}, FACTS)
    page, figures = found.write(tmp_path / "deep" / "name.v2")
    assert (page.name, figures.name) == ("name.v2.md", "name.v2.json")
    lines = page.read_text().splitlines()
    assert lines[:7] == ["# Title", "", *header(FACTS), ""]
    assert lines[-3:] == ["| a | b |", "|---|---|", "| 1 | x |"]
    assert json.loads(figures.read_text()) == {"provenance": FACTS, "title": "Title", "rows": [None]}
    assert sorted(path.name for path in page.parent.iterdir()) == ["name.v2.json", "name.v2.md"]


def test_values_for_json_and_tables():
    assert finite({"a": (1.0, float("inf"))}) == {"a": [1.0, None]}
    assert median_and_range([3.0, 1.0, 2.0], 1) == "2.0 [1.0, 3.0]"


def test_columns_are_as_wide_as_their_longest_cell():
    rows = [("block", "1.5", ""), ("token [x]", "22.5", "?")]
    assert columns(("rule", "x", "note"), rows, numbers={1}) == [
        "rule          x  note",
        "block       1.5",
        "token [x]  22.5  ?",
    ]
