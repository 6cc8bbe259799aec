"""The scripts that load a server for long, shortened."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def script(name, monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module(name)


@pytest.mark.slow
def test_a_hostile_client_among_ten_for_seconds(monkeypatch):
    """Without the times: other tests may run beside it."""
    hostile = script("soak_hostile", monkeypatch)
    report = hostile.HostileSoak(0.1, 1, ["reference_chains", "panics", "odd_bodies"]).run()
    assert report["wrong"] == []
    assert not [each for each in report["broken"] if "ms beside" not in each]
    assert set(report["attacks"]) <= {"reference_chains", "panics", "odd_bodies"}
    assert {f"{kind}, right" for kind in ("stream", "plain")} <= set(report["seen"])
    assert "every promise" in hostile.shown({**report, "broken": []})


def test_broken_promises_are_found(monkeypatch):
    """Each of them alone makes the soak fail."""
    hostile = script("soak_hostile", monkeypatch)
    kept = {"pause of a stream": 900, "/health": 900, "any answer": 9000}
    slow = {"pause of a stream": 1100, "/health": 1100, "any answer": 21_000}

    def broken(*, waits=kept, after=250, cached=5, seen=(), answers=(), wrong=()):
        soak = object.__new__(hostile.HostileSoak)
        soak.busy = False
        soak.seen, soak.wrong = dict.fromkeys(seen, 1), list(wrong)
        report = {"with it": {"longest waits, ms": waits}, "beside what": dict.fromkeys(waits, "x")}
        memory = {"before": 100, "after": after, "cached before": 5, "cached after": cached}
        report |= {"memory, MiB": memory, "attacks": {"x": dict.fromkeys(answers, 1)}}
        return soak.broken(report)

    assert broken(seen=["/health 200", "status 429, asked again"], answers=["200", "400", "hung up"]) == []
    for name, seconds in slow.items():
        assert len(broken(waits={**kept, name: seconds})) == 1
    assert len(broken(after=350)) == 1
    assert broken(after=350, cached=100) == [], "keys and values that are cached have a limit of their own"
    assert len(broken(seen=["/health 503"])) == 1
    assert len(broken(seen=["/health ReadTimeout"])) == 1
    assert len(broken(answers=["500"])) == 1
    assert len(broken(wrong=["x"])) == 1


@pytest.mark.slow
def test_a_hostile_client_among_ten_for_a_minute():
    command = [sys.executable, SCRIPTS / "soak_server.py", "--minutes", "1", "--json", "--busy"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)
    report = json.loads(made.stdout)
    assert report["broken"] == []
    assert made.returncode == 0


@pytest.mark.slow
def test_a_server_under_load_with_faults():
    command = [sys.executable, SCRIPTS / "soak_server.py", "200", "16"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)
    found = json.loads(made.stdout)
    assert found["wrong"] == []
    assert made.returncode == 0
    assert {"plain", "stream", "slow", "structured", "tool", "failing", "malformed", "cancelled"} <= set(found["seen"])
    assert found["seen"]["stream at SIGTERM"] == 16
    assert found["phases"]["again, kill -9"]["code"] == -9


@pytest.mark.slow
def test_requests_made_from_the_description_for_a_minute():
    pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    command = [sys.executable, SCRIPTS / "fuzz_server.py", "--minutes", "1"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)
    assert made.returncode == 0, made.stderr[-2000:]
    assert "POST /v1/chat/completions 200" in made.stdout
