"""The settings of a server: address, limits, keys."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from draftproof.errors import UserError, refuse_outside, refuse_unknown
from draftproof.server.dialects.families import DIALECTS

TOOL_FORMATS = ("auto", *sorted(DIALECTS))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Address and limits of a server.

    Attributes:
        host: the address to listen on; 0.0.0.0 accepts connections from other machines.
        port: the port to listen on; 0 chooses a free one.
        served_model_name: the model's name in the API; without it the last part of the target's name.
        api_key_file: a file with one API key per line; the variable DRAFTPROOF_KEYS has space-separated keys. Without
            either, everybody who reaches the port is served.
        share_between_clients: let requests of all clients draft from each other's texts (drafter suffix) and reuse
            each other's prompts. By default only requests with the same API key do; without keys, requests reuse
            prompts, but do not draft from each other's texts.
        allowed_host: further host names that requests may be sent to, besides this machine's own. Only needed if the
            server listens on localhost without keys, since a web page could make its own name point there.
        max_waiting: continuations that may wait for a place in the batch; further requests get 429.
        max_per_key: continuations that one API key may have, including waiting ones; without it, keys only take turns.
        max_connections: open connections; by default as many as requests may wait, and at least 800.
        request_timeout: time limit of a request in seconds, including waiting; 0 is no limit.
        stuck_timeout: seconds of a single round after which /health is 503; 0 is no limit.
        read_timeout: seconds within which a client must send its request.
        write_timeout: seconds after which a client that reads nothing of its answer is disconnected; 0 is no limit.
        drain_timeout: seconds that running requests get after SIGTERM.
        max_body: largest body of a request in bytes.
        max_prompt_tokens: largest number of tokens of a prompt; without it the model's context.
        max_tokens_limit: the most tokens of an answer, and a chat's default; requests for more are lowered to it.
        chat_template: a file with a chat template that replaces the model's.
        tool_format: format of the model's tool calls (the guide lists the names); auto finds it by rendering a call
            with the template.
        reasoning: what to do with the model's reasoning: auto separates it from the answer, by the markers of the chat
            template; none leaves it in the text.
        reasoning_budget: the most tokens of an answer's reasoning, for requests that name no number.
        unknown_fields: refuse or ignore unknown fields of a request. Endpoints that are not OpenAI's ignore them.
        json_logs: log JSON objects on stderr, one per line, instead of text.

    Raises:
        UserError: a number out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_key_file: Path | None = None
    share_between_clients: bool = False
    allowed_host: Sequence[str] = ()
    max_waiting: int = 64
    max_per_key: int | None = None
    max_connections: int | None = None
    request_timeout: float = 600.0
    stuck_timeout: float = 300.0
    read_timeout: float = 30.0
    write_timeout: float = 60.0
    drain_timeout: int = 30
    max_body: int = 4_194_304
    max_prompt_tokens: int | None = None
    max_tokens_limit: int = 16_384
    chat_template: Path | None = None
    tool_format: str = "auto"
    reasoning: str = "auto"
    reasoning_budget: int | None = None
    unknown_fields: str = "refuse"
    json_logs: bool = False

    def __post_init__(self) -> None:
        refuse_outside("port", self.port, 0, 65_535)
        least = {"max_waiting": 0, "drain_timeout": 0, "max_body": 1, "max_prompt_tokens": 1, "max_tokens_limit": 1}
        refuse_unknown("tool_format", self.tool_format, TOOL_FORMATS)
        for name, legal in (("reasoning", ("auto", "none")), ("unknown_fields", ("refuse", "ignore"))):
            if getattr(self, name) not in legal:
                raise UserError(f"{name}: expected {' or '.join(legal)}, got {getattr(self, name)!r}")
        if self.reasoning == "none" and self.reasoning_budget is not None:
            raise UserError(f"reasoning_budget: expected no number with reasoning none, got {self.reasoning_budget}")
        least |= {"reasoning_budget": 0, "max_per_key": 1, "max_connections": 1}
        times = dict.fromkeys(("request_timeout", "stuck_timeout", "read_timeout", "write_timeout"), 0)
        for name, low in {**least, **times}.items():
            value = getattr(self, name)
            if value is not None and not low <= value < math.inf:
                raise UserError(f"{name}: expected {low} or more, got {value}")


def require(what: str, *packages: str) -> None:
    """Raise UserError if packages of the extra `serve` are missing."""
    if missing := [name for name in packages if find_spec(name) is None]:
        raise UserError(f"{what} needs {', '.join(missing)}: pip install 'draftproof[serve]'")


def read_text(file: Path, what: str) -> str:
    """The text of a file; `what` describes it in an error."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {what} {file}: {getattr(error, 'strerror', None) or error}") from error


def served_name(target: str, given: str | None) -> str:
    """The model's name in the API: the given one, else the target's name without its directory."""
    if given:
        return given
    path = Path(target)
    return path.resolve().name if path.exists() else target
