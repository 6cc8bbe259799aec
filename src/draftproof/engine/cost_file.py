"""Costs of rounds and acceptance rates from one run to the next, in files: the next run begins with them.

They are only a beginning. Every round corrects them, and figures that contradict them outvote them within a few rounds.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from draftproof.backends import base as backends
from draftproof.drafters.base import SessionDrafter
from draftproof.engine.loop import DecodingLoop
from draftproof.errors import reason
from draftproof.files import Store
from draftproof.native import threads

PAUSE = 30.0  # seconds between two writes while requests come and go
VERSION = 9
_STORE = Store("costs", VERSION, most=256, most_bytes=1 << 26)  # a file for each pair of models
_log = logging.getLogger(__name__)


@runtime_checkable
class Learner(Protocol):
    """A drafter or stopper that learns from rounds."""

    @property
    def timed(self) -> bool:
        """Whether it learns from the time of rounds at all."""

    def to_dict(self) -> dict[str, Any]:
        """What it has learned; empty where that is nothing yet."""

    def restore(self, found: dict[str, Any]) -> None:
        """Begin with what `to_dict` gave in an earlier run.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: it has another form.
        """


class CostFile:
    """The file of what an engine's drafter has learned; the engine is made by names, so that the next run finds it."""

    def __init__(self, engine: DecodingLoop) -> None:
        self._key = _key(engine)
        self._file = _STORE.name(self._key, ".json")
        self._written = time.monotonic()
        self._given_up = False
        stopper = engine.drafter.stopper
        learner: Any = engine.drafter if isinstance(engine.drafter, Learner) else stopper
        self._learner = learner if isinstance(learner, Learner) and learner.timed else None
        self._restore()
        if self._learner is not None:
            atexit.register(_write_at_exit, weakref.ref(self))

    def _restore(self) -> None:
        if self._learner is None or (found := _STORE.json(self._file)) is None:
            return
        try:
            self._learner.restore(found["figures"])
        except Exception as error:  # noqa: BLE001 - whatever is wrong with what was kept, it is only a beginning
            _log.info("the figures of %s have another form (%s): not used", self._key, reason(error))

    def idle(self) -> None:
        """Write, if the last time was long ago; for moments in which no request runs."""
        if time.monotonic() - self._written > PAUSE:
            self.write()

    def write(self) -> None:
        """Write what was learned."""
        self._written = time.monotonic()
        if self._learner is None or self._given_up or not (figures := self._learner.to_dict()):
            return
        text = json.dumps({"of": self._key, "figures": figures, "seconds": round(time.time())}, indent=1)
        if not _STORE.keep(self._file, partial(Path.write_text, data=text + "\n", encoding="utf-8")):
            self._given_up = True
            _log.warning(
                "%s cannot be written, so every start learns again what rounds cost: set DRAFTPROOF_HOME to a folder "
                "that can",
                _STORE.folder / self._file,
            )


def _write_at_exit(kept: weakref.ref[CostFile]) -> None:
    if (found := kept()) is not None:
        found.write()


def _key(engine: DecodingLoop) -> str:
    """A key in the file: the models, their types, the device, and the machine's threads."""
    target, drafter = engine.target, engine.drafter
    models = drafter.backends if isinstance(drafter, SessionDrafter) else ()
    names = (
        target.name,
        backends.kind(target),
        backends.products(target),
        " ".join(model.name for model in models),
        drafter.name,
        engine.verifier.name,
        backends.dtype(target),
        target.device,
    )
    return " | ".join(map(str, (*names, f"{torch.get_num_threads()} of {os.cpu_count()} threads, {threads.kind()}")))
