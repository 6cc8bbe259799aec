"""The server on Ray Serve: replicas of it, and before them an entrance that sends like prompts to the same replica."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from starlette.types import Message, Receive, Scope, Send

from draftproof.engine.engine import Engine
from draftproof.errors import UserError
from draftproof.server.app import Server, make_app
from draftproof.server.errors import stopping
from draftproof.server.logs import start_logging
from draftproof.server.metrics import together
from draftproof.server.run import use_template
from draftproof.server.settings import Settings, served_name

_TRIES = 4  # replicas that a request is sent to, where they die before they answer
_SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers", "client", "server")
_ROUTER = "draftproof.integrations.ray.router.PrefixRouter"
_REMEMBERED = 4_000_000  # characters of prompts that the router compares with
_POLL = 5.0  # seconds that replicas have to show their metrics
_NAME = b"x-replica"  # header that says which replica has answered
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """An HTTP request on its way to a replica.

    Attributes:
        prompt: its prompt, or the texts of its messages; the router reads it by this name.
        scope: of ASGI, without what cannot be sent.
        body: whole.
    """

    prompt: str
    scope: Mapping[str, Any]
    body: bytes


class Replica:
    """One engine and its server, without a socket: requests come from the entrance.

    Args:
        target: as in `Engine.load`.
        draft: as in `Engine.load`.
        engine: further arguments of `Engine.load`.
        settings: of the server.
        keys: API keys; empty lets everybody in.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, target: str, draft: str | None, engine: Mapping[str, Any], settings: Settings, keys: Sequence[str]
    ) -> None:
        start_logging(as_json=settings.json_logs)
        loaded = await asyncio.to_thread(Engine.load, target, draft, **engine)
        if settings.chat_template is not None:
            use_template(loaded, settings.chat_template)
        name = served_name(target, settings.served_model_name)
        self._server = Server(loaded, settings, name, hidden=[target, draft or target])
        self._app = make_app(self._server, keys)
        self._name = serve.get_replica_context().replica_id.unique_id.encode()
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()

    async def __del__(self) -> None:
        if hasattr(self, "_lifespan"):
            await self._lifespan.__aexit__(None, None, None)

    async def check_health(self) -> None:
        """Ray Serve replaces a replica for which this fails.

        Raises:
            RuntimeError: the engine's thread has ended, or does not end a round.
        """
        if not self._server.worker.ready:
            raise RuntimeError("the engine's thread has ended, or does not end a round")

    async def answer(self, asked: Asked) -> AsyncIterator[Message]:
        """The messages of ASGI that answer a request; a caller that closes the iterator drops the request."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        body: list[Message] = [{"type": "http.request", "body": asked.body, "more_body": False}]

        async def receive() -> Message:
            if body:
                return body.pop()
            await asyncio.Event().wait()  # the client is there until this is cancelled
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app({**asked.scope, "root_path": ""}, receive, messages.put)
            finally:
                messages.put_nowait(None)

        task = asyncio.create_task(run())
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (_NAME, self._name)]
                yield message
            await task
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task

    async def whole(self, asked: Asked) -> list[Message]:
        """All messages of `answer`."""
        return [message async for message in self.answer(asked)]


class Entrance:
    """Takes HTTP requests and passes them on; one whose replica dies before it answers goes to another.

    The metrics are those of all replicas, which are asked together.

    Args:
        replicas: their handle.
        max_body: bytes of a body that are read; the replica refuses more.
    """

    def __init__(self, replicas: Any, max_body: int) -> None:
        self._replicas, self._answer = replicas, replicas.options(stream=True).answer
        self._max_body = max_body

    def __serve_build_asgi_app__(self) -> Any:
        """The application that Ray Serve runs here."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:  # uvicorn takes a method for ASGI 2
            await (_live(receive, send) if scope["type"] == "lifespan" else self._run(scope, receive, send))

        return app

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, by the first replica that can."""
        asked = await self._read(scope, receive)
        if (scope["method"], scope["path"]) == ("GET", "/metrics"):
            await self._show_metrics(asked, send)
            return
        for _ in range(_TRIES):
            begun = False
            stream = self._answer.remote(asked)
            try:
                async for message in stream:
                    begun = True
                    await send(message)
            except RayError as error:
                if begun or isinstance(error, RayTaskError):
                    raise
                _log.warning("a replica was lost before it answered; the request goes to another one")
            except asyncio.CancelledError:
                stream.cancel()
                raise
            else:
                return
        for message in _refusal():
            await send(message)

    async def _show_metrics(self, asked: Asked, send: Send) -> None:
        """Answer with the metrics of all replicas that answer in time, or as one of them refuses to."""
        try:
            asking = self._replicas.broadcast("whole", asked)
            every = await asking.results_async(timeout_s=_POLL, return_exceptions=True)
        except (RayError, DeploymentUnavailableError, TimeoutError):
            every = []
        for message in _metrics([each for each in every if isinstance(each, list)]):
            await send(message)

    async def _read(self, scope: Scope, receive: Receive) -> Asked:
        body = bytearray()
        while len(body) <= self._max_body:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        sent = {name: scope[name] for name in _SCOPE if name in scope}
        return Asked(_prompt(body) or str(scope["path"]), sent, bytes(body))


async def _live(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


def _metrics(answers: Iterable[Sequence[Message]]) -> Sequence[Message]:
    """One answer of what every replica answers when it is asked for its metrics."""
    pages: dict[str, str] = {}
    for start, *bodies in answers:
        headers = dict(start["headers"])
        if start["status"] != HTTPStatus.OK:  # no key, say: each would answer so
            return [start, *bodies]
        pages[headers[_NAME].decode()] = b"".join(each.get("body", b"") for each in bodies).decode()
    if not pages:
        return _refusal()
    return _whole(HTTPStatus.OK, {"content-type": CONTENT_TYPE_LATEST}, together(pages, "replica"))


def _whole(status: int, headers: Mapping[str, str], body: bytes) -> Sequence[Message]:
    """The messages of ASGI of an answer."""
    lines = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return [
        {"type": "http.response.start", "status": status, "headers": lines},
        {"type": "http.response.body", "body": body},
    ]


def _refusal() -> Sequence[Message]:
    """What a request gets that no replica answers."""
    error = stopping()
    return _whole(
        error.status, {"content-type": "application/json", **error.headers}, json.dumps(error.body()).encode()
    )


def _prompt(body: bytes | bytearray) -> str:
    """What a body asks, as text for the router; empty where it asks nothing. The replica checks it."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(found, dict):
        return ""
    if isinstance(messages := found.get("messages"), list):
        return "\n".join(str(each.get("content", "")) for each in messages if isinstance(each, dict))
    prompt = found.get("prompt", "")
    return prompt if isinstance(prompt, str) else json.dumps(prompt)


