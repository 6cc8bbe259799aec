"""Real clients against a server of its own process, with the configuration that it prints."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
PARTS = ("question", "stream", "tool round trip")


@pytest.fixture
def try_clients(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    import try_clients

    return try_clients


def tried(folder, *names):
    command = [sys.executable, SCRIPTS / "try_clients.py", *names, "--folder", folder, "--json"]
    made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert made.stdout, made.stderr
    return made.returncode, json.loads(made.stdout)["clients"]


@pytest.mark.slow
def test_official_libraries_work(tmp_path):
    code, rows = tried(tmp_path, "openai", "openai-responses", "anthropic")
    assert [row[part].partition(",")[0] for row in rows.values() for part in PARTS] == ["ok"] * 9, rows
    assert code == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llm", "pi", "pi-responses", "pi-messages"])
def test_a_client_that_can_be_fetched_works(name, tmp_path):
    code, rows = tried(tmp_path, name)
    if rows[name]["question"].startswith("not fetched"):
        pytest.skip(rows[name]["question"])
    assert [rows[name][part].partition(",")[0] for part in PARTS] == ["ok"] * 3, rows
    assert code == 0


def exchange(try_clients, **changed):
    values = {"path": "/v1/responses", "stream": True, "tools": [], "results": [], "status": 200, "pieces": ["a ", "b"]}
    return try_clients.Exchange(**values | changed)


@pytest.mark.parametrize(
    ("code", "output", "changed", "said"),
    [
        (0, "it says: a b", {}, ""),
        (1, "it says: a b", {}, "exit status 1"),
        (None, "it says: a b", {}, "exit status None"),
        (0, "it says: a c", {}, "no answer"),
        (0, "it says: a b", {"status": 400, "refusal": "no such field"}, "400: no such field"),
        (0, "it says: a b", {"refusal": "in the stream"}, "in the stream"),
        (0, "", {"pieces": []}, "no answer"),
    ],
)
def test_what_goes_wrong_is_seen(try_clients, code, output, changed, said):
    found = try_clients.Run(code, output, [exchange(try_clients, **changed)]).fault()
    assert said in found
    assert bool(found) == bool(said)


def test_a_client_that_asks_nothing_has_failed(try_clients):
    assert try_clients.Run(0, "hello", []).fault() == "it asked nothing"
