"""The server on Ray Serve: replicas of it, and before them a gateway that sends like prompts to the same replica."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
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
from draftproof.server.auth import ApiKeys
from draftproof.server.gateway import Gateway, IncomingRequest, ServerLost, app_messages, refusal, whole
from draftproof.server.logs import start_logging
from draftproof.server.metrics import together
from draftproof.server.settings import Settings

_ROUTER = "draftproof.integrations.ray.router.PrefixRouter"
_REMEMBERED = 4_000_000  # characters of prompts that the router compares with
_READ_AT_ONCE = 64  # requests beyond those that the replicas take whose bodies a gateway reads
_POLL = 5.0  # seconds that replicas have to show their metrics
_NAME = b"x-replica"  # header that says which replica has app_messages
_GATEWAY: dict[str, Any] = {
    "name": "Gateway", "max_surge_percent": 100, "ray_actor_options": {"num_cpus": 0}, "max_ongoing_requests": 1000,
}  # fmt: skip


class Replica:
    """One engine and its server, without a socket: requests come from the gateway."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, target: str, draft: str | None, engine: Mapping[str, Any], settings: Settings, keys: ApiKeys
    ) -> None:
        start_logging(as_json=settings.json_logs)
        loaded = await asyncio.to_thread(Engine.load, target, draft, **engine)
        self._server = Server.named(loaded, settings, target, draft)
        self._app = make_app(self._server, keys)
        self._name = serve.get_replica_context().replica_id.unique_id.encode()
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()

    async def __del__(self) -> None:
        if hasattr(self, "_lifespan"):
            await self._lifespan.__aexit__(None, None, None)

    async def check_health(self) -> None:
        """Ray Serve replaces a replica for which this fails."""
        if not self._server.worker.ready:
            raise RuntimeError("the engine's thread has ended, or does not end a round")

    async def answer(self, asked: IncomingRequest) -> AsyncGenerator[Message]:
        """The messages of ASGI that answer a request; a caller that closes the iterator drops the request."""
        async with aclosing(app_messages(self._app, asked, [(_NAME, self._name)])) as messages:
            async for message in messages:
                yield message

    async def whole(self, asked: IncomingRequest) -> list[Message]:
        """All messages of `answer`."""
        return [message async for message in self.answer(asked)]


class Front:
    """Takes HTTP requests and passes them on to replicas.

    The metrics are those of all replicas, which are asked together.
    """

    def __init__(self, replicas: Any, settings: Settings, keys: ApiKeys, at_once: int) -> None:
        start_logging(as_json=settings.json_logs)
        self._replicas = replicas
        self._answer = replicas.options(stream=True).answer
        self._gateway = Gateway(
            self._passed,
            self._metrics,
            keys=keys,
            max_body=settings.max_body,
            at_once=at_once,
            read_timeout=settings.read_timeout,
        )

    def __serve_build_asgi_app__(self) -> Any:
        """The application that Ray Serve runs here."""

        async def app(scope: Scope, receive: Receive, send: Send) -> None:  # uvicorn takes a method for ASGI 2
            await (_live(receive, send) if scope["type"] == "lifespan" else self._gateway(scope, receive, send))

        return app

    async def _passed(self, asked: IncomingRequest) -> AsyncGenerator[Message]:
        """The answer of the replica that the router chooses."""
        stream = self._answer.remote(asked)
        try:
            async for message in stream:
                yield message
        except RayTaskError:
            raise
        except RayError as error:
            raise ServerLost("a replica was lost") from error
        except (asyncio.CancelledError, GeneratorExit):
            stream.cancel()
            raise

    async def _metrics(self, asked: IncomingRequest) -> Sequence[Message]:
        """The metrics of all replicas that answer in time, or what one of them says that refuses to."""
        try:
            asking = self._replicas.broadcast("whole", asked)
            every = await asking.results_async(timeout_s=_POLL, return_exceptions=True)
        except (RayError, DeploymentUnavailableError, TimeoutError):
            every = []
        return _metrics([each for each in every if isinstance(each, list)])


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
        return refusal()
    return whole(HTTPStatus.OK, {"content-type": CONTENT_TYPE_LATEST}, together(pages, "replica"))


def _number_of(replicas: int, most: int | None, batch: int) -> dict[str, Any]:
    """How many replicas there are, as Ray Serve takes it."""
    if replicas < 1 or (most is not None and most < replicas):
        raise UserError(f"expected 1 <= replicas <= max_replicas, got replicas={replicas} and max_replicas={most}")
    if most is None:
        return {"num_replicas": replicas}
    return {"autoscaling_config": {"min_replicas": replicas, "max_replicas": most, "target_ongoing_requests": batch}}


def _routed_by_prefix(batch: int) -> RequestRouterConfig:
    """How a gateway chooses a replica; `batch` more requests than another has outweigh a prompt's beginning."""
    return RequestRouterConfig(
        request_router_class=_ROUTER,
        request_router_kwargs={
            "imbalanced_threshold": batch,
            "do_eviction": True,
            "eviction_threshold_chars": _REMEMBERED,
            "eviction_target_chars": _REMEMBERED * 9 // 10,
        },
    )


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
    gateways: int = 2,
    entrances: int | None = None,
) -> serve.Application:
    """The server as an application of Ray Serve: `serve.run(deployment("smollm2-135m", replicas=2))`.

    Ray's prefix-aware router sends a prompt to the replica that has read the longest beginning of it, unless that one
    has much more to do than another. A request whose replica dies before it answers is sent to one more, unless it
    has a grammar; a stream that has begun ends there.

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
        gateways: processes that take requests and pass them on.
        entrances: the old name of `gateways`, for one more version.

    Raises:
        UserError: numbers out of range.
    """
    if entrances is not None:
        warnings.warn("deployment: entrances is now called gateways", DeprecationWarning, stacklevel=2)
        gateways = entrances
    settings, options = settings or Settings(), dict(engine or {})
    batch = int(options.get("max_batch", 8))
    shared = {"graceful_shutdown_wait_loop_s": 0.5, "graceful_shutdown_timeout_s": settings.drain_timeout + 5.0}
    made = serve.deployment(
        Replica,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        max_ongoing_requests=2 * (batch + settings.max_waiting),
        request_router_config=_routed_by_prefix(batch),
        health_check_period_s=2,
        max_surge_percent=max_surge_percent,
        **_number_of(replicas, max_replicas, batch),
        **shared,
    )
    gateway = serve.deployment(serve.ingress()(Front), num_replicas=gateways, **_GATEWAY, **shared)
    allowed = ApiKeys(keys)  # their digests: arguments of deployments are kept in Ray's state
    at_once = (max_replicas or replicas) * (batch + settings.max_waiting) + _READ_AT_ONCE
    return gateway.bind(made.bind(target, draft, options, settings, allowed), settings, allowed, at_once)
