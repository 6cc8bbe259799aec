"""How clients are pointed at a server: their files are well formed, and say what the server says of itself."""

import json
import re
import shlex
import tomllib

import pytest
import yaml
from typer.testing import CliRunner

from draftproof import UserError
from draftproof.cli import app
from draftproof.server.client_configs import CLIENTS, KEY, ServedModel, ask_server, client_config
from support.commands import call
from support.serving import running, small_engine

SERVED = ServedModel("http://127.0.0.1:8000", 'it\'s a "model"', 4096, 1024, reasoning=True)
SHELL = {"aider", "claude", "qwen"}
READERS = {"codex": tomllib.loads, "continue": yaml.safe_load, "llm": yaml.safe_load}


def variables(text):
    words = [shlex.split(line) for line in text.splitlines()]
    assert all(word[0] == "export" for word in words)
    return dict(word[1].split("=", 1) for word in words)


def values(found):
    if isinstance(found, dict):
        return [each for value in found.values() for each in [*found, *values(value)]]
    return [each for value in found for each in values(value)] if isinstance(found, list) else [found]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_configuration_is_well_formed(client):
    where, text = client_config(client, SERVED)
    assert where
    found = variables(text) if client in SHELL else READERS.get(client, json.loads)(text)
    said = values(found)
    assert any(str(each).startswith("http://127.0.0.1:8000") for each in said)
    if client != "aider":  # its command names the model
        assert any(SERVED.name in str(each) for each in said)


def test_limits_are_told():
    assert json.loads(client_config("opencode", SERVED)[1])["provider"]["draftproof"]["models"][SERVED.name] == {
        "name": SERVED.name,
        "reasoning": True,
        "tool_call": True,
        "limit": {"context": 4096, "output": 1024},
    }
    assert tomllib.loads(client_config("codex", SERVED)[1])["model_context_window"] == 4096


def test_codex_gets_no_setting_that_it_does_not_know():
    """It warns at each start of others, such as a limit of answers."""
    assert set(tomllib.loads(client_config("codex", SERVED)[1])) == {
        "model",
        "model_provider",
        "model_context_window",
        "web_search",
        "model_providers",
    }


def test_an_unknown_client_is_refused_with_a_list_before_a_server_is_asked(monkeypatch):
    asked = []
    monkeypatch.setattr("draftproof.cli.serve.ask_server", asked.append)
    made = call("serve", "--print-config", "x", code=1)
    assert re.search(r"--print-config: expected one of aider, .*qwen, got 'x'", made.stderr)
    assert not asked


def test_a_running_server_says_its_name_and_limits():
    with running(small_engine(), max_tokens_limit=77) as (base, _):
        found = ask_server(base)
        assert found is not None
        assert (found.url, found.output, found.reasoning) == (base, 77, False)
        made = CliRunner().invoke(app, ["serve", "--port", base.rpartition(":")[2], "--print-config", "opencode"])
    assert f'"{found.name}"' in made.stdout
    assert '"output": 77' in made.stdout
    assert "opencode.json" in made.stderr
    assert "no server answers" not in made.stderr


def test_a_server_that_does_not_run_is_assumed():
    made = CliRunner().invoke(app, ["serve", "--port", "1", "--print-config", "codex", "--served-model-name", "mine"])
    assert made.exit_code == 0
    assert tomllib.loads(made.stdout)["model"] == "mine"
    assert "no server answers at http://127.0.0.1:1" in made.stderr


def test_a_server_with_keys_is_asked_with_one(monkeypatch):
    key = "k" * 16
    with running(small_engine(), keys=(key,)) as (base, _):
        command = ["serve", "--port", base.rpartition(":")[2], "--print-config", "opencode"]
        for given, got in ((None, "none"), ("another", "another one")):
            monkeypatch.setenv(KEY, given) if given else monkeypatch.delenv(KEY, raising=False)
            with pytest.raises(UserError, match=rf"expected one of its API keys, got {got}: set the variable {KEY}"):
                ask_server(base)
        assert not CliRunner().invoke(app, command).stdout, "no file is made of limits that are only assumed"
        monkeypatch.setenv(KEY, key)
        found = ask_server(base)
        assert found is not None
        assert f'"context": {found.context}' in CliRunner().invoke(app, command).stdout
