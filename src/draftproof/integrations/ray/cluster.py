"""Rows answered by engines on a Ray cluster: pieces of the input go to whoever is free, and lost ones go again."""

from __future__ import annotations

import logging
import math
import os
import socket
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from draftproof.backends.loading.quantization import quantization_fields
from draftproof.batch.answering import Answerer, Result
from draftproof.batch.rows import RowOptions
from draftproof.batch.run import Answers
from draftproof.batch.source import Row
from draftproof.engine.engine import Engine
from draftproof.errors import UserError, reason

_LOSSES = 3  # deaths of workers with the same piece, or before they were ready, after which the run ends
_SECONDS = 10.0  # that a cluster has to answer
_LOCAL_STORE = 200_000_000  # bytes of a local cluster's object store: pieces are small
_log = logging.getLogger(__name__)


class Worker:
    """An engine on the cluster; it is loaded once, and not at construction, where Ray would hide an error's type."""

    def load(self, engine: Mapping[str, Any], options: RowOptions) -> None:
        """Load the engine by arguments of `Engine.load`."""
        self._answer = Answerer(Engine.load(**engine), options)

    def answer(self, rows: Sequence[Row]) -> list[Result]:
        """The results of all of these rows."""
        return [result for some in self._answer(rows) for result in some]


@dataclass
class _Piece:
    rows: Sequence[Row]
    losses: int = 0


def cluster_answers(
    address: str, engine: Mapping[str, Any], options: RowOptions, *, workers: int | None = None, rows: int = 1 << 30
) -> Answers:
    """What answers rows on a cluster, in pieces whose results come together.

    A worker that dies is replaced where the cluster has room, and its piece goes to whoever is free. So a row may be
    answered twice, and its result comes once.

    Args:
        address: as `ray.init` takes it: "auto", "local", "HOST:PORT" or "ray://HOST:PORT".
        engine: arguments of `Engine.load`; models must be found under their names on every node.
        options: of the rows.
        workers: engines; by default one for each GPU, or for each node where there is none.
        rows: about how many there are; few are divided into smaller pieces.
    """
    if workers is not None and workers < 1:
        raise UserError(f"workers: expected 1 or more, got {workers}")

    def answers(given: Iterable[Row]) -> Generator[list[Result], None, None]:
        with _connected(address):
            number, resources = _resources(workers)
            actor = ray.remote(Worker).options(**resources, max_restarts=0)
            size = max(1, min(16 * engine.get("max_batch", 8), math.ceil(rows / (4 * number))))
            pool = _Pool(actor.remote, _placed(engine), options, _pieces(given, size))
            for _ in range(number):
                pool.start()
            yield from pool.results()

    return answers


def _pieces(rows: Iterable[Row], size: int) -> Iterator[_Piece]:
    left = iter(rows)
    while piece := list(islice(left, size)):
        yield _Piece(piece)


