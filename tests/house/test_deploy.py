"""The files for containers and systemd: linted where there is a linter, and their commands run as they stand."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from support.serving import post

FOLDER = Path(__file__).parents[2] / "deploy"
ROOT = FOLDER.parent
ANALYZE = shutil.which("systemd-analyze")
KEY = "sk-0123456789abcdef"


def instructions():
    """Name and text of each instruction of the Containerfile."""
    text = re.sub(r"\\\n\s*", " ", (FOLDER / "Containerfile").read_text(encoding="utf-8"))
    return [tuple(line.split(" ", 1)) for line in text.splitlines() if line and not line.startswith("#")]


def unit():
    """The lines of the unit by name; a name that comes twice has its last value."""
    lines = (FOLDER / "draftproof.service").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def answers(command, **environment):
    """Run a command of these files, at a free port, with the small model; ask it something and end it."""
    words = [sys.executable, "-c", "from draftproof.cli import main; main()", *command[1:], "--port", "0"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=os.environ | environment)
    try:
        line = next(line for line in process.stderr if "serving" in line)
        base = line.split()[-1].removesuffix("/v1").replace("//0.0.0.0", "//127.0.0.1")
        assert httpx.get(f"{base}/ready").status_code == 200
        made = httpx.post(
            f"{base}/v1/completions", json={"prompt": "Once"}, headers={"authorization": f"Bearer {KEY}"}, timeout=60
        )
        assert made.status_code == 200
        assert post(base).status_code == 401
        return base
    finally:
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
        assert process.returncode == 0
        assert all(json.loads(line) for line in log.splitlines() if line.startswith("{"))


@pytest.mark.slow
def test_the_containers_command_with_those_of_compose():
    made = dict(instructions())
    service = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))["services"]["draftproof"]
    answers([*json.loads(made["ENTRYPOINT"]), *service["command"]], DRAFTPROOF_KEYS=KEY, DRAFTPROOF_TARGET="")


@pytest.mark.slow
def test_the_units_command(tmp_path):
    (tmp_path / "keys").write_text(f"{KEY}\n")
    command = unit()["ExecStart"].replace("${CREDENTIALS_DIRECTORY}", str(tmp_path))
    answers(shlex.split(command))


def test_the_container_copies_what_is_there_and_runs_without_rights():
    for name, text in instructions():
        if name == "COPY" and not text.startswith("--from"):
            assert all((ROOT / each).exists() for each in text.split()[:-1]), text
    made = dict(instructions())
    assert made["USER"] not in ("0", "root")
    assert made["EXPOSE"] in made["ENTRYPOINT"]
    assert next(name for name, _ in instructions()) == "FROM"
    check = json.loads(made["HEALTHCHECK"].partition("CMD ")[2])
    compile(check[-1], "healthcheck", "exec")
    assert "/ready" in check[-1]


def test_shell_lines_of_the_container_are_shell():
    for name, text in instructions():
        if name == "RUN":
            subprocess.run([shutil.which("bash"), "-n", "-c", text], check=True)


def test_times_to_end_are_longer_than_the_servers_own():
    service = yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))["services"]["draftproof"]
    own = int(service["command"][service["command"].index("--drain-timeout") + 1])
    assert int(service["stop_grace_period"].removesuffix("s")) > own
    assert int(unit()["TimeoutStopSec"]) > own


@pytest.mark.skipif(ANALYZE is None, reason="systemd is not installed")
def test_systemd_reads_the_unit(tmp_path):
    text = (FOLDER / "draftproof.service").read_text(encoding="utf-8")
    file = tmp_path / "draftproof.service"
    file.write_text(text.replace("/opt/draftproof/bin/draftproof", "/bin/true"))
    made = subprocess.run([ANALYZE, "verify", file], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert "draftproof.service" not in made.stderr, made.stderr
    broken = tmp_path / "broken.service"
    broken.write_text(text.replace("Type=exec", "Tpye=exec").replace("ExecStart=", "ExceStart="))
    assert subprocess.run([ANALYZE, "verify", broken], capture_output=True, check=False).returncode != 0
