"""How clients are pointed at a server: the lines of their own configuration files and variables."""

from __future__ import annotations

import json
import os
import shlex
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from draftproof.errors import UserError

KEY = "DRAFTPROOF_API_KEY"  # the variable that clients read the key from
_CONTEXT = 32_768  # where neither a server nor the user says it
_SECONDS = 2.0
_NO_KEY = 401


@dataclass(frozen=True)
class ServedModel:
    """What a client must know of a server: its address without a path, and its model with numbers of tokens."""

    url: str
    name: str
    context: int
    output: int
    reasoning: bool = False

    @property
    def api(self) -> str:
        """The address of OpenAI's API."""
        return f"{self.url}/v1"


def ask_server(url: str) -> ServedModel | None:
    """What the server at an address says of its model; None where none answers.

    Raises:
        UserError: it wants another key than that of the variable `KEY`.
    """
    key = os.environ.get(KEY)
    asked = urllib.request.Request(  # noqa: S310 - http only
        f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {}
    )
    try:
        with urllib.request.urlopen(asked, timeout=_SECONDS) as answer:  # noqa: S310 - http only
            card = json.load(answer)["data"][0]
        return ServedModel(
            url,
            str(card["id"]),
            int(card["max_model_len"] or _CONTEXT),
            int(card["max_output_tokens"]),
            bool(card["reasoning"]),
        )
    except urllib.error.HTTPError as error:
        if error.code == _NO_KEY:
            got = "another one" if key else "none"
            raise UserError(
                f"the server at {url} expected one of its API keys, got {got}: set the variable {KEY}"
            ) from error
        return None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def assumed_server(url: str, name: str, output: int) -> ServedModel:
    """What can be said of a server that does not answer."""
    return ServedModel(url, name, _CONTEXT, min(output, _CONTEXT // 2))


def client_config(client: str, served: ServedModel) -> tuple[str, str]:
    """Where the configuration of one of `CLIENTS` belongs and how it is started, in a sentence; and its content."""
    where, content = CLIENTS[client]
    return where.format(name=served.name, key=KEY), content(served).strip() + "\n"


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _codex(served: ServedModel) -> str:
    return f"""
model = {json.dumps(served.name)}
model_provider = "draftproof"
model_context_window = {served.context}
web_search = "disabled"

[model_providers.draftproof]
name = "draftproof"
base_url = {json.dumps(served.api)}
wire_api = "responses"
"""


def _claude(served: ServedModel) -> str:
    return f"""
export ANTHROPIC_BASE_URL={served.url}
export ANTHROPIC_AUTH_TOKEN="${{{KEY}:-none}}"
export ANTHROPIC_MODEL={shlex.quote(served.name)}
export ANTHROPIC_SMALL_FAST_MODEL={shlex.quote(served.name)}
export CLAUDE_CODE_MAX_OUTPUT_TOKENS={served.output}
"""


def _opencode(served: ServedModel) -> str:
    model = {"name": served.name, "reasoning": served.reasoning, "tool_call": True}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "draftproof",
        "options": {"baseURL": served.api, "apiKey": f"{{env:{KEY}}}"},
        "models": {served.name: {**model, "limit": {"context": served.context, "output": served.output}}},
    }
    names = dict.fromkeys(("model", "small_model"), f"draftproof/{served.name}")
    return _json({"provider": {"draftproof": provider}, **names})


def _pi(served: ServedModel) -> str:
    model = {
        "id": served.name,
        "reasoning": served.reasoning,
        "contextWindow": served.context,
        "maxTokens": served.output,
    }
    provider = {"baseUrl": served.api, "api": "openai-completions", "apiKey": KEY, "models": [model]}
    return _json({"providers": {"draftproof": provider}})


def _qwen(served: ServedModel) -> str:
    return f"""
export OPENAI_BASE_URL={served.api}
export OPENAI_API_KEY="${{{KEY}:-none}}"
export OPENAI_MODEL={shlex.quote(served.name)}
"""


def _continue(served: ServedModel) -> str:
    return f"""
name: draftproof
version: 1.0.0
schema: v1
models:
  - name: {json.dumps(served.name)}
    provider: openai
    model: {json.dumps(served.name)}
    apiBase: {served.api}
    apiKey: none
    roles: [chat, edit, apply]
    defaultCompletionOptions:
      contextLength: {served.context}
      maxTokens: {served.output}
"""


def _aider(served: ServedModel) -> str:
    return f"""
export OPENAI_API_BASE={served.api}
export OPENAI_API_KEY="${{{KEY}:-none}}"
"""


def _llm(served: ServedModel) -> str:
    return f"""
- model_id: draftproof
  model_name: {json.dumps(served.name)}
  api_base: {json.dumps(served.api)}
  supports_tools: true
  supports_schema: true
"""


CLIENTS: dict[str, tuple[str, Callable[[ServedModel], str]]] = {
    "aider": ("variables of a shell; then: aider --model 'openai/{name}'", _aider),
    "claude": ("variables of a shell; then: claude", _claude),
    "codex": ('~/.codex/config.toml; for a server with API keys add to its last table: env_key = "{key}"', _codex),
    "continue": ("~/.continue/config.yaml, also for the command cn", _continue),
    "llm": ("extra-openai-models.yaml beside what `llm logs path` names; then: llm -m draftproof", _llm),
    "opencode": ("opencode.json of a project, or of ~/.config/opencode", _opencode),
    "pi": ("~/.pi/agent/models.json; then: pi --provider draftproof", _pi),
    "qwen": ("variables of a shell; then: qwen --auth-type openai", _qwen),
}
