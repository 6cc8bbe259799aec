"""Access control: API keys, compared in constant time; and the access log: id, status and time of every request."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import math
import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftproof.errors import LEAVING, UserError
from draftproof.server.errors import ApiError, crowded, error_answer, failed, is_anthropic, overloaded, quoted
from draftproof.server.settings import Settings, read_text

OPEN = frozenset({"/", "/health", "/ready"})  # paths that need no key
_POLLED = frozenset({"/health", "/ready", "/metrics"})  # in the log only where something is wrong
_SHORTEST = 16
_HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^\[\]:/@\s]+))(?::[0-9]{1,5})?")
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_log = logging.getLogger("draftproof.access")


def read_keys(file: Path | None) -> tuple[str, ...]:
    """The API keys in a file and in the variable DRAFTPROOF_KEYS; raises UserError for short or non-ASCII keys.

    A variable or a file without a key is an error, too: who sets it does not mean to serve everybody.
    """
    given: list[tuple[str, str, str]] = []
    if (words := os.environ.get("DRAFTPROOF_KEYS")) is not None:
        given.append(("the variable DRAFTPROOF_KEYS", words, "API keys with spaces between them, or no such variable"))
    if file is not None:
        given.append((str(file), read_text(file, "API keys from"), "one API key per line"))
    for where, text, expected in given:
        keys = text.split()
        if not keys:
            raise UserError(f"{where}: expected {expected}, got none")
        if not all(key.isascii() and key.isprintable() for key in keys):
            raise UserError(
                f"{where} holds an API key with other characters than those of ASCII: no header carries them"
            )
        if any(len(key) < _SHORTEST for key in keys):
            raise UserError(f"{where}: expected API keys of {_SHORTEST} or more characters, got a shorter one")
    return tuple(key for _, text, _ in given for key in text.split())


def allowed_hosts(settings: Settings, keys: Sequence[str]) -> tuple[str, ...] | None:
    """Names besides this machine's own that requests may be sent to; None for any.

    A page of another site can make its own name point to 127.0.0.1. To a browser the server is that site then, and
    only the header Host tells them apart. Who listens for other machines, or asks for keys, is safe from that.
    """
    if keys or not is_loopback(settings.host):
        return None
    return tuple(settings.allowed_host)


def is_loopback(name: str) -> bool:
    """Whether a name or an address is that of the machine itself."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def is_allowed_host(given: str, allowed: Sequence[str]) -> bool:
    """Whether a header Host has a name of the machine itself or an allowed one; the port does not matter."""
    found = _HOST.fullmatch(given.strip().lower())
    name = "" if found is None else (found["address"] or found["name"]).removesuffix(".")
    return is_loopback(name) or name in {each.lower() for each in allowed}