def _placed(engine: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `Engine.load` with files and directories that mean the same wherever a worker runs."""
    names = ("target", "draft", "adapter")
    found = {
        name: str(Path(value).resolve()) if name in names and value and Path(value).exists() else value
        for name, value in engine.items()
    }
    if isinstance(found.get("quantization_config"), str):
        found["quantization_config"] = quantization_fields(found["quantization_config"])
    return found


@contextmanager
def _connected(address: str) -> Iterator[None]:
    """A connection to the cluster; one that is there already is used and left as it is."""
    if ray.is_initialized():
        yield
        return
    _refuse_unreachable(address)
    variables = {name: os.environ[name] for name in ("HF_HUB_OFFLINE",) if name in os.environ}
    own = {"include_dashboard": False, "object_store_memory": _LOCAL_STORE} if address == "local" else {}
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, runtime_env={"env_vars": variables}, **own)
    except (RayError, ConnectionError, RuntimeError, ValueError) as cause:
        raise UserError(f"cannot reach a Ray cluster at {address!r}: {reason(cause)}") from cause
    try:
        yield
    finally:
        ray.shutdown()


def _refuse_unreachable(address: str) -> None:
    """Refuse HOST:PORT where nobody listens; `ray.init` would try for minutes, and end the process."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _SECONDS).close()
    except (OSError, OverflowError) as cause:
        raise UserError(f"cannot reach a Ray cluster at {address!r}: {reason(cause)}") from cause


def _resources(workers: int | None) -> tuple[int, dict[str, Any]]:
    """How many engines, and what each of them takes of the cluster."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = int(sum(node.get("GPU", 0) for node in nodes))
    cores = [int(node.get("CPU", 0)) for node in nodes]
    if gpus:
        number = workers or gpus
        return number, {"num_gpus": min(1, gpus / number), "num_cpus": 1}
    number = workers or max(sum(own > 0 for own in cores), 1)
    share = next(
        (each for each in range(max(cores, default=1), 0, -1) if sum(own // each for own in cores) >= number), 1
    )
    return number, {"num_cpus": share}


class _Pool:
    """Workers, which load an engine, and the pieces that they have."""

    def __init__(
        self, make: Callable[[], Any], engine: Mapping[str, Any], options: RowOptions, pieces: Iterator[_Piece]
    ) -> None:
        self._make = make
        self._engine = engine
        self._options = options
        self._pieces = pieces
        self._again: deque[_Piece] = deque()
        self._tasks: dict[Any, tuple[Any, _Piece | None]] = {}  # by the reference of the result; None while it loads
        self._idle: list[Any] = []
        self._unready = 0  # workers that died before they were ready, in a row

    def start(self) -> None:
        """Start a worker; it gets its first piece when it has loaded the engine."""
        worker = self._make()
        self._tasks[worker.load.remote(self._engine, self._options)] = worker, None

    def _give(self, worker: Any) -> None:
        piece = self._again.popleft() if self._again else next(self._pieces, None)
        if piece is None:
            self._idle.append(worker)
        else:
            self._tasks[worker.answer.remote(piece.rows)] = worker, piece

    @property
    def _ended(self) -> bool:
        """Whether nothing is left, and nothing is under way."""
        return bool(self._idle) and not self._again and all(piece is None for _, piece in self._tasks.values())

    def results(self) -> Iterator[list[Result]]:
        """The results of each piece; empty lists while one waits."""
        while not self._ended:
            done, _ = ray.wait(list(self._tasks), timeout=1.0)
            if not done:
                yield []
            for reference in done:
                worker, piece = self._tasks.pop(reference)
                results = self._taken(reference, piece)
                if results is not None:
                    self._give(worker)
                    while self._again and self._idle:
                        self._give(self._idle.pop())
                    yield results

    def _taken(self, reference: Any, piece: _Piece | None) -> list[Result] | None:
        """What a worker made of its piece; None where it died, which is made good."""
        try:
            found = ray.get(reference)
        except RayTaskError as error:
            cause = error.cause if isinstance(error.cause, UserError) else error
            raise UserError(f"a worker on the cluster failed: {reason(cause)}") from error
        except RayActorError as error:
            self._lost(piece, error)
            return None
        self._unready = 0
        return found if piece is not None else []

    def _lost(self, piece: _Piece | None, error: RayActorError) -> None:
        _log.warning("a worker on the cluster was lost; its rows are answered again")
        if piece is None:
            self._unready += 1
            if self._unready >= _LOSSES:
                raise UserError(f"{_LOSSES} workers died while they loaded the model: {reason(error)}") from error
        else:
            piece.losses += 1
            self._again.append(piece)
            if piece.losses >= _LOSSES:
                names = ", ".join(repr(row.id) for row in piece.rows[:5])
                raise UserError(
                    f"{piece.losses} workers died while they answered the {len(piece.rows)} rows from {names} on: one "
                    "of them may need more memory than there is"
                ) from error
        self.start()
