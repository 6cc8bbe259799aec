"""Files with round costs and acceptance rates, from which the next run starts.

They are only starting values: every round updates them, and contradicting measurements replace them in a few rounds.
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
from draftproof.native import numa, threads

PAUSE = 30.0  # seconds between two writes while requests come and go
VERSION = 10
_STORE = Store("costs", VERSION, most=256, most_bytes=1 << 26)  # a file for each pair of models
_log = logging.getLogger(__name__)


@runtime_checkable
class Learner(Protocol):
    """A drafter or stopper that learns from rounds."""

    @property
    def timed(self) -> bool:
        """Whether it learns from the time of rounds."""

    def to_dict(self) -> dict[str, Any]:
        """The learned figures; empty if there are none yet."""

    def restore(self, found: dict[str, Any]) -> None:
        """Start from what `to_dict` returned in an earlier run.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: the figures have another form.
        """


class CostFile:
    """The file with the learned figures of an engine's drafter; its name is a hash of the models' and parts' names."""

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
        except Exception as error:  # noqa: BLE001 - an unreadable file must not stop a run: it has starting values only
            _log.info("the figures of %s have another form (%s): not used", self._key, reason(error))

    def idle(self) -> None:
        """Write if the last write was long ago; called when no request runs."""
        if time.monotonic() - self._written > PAUSE:
            self.write()

    def write(self) -> None:
        """Write the learned figures."""
        self._written = time.monotonic()
        if self._learner is None or self._given_up or not (figures := self._learner.to_dict()):
            return
        text = json.dumps({"of": self._key, "figures": figures, "seconds": round(time.time())}, indent=1)
        if not _STORE.keep(self._file, partial(Path.write_text, data=text + "\n", encoding="utf-8")):
            self._given_up = True


def _write_at_exit(reference: weakref.ref[CostFile]) -> None:
    if (file := reference()) is not None:
        file.write()


def _key(engine: DecodingLoop) -> str:
    """The key of a file: the models, their number formats, the parts, the device, and the machine's threads."""
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
    ours = f"{torch.get_num_threads()} of {os.cpu_count()} threads, {threads.kind()}{numa.shown()}"
    return " | ".join(map(str, (*names, ours)))
