"""The scripts that load a server for long, shortened."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"
pytestmark = pytest.mark.slow


def test_a_server_under_load_with_faults():
    command = [sys.executable, SCRIPTS / "soak_server.py", "200", "16"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)
    found = json.loads(made.stdout)
    assert found["wrong"] == []
    assert made.returncode == 0
    assert {"plain", "stream", "slow", "structured", "tool", "failing", "malformed", "cancelled"} <= set(found["seen"])
    assert found["seen"]["stream at SIGTERM"] == 16
    assert found["phases"]["again, kill -9"]["code"] == -9


def test_requests_made_from_the_description_for_a_minute():
    pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    command = [sys.executable, SCRIPTS / "fuzz_server.py", "1"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=590, check=False)
    assert made.returncode == 0, made.stderr[-2000:]
    assert "POST /v1/chat/completions 200" in made.stdout
