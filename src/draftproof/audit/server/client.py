"""A client of an OpenAI-compatible server: completions with their sampled tokens, retries, and what is refused."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from draftproof.errors import UserError, printable

if TYPE_CHECKING or find_spec("httpx"):  # of the extra audit; the other audits do not need it
    import httpx

_RETRIED = (408, 409, 425, 429, 500, 502, 503, 504)
_LONGEST_WAIT = 60.0
_READ = 10_000  # characters of an error that are looked at
_TOKEN_FIELDS: tuple[dict[str, Any], ...] = (
    {"return_token_ids": True},
    {"logprobs": 0, "return_tokens_as_token_ids": True},
    {},
)
KEY_NAME = "DRAFTPROOF_AUDIT_KEY"
_OPENAI_KEY, _OPENAI_HOST = "OPENAI_API_KEY", "api.openai.com"
_MOST = 32 << 20  # bytes of an answer


class Refused(Exception):  # noqa: N818 - an answer of the server, not a failure
    """The server refuses a request for what it asks; the text is its reason."""


@dataclass(frozen=True)
class Reply:
    """One answer of the server, which need not give the sampled token ids, nor their count."""

    text: str
    finish: str | None
    stop_reason: int | str | None
    tokens: tuple[int, ...] | None
    completion_tokens: int | None

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON."""
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Reply:
        """The inverse of `to_dict`."""
        tokens = values["tokens"]
        return cls(**{**values, "tokens": None if tokens is None else tuple(tokens)})


