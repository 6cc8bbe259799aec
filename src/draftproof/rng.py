"""All randomness of the library: bernoulli and categorical draws, keyed by request, round, purpose and place.

A draw is a hash of (the request's seed, the request's round, the purpose, the place in the round, the call, the
element). So a request gets the same draws alone and in any batch, and again after a restart. The round is part of the
key because a rejected position is drafted again in the next round: with the same uniform, the new draw would depend on
the rejection of the old one.

Shared noise (`NoiseRoundRng`) is the other way, for rules that ask for it: draft and target draw with the same hash of
(the request's seed, the number of the output token, the token's id), in every round. Then what the target draws at a
place depends on nothing but the seed and its own distribution there.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from typing_extensions import override

from draftproof import native
from draftproof.accelerator import to_device
from draftproof.triton.choose import fused

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_A = 0xBF58476D1CE4E5B9
_MIX_B = 0x94D049BB133111EB


class _DrawKind(enum.IntEnum):
    """The two kinds of draws, whose calls are counted separately."""

    DECISION = 1
    INDEX = 2


class Purpose(enum.IntEnum):
    """What a draw is for; two purposes never share a uniform."""

    DRAFT = 1
    VERIFY = 2
    STOP = 3


@runtime_checkable
class Rng(Protocol):
    """A source of randomness; every random choice of the library is one of these two calls."""

    def bernoulli(self, prob: Float[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        """One independent yes/no for each probability."""

    def categorical(self, weights: Float[Tensor, "*rows vocab"]) -> Int[Tensor, "*rows"]:
        """One index for each row of non-negative weights, which need not sum to 1."""


@runtime_checkable
class RoundRng(Protocol):
    """The randomness of one round for the rows of a batch; `at` returns the Rng for one purpose."""

    def at(self, purpose: Purpose, place: int = 0, rows: Sequence[int] | None = None) -> Rng:
        """An Rng whose tensors have one leading row for each of `rows` (default: all rows of the batch).

        `place` distinguishes draws of one purpose in one round, such as the steps of a chain.
        """


def _mix(x: int) -> int:
    """Finaliser of splitmix64 on a Python integer: a bijection of 64-bit words whose output bits look independent."""
    x = ((x ^ (x >> 30)) * _MIX_A) & _MASK64
    x = ((x ^ (x >> 27)) * _MIX_B) & _MASK64
    return x ^ (x >> 31)


def fold(*words: int) -> int:
    """Hash a sequence of integers to one 64-bit key; order matters."""
    key = 0
    for word in words:
        key = _mix((key + _GOLDEN + (word & _MASK64)) & _MASK64)
    return key


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def _mix_tensor(x: Tensor) -> Tensor:
    """`_mix` on an int64 tensor, in place; multiplication wraps, right shifts are made logical by a mask."""
    x ^= (x >> 30) & ((1 << 34) - 1)
    x *= _signed(_MIX_A)
    x ^= (x >> 27) & ((1 << 37) - 1)
    x *= _signed(_MIX_B)
    x ^= (x >> 31) & ((1 << 33) - 1)
    return x


def _uniforms(keys: Sequence[int], shape: Sequence[int], device: torch.device) -> Float[Tensor, "*shape"]:
    """Uniforms in the open interval (0, 1), 52 bits each; row r comes from keys[r].

    The number of an element depends on its coordinates and not on its offset, so padding a batch to longer rows does
    not change it.
    """
    if len(shape) == 1:  # one draw per row, the most common case: the same numbers without tensors
        return to_device([((key >> 12) + 0.5) * 2.0**-52 for key in keys], device, torch.float64)
    x = to_device([_signed(k) for k in keys], device, torch.int64)
    for size in shape[1:]:
        steps = torch.arange(1, size + 1, dtype=torch.int64, device=device) * _signed(_GOLDEN)
        x = _mix_tensor(x.unsqueeze(-1) + steps)
    x = (x >> 12) & ((1 << 52) - 1)
    return (x.to(torch.float64) + 0.5) * 2.0**-52


_WIDE, _BLOCK = 4096, 512  # rows of at least this width are searched by blocks of this size


@fused("draw")
def inverse_cdf(weights: Float[Tensor, "*rows vocab"], u: Float[Tensor, "*rows"]) -> Int[Tensor, "*rows"]:
    """The first index whose cumulative weight exceeds u times the total; never an index of zero weight.

    All sums are in float64. Wide rows are searched in two steps, first by sums of blocks and then inside one block: a
    running sum of all entries would write eight bytes for each entry.
    """
    width = weights.shape[-1]
    if width < _WIDE:
        cdf = weights.cumsum(-1, dtype=torch.float64)
        return _first_above(cdf, u.unsqueeze(-1) * cdf[..., -1:]).squeeze(-1)
    drawn = native.draw(weights, u)
    return _inverse_cdf_by_blocks(weights, u) if drawn is None else drawn


def _inverse_cdf_by_blocks(weights: Float[Tensor, "*rows vocab"], u: Float[Tensor, "*rows"]) -> Int[Tensor, "*rows"]:
    width = weights.shape[-1]
    whole = width - width % _BLOCK
    sums = weights[..., :whole].reshape(*weights.shape[:-1], -1, _BLOCK).sum(-1, dtype=torch.float64)
    if whole < width:
        sums = torch.cat([sums, weights[..., whole:].sum(-1, keepdim=True, dtype=torch.float64)], -1)
    cdf = sums.cumsum(-1)
    goal = u.unsqueeze(-1) * cdf[..., -1:]
    block = _first_above(cdf, goal)
    before = torch.cat([torch.zeros_like(goal), cdf], -1).gather(-1, block)
    ids = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(-1, ids.clamp(max=width - 1)).double() * (ids < width)
    found = block * _BLOCK + _first_above(inside.cumsum(-1), goal - before)
    return found.squeeze(-1).clamp_(max=width - 1)


def _first_above(cdf: Float[Tensor, "*rows width"], goal: Float[Tensor, "*rows 1"]) -> Int[Tensor, "*rows 1"]:
    """The first index whose running sum exceeds the goal, after the goal was limited to less than the total.

    Rounding can raise the goal to the total (u times the total does so where the total is subnormal). The limit makes
    sure that the search ends inside the row, at an index of positive weight.
    """
    total = cdf[..., -1:]
    below = torch.minimum(goal, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, below, right=True).clamp_(max=cdf.shape[-1] - 1)


class CounterRng:
    """An Rng whose draws follow from counters and from one key for each leading row.

    The calls of `bernoulli` and of `categorical` are counted separately. So a rule that makes no `bernoulli` call for a
    batch, because no row was drafted, gets the same `categorical` draws as in any other batch.
    """

    def __init__(self, keys: Sequence[int]) -> None:
        self._keys = tuple(keys)
        self._calls: Counter[_DrawKind] = Counter()

    def _next(self, kind: _DrawKind, shape: Sequence[int], device: torch.device) -> Float[Tensor, "*shape"]:
        if not shape or shape[0] != len(self._keys):
            raise ValueError(
                f"draws of shape {tuple(shape)} were requested from an rng of {len(self._keys)} rows: the first "
                "dimension must be the rows"
            )
        self._calls[kind] += 1
        return _uniforms([fold(key, kind, self._calls[kind]) for key in self._keys], shape, device)

    def bernoulli(self, prob: Float[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        """True with the given probabilities; never for 0 and always for 1."""
        return self._next(_DrawKind.DECISION, prob.shape, prob.device) < prob

    def categorical(self, weights: Float[Tensor, "*rows vocab"]) -> Int[Tensor, "*rows"]:
        """Inverse-CDF draws, one uniform for each row of weights."""
        return inverse_cdf(weights, self._next(_DrawKind.INDEX, weights.shape[:-1], weights.device))


class CounterRoundRng(RoundRng):
    """The RoundRng of the engine: row r is keyed by its own seed and its own round number."""

    def __init__(self, seeds: Sequence[int], rounds: Sequence[int]) -> None:
        self._keys = [fold(seed, number) for seed, number in zip(seeds, rounds, strict=True)]

    @override
    def at(self, purpose: Purpose, place: int = 0, rows: Sequence[int] | None = None) -> CounterRng:
        picked = range(len(self._keys)) if rows is None else rows
        return CounterRng([fold(self._keys[row], purpose, place) for row in picked])


# --- shared noise -----------------------------------------------------------------------------------------------------

_NOISE = 4  # no Purpose has this number
_TOGETHER = 1 << 22  # entries of a race that torch handles at once, as a race takes some 40 bytes for each


def first_arrival(weights: Float[Tensor, "*rows vocab"], keys: Sequence[int]) -> Int[Tensor, "*rows"]:
    """The winner of an exponential race in each row: the index x with the smallest -log(1 - u_x) / weight_x.

    It has the distribution of the weights, like any categorical draw, and is never an index of zero weight. Two rows
    that are near each other and have the same key mostly have the same winner. Adding a constant to all log weights, or
    tokens of weight zero, changes nothing. The winner is the same on every device: u_x is made of integers, times are
    float64, and only with a probability of about 1e-15 are two times so close that the last place of a logarithm
    decides.

    Args:
        weights: non-negative rows, which need not sum to 1.
        keys: a key of 64 bits for each row, in order; u_x is a hash of the row's key and x.

    Source: Gumbel's trick, as -log of a time is a Gumbel variable; Daliri, Musco, Suresh 2024, arXiv 2408.07978.
    """
    winners = native.race(weights, keys)
    if winners is not None:
        return winners
    rows = weights.reshape(-1, weights.shape[-1])
    found = torch.empty(len(keys), dtype=torch.int64, device=weights.device)
    together = max(_TOGETHER // weights.shape[-1], 1)
    for start in range(0, len(keys), together):
        part = slice(start, start + together)
        found[part] = _race(rows[part], keys[part])
    return found.reshape(weights.shape[:-1])


def _race(weights: Float[Tensor, "rows vocab"], keys: Sequence[int]) -> Int[Tensor, " rows"]:
    u = _uniforms(keys, weights.shape, weights.device)
    rows = weights.double()
    shares = rows / rows.amax(-1, keepdim=True)  # a time over a subnormal weight would overflow
    return torch.log1p(-u).neg_().div_(shares).argmin(-1)


class NoiseRng:
    """An Rng whose categorical draws at one place of one seed share their noise, whoever asks and however often.

    Args:
        seeds: of each row.
        places: for each row the number of the output token that it draws. Weights [rows, n, vocab] are for this token
            and the n - 1 after it.
        purpose: of `bernoulli`, whose draws share nothing.
    """

    def __init__(self, seeds: Sequence[int], places: Sequence[int], purpose: Purpose) -> None:
        self._rows = list(zip(seeds, places, strict=True))
        self._decisions = CounterRng([fold(seed, purpose, place) for seed, place in self._rows])

    def bernoulli(self, prob: Float[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        """True with the given probabilities; independent of the noise."""
        return self._decisions.bernoulli(prob)

    def categorical(self, weights: Float[Tensor, "*rows vocab"]) -> Int[Tensor, "*rows"]:
        """The winners of the races at the rows' places; see `first_arrival`.

        Raises:
            ValueError: other weights than [rows, vocab] or [rows, n, vocab].
        """
        if weights.ndim not in (2, 3) or weights.shape[0] != len(self._rows):
            raise ValueError(
                f"weights: expected [rows, vocab] or [rows, places, vocab] with {len(self._rows)} rows, got "
                f"{tuple(weights.shape)}"
            )
        width = weights.shape[1] if weights.ndim == 3 else 1
        keys = [fold(seed, _NOISE, place + step) for seed, place in self._rows for step in range(width)]
        return first_arrival(weights, keys)


class NoiseRoundRng(RoundRng):
    """The RoundRng of rules with shared noise: a draw for a place has the same noise in every round and purpose.

    Args:
        seeds: of each row.
        places: for each row the number of output tokens that are committed.
    """

    def __init__(self, seeds: Sequence[int], places: Sequence[int]) -> None:
        self._rows = list(zip(seeds, places, strict=True))

    @override
    def at(self, purpose: Purpose, place: int = 0, rows: Sequence[int] | None = None) -> NoiseRng:
        """`place` counts from the first token of the round."""
        picked = self._rows if rows is None else [self._rows[row] for row in rows]
        return NoiseRng([seed for seed, _ in picked], [first + place for _, first in picked], purpose)


class SplitRng:
    """An Rng whose rows draw from several others.

    Args:
        parts: for each of them its rows here, in its own order; together all rows.
    """

    def __init__(self, parts: Sequence[tuple[Sequence[int], Rng]]) -> None:
        self._parts = parts

    def bernoulli(self, prob: Float[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        """Each row by its own Rng."""
        made = torch.zeros_like(prob, dtype=torch.bool)
        for rows, rng in self._parts:
            index = to_device(rows, prob.device)
            made[index] = rng.bernoulli(prob[index])
        return made

    def categorical(self, weights: Float[Tensor, "*rows vocab"]) -> Int[Tensor, "*rows"]:
        """Each row by its own Rng."""
        made = torch.zeros(weights.shape[:-1], dtype=torch.int64, device=weights.device)
        for rows, rng in self._parts:
            index = to_device(rows, weights.device)
            made[index] = rng.categorical(weights[index])
        return made


class SplitRoundRng(RoundRng):
    """The RoundRng of a batch whose requests draw in several ways.

    Args:
        parts: for each way its rows of the batch, and the RoundRng of these rows.
    """

    def __init__(self, parts: Sequence[tuple[Sequence[int], RoundRng]]) -> None:
        self._parts = [({row: place for place, row in enumerate(rows)}, rng) for rows, rng in parts]

    @override
    def at(self, purpose: Purpose, place: int = 0, rows: Sequence[int] | None = None) -> Rng:
        picked = sorted(row for own, _ in self._parts for row in own) if rows is None else rows
        parts: list[tuple[Sequence[int], Rng]] = []
        for own, rng in self._parts:
            here = [number for number, row in enumerate(picked) if row in own]
            if here:
                parts.append((here, rng.at(purpose, place, [own[picked[number]] for number in here])))
        return parts[0][1] if len(parts) == 1 else SplitRng(parts)


class TorchRng:
    """An Rng for callers without an engine: reproducible from one seed, for tensors of any shape.

    Args:
        seed: any integer.
        device: a label only; draws are made on the device of the argument.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self.seed = seed
        self.device = torch.device(device)
        self._calls = 0

    def _next(self, shape: Sequence[int], device: torch.device) -> Float[Tensor, "*shape"]:
        self._calls += 1
        return _uniforms([fold(self.seed, self._calls)], (1, *shape), device).squeeze(0)

    def bernoulli(self, prob: Float[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        """True with the given probabilities; never for 0 and always for 1."""
        return self._next(prob.shape, prob.device) < prob

    def categorical(self, weights: Float[Tensor, "*rows vocab"]) -> Int[Tensor, "*rows"]:
        """Inverse-CDF draws, one uniform for each row of weights."""
        return inverse_cdf(weights, self._next(weights.shape[:-1], weights.device))