def deployment(
    target: str,
    draft: str | None = None,
    *,
    engine: Mapping[str, Any] | None = None,
    settings: Settings | None = None,
    keys: Sequence[str] = (),
    replicas: int = 1,
    max_replicas: int | None = None,
    cpus: float = 1.0,
    gpus: float = 0.0,
    max_surge_percent: int = 0,
    entrances: int = 2,
) -> serve.Application:
    """The server as an application of Ray Serve: `serve.run(deployment("smollm2-135m", replicas=2))`.

    Ray's prefix-aware router sends a prompt to the replica that has read the longest beginning of it, unless that one
    has much more to do than another. A request whose replica dies before it answers is answered by another; a stream
    that has begun ends there.

    Args:
        target: as in `Engine.load`.
        draft: as in `Engine.load`.
        engine: further arguments of `Engine.load`.
        settings: limits, as for `draftproof serve`; address and port are Ray Serve's.
        keys: API keys; empty lets everybody in.
        replicas: engines; the least of them where `max_replicas` is given.
        max_replicas: with it there are as many as the running requests need, `max_batch` each.
        cpus: of a replica; it computes with as many threads.
        gpus: of a replica.
        max_surge_percent: more replicas that a rolling restart may start before it stops old ones, rounded up; they
            need room on the cluster. With 0, one replica is missing meanwhile, and where there is one, requests wait.
        entrances: processes that take requests and pass them on.

    Raises:
        UserError: numbers out of range.
    """
    if replicas < 1 or (max_replicas is not None and max_replicas < replicas):
        raise UserError(
            f"replicas is {replicas} and max_replicas {max_replicas}: legal is 1 <= replicas <= max_replicas"
        )
    settings, options = settings or Settings(), dict(engine or {})
    batch = int(options.get("max_batch", 8))
    number: dict[str, Any] = {"num_replicas": replicas}
    if max_replicas is not None:
        scaling = {"min_replicas": replicas, "max_replicas": max_replicas, "target_ongoing_requests": batch}
        number = {"autoscaling_config": scaling}
    shared = {"graceful_shutdown_wait_loop_s": 0.5, "graceful_shutdown_timeout_s": settings.drain_timeout + 5.0}
    router = RequestRouterConfig(
        request_router_class=_ROUTER,
        request_router_kwargs={
            "imbalanced_threshold": batch,
            "do_eviction": True,
            "eviction_threshold_chars": _REMEMBERED,
            "eviction_target_chars": _REMEMBERED * 9 // 10,
        },
    )
    made = serve.deployment(
        Replica,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        max_ongoing_requests=2 * (batch + settings.max_waiting),
        request_router_config=router,
        health_check_period_s=2,
        max_surge_percent=max_surge_percent,
        **number,
        **shared,
    )
    entrance = serve.deployment(
        serve.ingress()(Entrance),
        num_replicas=entrances,
        max_surge_percent=100,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=1000,
        **shared,
    )
    return entrance.bind(made.bind(target, draft, options, settings, tuple(keys)), settings.max_body)