class Client:
    """Asks one server for completions.

    Args:
        url: base address, with or without /v1.
        model: name of the served model; default the first one it lists.
        timeout: seconds that one request may take.
        retries: further tries after a failure that may pass.
        key: API key; without it that of `key_for`, from the variable `key_name`.
        transport: of httpx; tests give one that needs no network.

    Raises:
        UserError: no address, a key that no header may have, or httpx is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        timeout: float = 120.0,
        retries: int = 5,
        key: str | None = None,
        key_name: str = KEY_NAME,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if find_spec("httpx") is None:
            raise UserError("an audit of a server needs httpx: pip install 'draftproof[audit]'")
        if not url.startswith(("http://", "https://")):
            raise UserError(f"URL of the server: expected an address like http://127.0.0.1:8000, got {url!r}")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._retries = retries
        self._seconds = timeout
        self._key_name = key_name
        key = key or key_for(url, key_name)
        if key is not None and not (key.isascii() and key.isprintable()):
            raise UserError("API key: expected printable ASCII characters, got others, which no header may have")
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout, connect=min(timeout, 10.0)),
            transport=transport,
        )
        # How sampled tokens are asked for, and whether prompts are token ids; `start` finds out.
        self._token_field: dict[str, Any] = {}
        self.prompts_as_ids = True
        self.returns_tokens = False

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def start(self, prompt: Sequence[int], text: str) -> dict[str, Any]:
        """Find out the model's name, what the server says of itself, and how it returns sampled tokens of a prompt."""
        listed = await self._send("GET", "/v1/models", None)
        cards = listed.get("data")
        cards = [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []
        if self.model is None:
            if not cards:
                raise UserError(f"{self.url} lists no model: name the served model with --model")
            self.model = str(cards[0].get("id"))
        if printable(self.model) != self.model:
            raise UserError(f"{self.url} lists the model {self.model!r}, which is no name: give one with --model")
        try:
            version = _words((await self._send("GET", "/version", None)).get("version"))
        except (Refused, UserError):
            version = None
        await self._probe(prompt, text)
        owner = _words(next((card.get("owned_by") for card in cards if card.get("id") == self.model), None))
        asked = next(iter(self._token_field), None) if self.returns_tokens else None
        return {"url": self.url, "model": self.model, "owned_by": owner, "version": version, "tokens_by": asked}

    async def _probe(self, prompt: Sequence[int], text: str) -> None:
        refusal = ""
        accepted: list[tuple[bool, dict[str, Any]]] = []
        for as_ids in (True, False):
            for asked in _TOKEN_FIELDS:
                self.prompts_as_ids = as_ids
                self._token_field = dict(asked)
                try:
                    reply = await self.complete(prompt, text, {"max_tokens": 2, "temperature": 1.0})
                except Refused as error:
                    refusal = str(error)
                    continue
                accepted.append((as_ids, dict(asked)))
                if reply.tokens is not None:
                    self.returns_tokens = True
                    return
            if accepted:
                break
        if not accepted:
            raise UserError(f"{self.url} refuses a plain completion: {refusal}")
        self.prompts_as_ids = accepted[0][0]
        self._token_field = {}

    async def complete(self, prompt: Sequence[int], text: str, fields: Mapping[str, Any]) -> Reply:
        """One completion of a prompt, as token ids and as a text for servers that take no ids.

        Raises:
            Refused: the server does not take these fields.
            UserError: it fails in another way, again and again.
        """
        return self._read(await self._send("POST", "/v1/completions", self.body(prompt, text, fields)))

    def body(self, prompt: Sequence[int], text: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The body of a request, as it is sent."""
        given: Any = list(prompt) if self.prompts_as_ids else text
        return {"model": self.model, "prompt": given, **fields, **self._token_field}

    def _read(self, answer: Mapping[str, Any]) -> Reply:
        try:
            choice = answer["choices"][0]
            text, finish = str(choice["text"]), choice.get("finish_reason")
        except (KeyError, IndexError, TypeError):
            raise UserError(f"{self.url} answered without choices: is it an OpenAI-compatible server?") from None
        usage = answer.get("usage") or {}
        return Reply(text, finish, choice.get("stop_reason"), _tokens(choice), usage.get("completion_tokens"))

    async def _send(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        """The JSON of an answer, after as many tries as are allowed."""
        last, pause = "", 0.0
        for tried in range(self._retries + 1):
            if tried:
                await asyncio.sleep(pause)
            pause = _wait(tried, None)
            try:
                async with asyncio.timeout(self._seconds):
                    answer = await self._answer(method, path, body)
            except (httpx.TimeoutException, TimeoutError):
                last = "it did not answer in time"
                continue
            except httpx.TransportError as error:
                last = printable(str(error)) or type(error).__name__
                continue
            if answer.status_code in _RETRIED:
                last = f"status {answer.status_code}: {_message(answer)}"
                pause = _wait(tried, answer.headers.get("Retry-After"))
                continue
            return self._checked(answer, path)
        raise UserError(f"{self.url}{path} failed {self._retries + 1} times, last: {last}; start again to go on")

    async def _answer(self, method: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        """An answer with its body, which must not be too long."""
        async with self._http.stream(method, path, json=body) as answer:
            content = bytearray()
            async for part in answer.aiter_bytes():
                content += part
                if len(content) > _MOST:
                    raise UserError(
                        f"{self.url}{path} answers with more than {_MOST >> 20} MiB: is it an OpenAI-compatible server?"
                    )
            headers = {name: answer.headers[name] for name in ("Retry-After",) if name in answer.headers}
            return httpx.Response(answer.status_code, headers=headers, content=bytes(content))

    def _checked(self, answer: httpx.Response, path: str) -> dict[str, Any]:
        if answer.status_code in (401, 403):
            raise UserError(
                f"{self.url} refuses the key ({answer.status_code}): set {self._key_name} to a valid one"
                + (f" ({_OPENAI_KEY} is sent to https://{_OPENAI_HOST} only)" if os.environ.get(_OPENAI_KEY) else "")
            )
        if answer.status_code == 404 and path != "/version":
            raise UserError(f"{self.url}{path} is not there (404: {_message(answer)}): check the URL and --model")
        if answer.status_code >= 400:
            raise Refused(_message(answer))
        try:
            found = answer.json()
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise UserError(f"{self.url}{path} answered something that is no JSON object")
        return found


def _wait(tried: int, asked: str | None) -> float:
    """Seconds until the next try: what the server asks for, else twice as long each time, with some jitter."""
    try:
        return min(max(float(asked or ""), 0.0), _LONGEST_WAIT)
    except ValueError:
        return float(min(0.25 * 2**tried, _LONGEST_WAIT) * (0.5 + random.random()))


def _message(answer: httpx.Response) -> str:
    """The server's own words, in one line, without what would control a terminal."""
    try:
        found = answer.json()
        found = found.get("error", found.get("detail", found)) if isinstance(found, dict) else found
        found = found.get("message", found) if isinstance(found, dict) else found
    except (ValueError, RecursionError):
        found = answer.content[:_READ].decode("utf-8", "replace")
    return printable(" ".join(str(found)[:_READ].split()))[:200]


def _words(value: object) -> str | None:
    return None if value is None else printable(str(value)[:200])


def key_for(url: str, name: str = KEY_NAME) -> str | None:
    """The key that the environment has for a server.

    A key of OpenAI goes to OpenAI only: an auditor is pointed at servers of strangers.
    """
    if key := os.environ.get(name):
        return key
    try:
        found = httpx.URL(url)
    except (httpx.InvalidURL, ValueError):
        return None
    theirs = (found.scheme, found.host, found.port) == ("https", _OPENAI_HOST, None)
    return (os.environ.get(_OPENAI_KEY) or None) if theirs else None


def _tokens(choice: Mapping[str, Any]) -> tuple[int, ...] | None:
    ids = choice.get("token_ids")
    if isinstance(ids, list) and all(isinstance(each, int) for each in ids):
        return tuple(ids)
    names = (choice.get("logprobs") or {}).get("tokens")
    if isinstance(names, list) and names and all(str(each).startswith("token_id:") for each in names):
        return tuple(int(str(each).removeprefix("token_id:")) for each in names)
    return None
