"""Speculative decoding for any Hugging Face causal language model, with an output law proven to be the target's.

from draftproof import Engine, SamplingParams
engine = Engine.load("embedded:target", "embedded:draft")
print(engine.generate("Once upon a time", SamplingParams(temperature=0.8, seed=1))[0].text)
"""

from draftproof._version import __version__
from draftproof.engine.engine import Engine
from draftproof.engine.sequence import Chunk, Output
from draftproof.errors import UserError
from draftproof.sampling import SamplingParams

__all__ = ["Chunk", "Engine", "Output", "SamplingParams", "UserError", "__version__"]
