"""Rotary angles as the metadata of a GGUF file name them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from draftproof.backends.lean.traits import UnreadError
from draftproof.models.gguf_file import GGUFFile

DIVIDED, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
FACTORS = (DIVIDED, SHORT, LONG)
"""Names of tensors of rotary factors."""

_BETAS = (("fast", 32.0), ("slow", 1.0))  # turns in the length of the training from and up to which YaRN divides
Frequencies = tuple[tuple[float, ...], float]  # radians for a position, and the factor of cosines and sines


@runtime_checkable
class ModelMetadata(Protocol):
    """What is known of a model besides its weights, under the names of GGUF's metadata."""

    @property
    def tensors(self) -> Mapping[str, Any]:
        """Names of tensors; those of rotary factors are looked for."""
        ...

    def of_architecture(self, key: str, default: Any = None) -> Any:
        """A value by its key without the architecture's name."""
        ...


def frequencies(
    keys: ModelMetadata, dim: int, floats: Callable[[str], Tensor], *, whole_pairs: bool = True, factors: str = SHORT
) -> Frequencies:
    """The angles of layers without a window of their own; numbers that are not turned get the frequency 0.

    Source: YaRN, arXiv 2309.00071, equations 17 to 22; LongRoPE, arXiv 2402.13753, with the named one of its two sets
    of factors.
    """
    of = keys.of_architecture
    turned, base = int(of("rope.dimension_count", dim)), float(of("rope.freq_base", 10000.0))
    kind, factor = of("rope.scaling.type", "none"), float(of("rope.scaling.factor", 1.0) or 1.0)
    plain, scale = own_frequencies(base, turned), 1.0
    if factors in keys.tensors:
        plain, scale = plain / floats(factors)[: turned // 2], float(of("rope.scaling.attn_factor", 1.0))
    elif kind == "linear":
        plain = plain / factor
    elif kind == "yarn":
        plain, scale = _yarn(keys, plain, base, factor, whole_pairs=whole_pairs)
    elif kind != "none":
        raise UnreadError(f"its rotary embedding is {kind}")
    if DIVIDED in keys.tensors:
        plain = plain / floats(DIVIDED)[: turned // 2]
    return padded(plain, dim), scale


def own_frequencies(base: float, turned: int) -> Tensor:
    """Radians for a position of each pair of numbers."""
    return 1.0 / (base ** (torch.arange(0, turned, 2).float() / turned))


def padded(found: Tensor, dim: int) -> tuple[float, ...]:
    """The same with zeros for numbers that are not turned."""
    return (*found.tolist(), *[0.0] * (dim // 2 - len(found)))


def longest(file: GGUFFile) -> int | None:
    """The longest sequence that the angles are for: with factors for short ones alone, those that these are for."""
    found: int | None = file.of_architecture("context_length")
    if SHORT in file.tensors and not switches_at(file):
        found = file.of_architecture("rope.scaling.original_context_length", found)
    return found


def switches_at(keys: ModelMetadata) -> int:
    """Tokens beyond which a text has the long factors in place of the short ones; 0 where there are not both."""
    both = SHORT in keys.tensors and LONG in keys.tensors
    return int(keys.of_architecture("rope.scaling.original_context_length", 0)) if both else 0


def _yarn(keys: ModelMetadata, plain: Tensor, base: float, factor: float, *, whole_pairs: bool) -> tuple[Tensor, float]:
    """Low frequencies are divided by the factor, high ones stay, and those between are in between."""
    of = keys.of_architecture
    trained, turned = of("rope.scaling.original_context_length"), 2 * len(plain)
    if not trained:
        raise UnreadError("its rotary embedding is yarn, and the length of its training is not named")

    def pair(turns: float) -> float:
        """The pair of numbers that turns so often in the length of the training."""
        return turned * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = (pair(float(of(f"rope.scaling.yarn_beta_{name}", turns))) for name, turns in _BETAS)
    if whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0.0), min(last, turned - 1.0)
    width = last - first or 0.001
    divided = ((torch.arange(len(plain)).float() - first) / width).clamp(0, 1)
    scale = float(of("rope.scaling.attn_factor", 1.0)) * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return plain / factor * divided + plain * (1 - divided), scale
