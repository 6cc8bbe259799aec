"""Speculative decoding for Hugging Face causal language models, with an output distribution proven to be the target's.

from draftproof import Engine, SamplingParams
engine = Engine.load("embedded:target", "embedded:draft")
print(engine.generate("Once upon a time", SamplingParams(temperature=0.8, seed=1))[0].text)
"""

import importlib
from typing import TYPE_CHECKING, Any

from draftproof._version import __version__

if TYPE_CHECKING:
    from draftproof.engine.engine import Engine
    from draftproof.engine.request import Chunk, Output
    from draftproof.errors import UserError
    from draftproof.sampling import SamplingParams

_HOMES = {
    "Chunk": "engine.request",
    "Engine": "engine.engine",
    "Output": "engine.request",
    "SamplingParams": "sampling",
    "UserError": "errors",
}

__all__ = ["Chunk", "Engine", "Output", "SamplingParams", "UserError", "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `draftproof --help` need not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