class ApiKeys:
    """A set of keys that says nothing by the time that a comparison takes."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [sha256(key.encode()).digest() for key in keys]

    @classmethod
    def of(cls, keys: Sequence[str] | ApiKeys) -> ApiKeys:
        """Some keys as such a set."""
        return keys if isinstance(keys, ApiKeys) else cls(keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, header: str) -> str | None:
        """Which of the keys an Authorization header has, in other words than its own; every key is compared."""
        scheme, _, given = header.partition(" ")
        digest = sha256(given.strip().encode()).digest()
        found = [hmac.compare_digest(digest, each) for each in self._digests]
        return sha256(b"owner" + digest).hexdigest()[:16] if scheme.lower() == "bearer" and any(found) else None


@dataclass
class Access:
    """Gives every request an id, refuses those without a key, and writes a line of each to the log."""

    app: ASGIApp  # what serves the requests
    keys: ApiKeys  # one of them is needed; empty lets everybody in
    _: KW_ONLY
    max_body: int  # bytes; a longer body is refused by its declared length, others while they are read
    at_once: int  # requests with a body that are in work; further ones are refused before their body is read
    seconds: float  # that a client has to send its body; 0 is no limit
    hosts: Sequence[str] | None = None  # names that the header Host may have; None for any
    _now: int = field(default=0, init=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope)
        name = given.get("x-request-id", "")
        request_id = name if _ID.fullmatch(name) else uuid.uuid4().hex
        path = quote(scope["path"])[:200]  # with everything that could begin a new line escaped
        facts: dict[str, Any] = {"request_id": request_id, "method": scope["method"], "path": path}
        state = scope.setdefault("state", {})
        state["facts"], state["key"] = facts, self._owner(given)
        if head := scope["method"] == "HEAD":  # as monitors ask: what GET answers, without its body
            scope = {**scope, "method": "GET"}
        start = time.perf_counter()

        noting = _noting(send, facts, anthropic=is_anthropic(scope["path"]), head=head)
        counts = scope["method"] == "POST"
        self._now += counts
        try:
            error = self._refused(scope["path"], given, state)
            answer = self.app if error is None else error_answer(error, scope)
            await answer(scope, self._limited(receive), noting)
        except (*LEAVING, asyncio.CancelledError, Exception):  # the application has answered Exceptions
            raise
        except BaseException as error:  # a panic of a Rust library
            _log.exception("a request failed")
            if "status" in facts:
                raise RuntimeError("a request failed after its answer had begun") from error
            await error_answer(failed(), scope)(scope, receive, noting)
        finally:
            self._now -= counts
            facts["seconds"] = round(time.perf_counter() - start, 6)
            usual = scope["path"] in _POLLED and facts.get("status") == 200
            _log.log(logging.DEBUG if usual else logging.INFO, "request", extra={"facts": facts})

    def _owner(self, given: Headers) -> str | None:
        """Which of the keys a request has; Anthropic's clients send it in a header of their own."""
        own = self.keys.owner(f"Bearer {given.get('x-api-key', '')}")
        return self.keys.owner(given.get("authorization", "")) or own

    def _limited(self, receive: Receive) -> Receive:
        """The client's messages; HTTPException where a body does not come in time."""
        end = anyio.current_time() + self.seconds if self.seconds else math.inf
        complete = False

        async def limited() -> Message:
            nonlocal complete
            if complete:
                return await receive()
            with anyio.CancelScope(deadline=end):
                message = await receive()
                complete = not message.get("more_body", False)
                return message
            detail = f"the body did not come within {self.seconds:g} s"
            raise HTTPException(408, detail, headers={"Connection": "close"})

        return limited

    def _refused(self, path: str, given: Headers, state: Mapping[str, Any]) -> ApiError | None:
        if state.get("spare") and path not in OPEN:
            return crowded()
        host = given.get("host", "")
        if self.hosts is not None and not is_allowed_host(host, self.hosts):
            return ApiError(
                f"the request is to {quoted(host)}, and this server answers at its machine's own names: its operator "
                "can allow others by --allowed-host, or give keys to clients",
                status=421,
            )
        if self.keys and path not in OPEN and state["key"] is None:
            return ApiError(
                "an API key is needed, as: Authorization: Bearer KEY, or as: x-api-key: KEY",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if self._now > self.at_once:
            return overloaded(1)
        length = given.get("content-length", "0")
        if length.isdecimal() and int(length) > self.max_body:
            return ApiError(f"expected a body of at most {self.max_body} bytes, got {length}", status=413)
        return None


def _noting(send: Send, facts: dict[str, Any], *, anthropic: bool, head: bool) -> Send:
    """`send` with the request's id in the headers; it notes the status in `facts`. `head` leaves bodies out."""

    async def noting(message: Message) -> None:
        if message["type"] == "http.response.start":
            facts["status"] = message["status"]
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = facts["request_id"]
            if anthropic:
                headers["request-id"] = facts["request_id"]
        elif head:
            message["body"] = b""
        await send(message)

    return noting


def note(scope: Mapping[str, Any], **facts: Any) -> None:
    """Add facts to the line that the log will get of a request."""
    scope["state"]["facts"].update(facts)
