"""Small models with recurrent layers."""

import functools

from draftproof.backends.hf.snapshots import SnapshotBackend, SnapshotSession
from draftproof.backends.lean.snapshots import LeanSnapshotBackend
from support.architectures.tiny import tiny_config, tiny_model


@functools.cache
def model(name):
    return tiny_model(tiny_config(name))


@functools.cache
def backend(name):
    """As loading makes it: read by the lean forward where that is possible."""
    return LeanSnapshotBackend(model(name), name=name)


@functools.cache
def by_modules(name):
    """Read by transformers' own modules."""
    return SnapshotBackend(model(name), name=name)


def take_refused_states(monkeypatch):
    """From now on a state after refused drafts is taken for the one before them: a negative control."""

    def advanced(self, length):
        self._marks = self._marks[-1:]
        self._settled = True
        return length

    monkeypatch.setattr(SnapshotSession, "_reachable", advanced)
