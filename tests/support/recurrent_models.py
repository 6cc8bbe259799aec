"""Small models with recurrent layers."""

import functools

from draftproof.backends.hf.snapshots import SnapshotBackend
from support.architectures.tiny import tiny_config, tiny_model


@functools.cache
def model(name):
    return tiny_model(tiny_config(name))


@functools.cache
def backend(name):
    return SnapshotBackend(model(name), name=name)
