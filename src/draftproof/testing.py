"""Tests for users' own drafters and rules: exact output distributions by enumeration, and models small enough for it.

`assert_lossless` checks that an engine has the target's output distribution. `exact_distribution` enumerates all
outcomes of any program whose only randomness is an Rng. `TableModel` is a target or draft model to run them on.
`EnumeratedNoise` enumerates draws that share noise, for rules such as `gumbel`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from draftproof.backends.base import Backend, Capabilities, Feed, FeedOutput, Session
from draftproof.engine.loop import DecodingLoop, RoundRngFactory
from draftproof.rng import Purpose, fold
from draftproof.sampling import SamplingParams, Transforms, probabilities

Outcome = TypeVar("Outcome", bound=Hashable)


class EnumeratingRng:
    """An Rng (and RoundRng) that follows a script of choices and records which choices were possible.

    `exact_distribution` runs a program once for every script; `weight` is the product of the probabilities of the
    choices. Only choices with a probability between 0 and 1 are part of a script, so impossible branches cost nothing.
    """

    def __init__(self, script: Sequence[int] = ()) -> None:
        self._script = tuple(script)
        self.weight = 1.0
        self.taken: list[int] = []
        self.options: list[tuple[int, ...]] = []

    def at(self, purpose: Purpose, place: int = 0, rows: Sequence[int] | None = None) -> EnumeratingRng:  # noqa: ARG002
        """The same object, for every purpose, place and row."""
        return self

    def choose(self, probs: Sequence[float]) -> int:
        """One index with these probabilities.

        Raises:
            ValueError: none is positive.
        """
        open_choices = tuple(i for i, prob in enumerate(probs) if prob > 0)
        if not open_choices:
            raise ValueError(f"a draw from weights without mass: {list(probs)}")
        if len(open_choices) == 1:
            self.weight *= probs[open_choices[0]]
            return open_choices[0]
        step = len(self.taken)
        choice = self._script[step] if step < len(self._script) else open_choices[0]
        self.taken.append(choice)
        self.options.append(open_choices)
        self.weight *= probs[choice]
        return choice

    def bernoulli(self, prob: Float[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        """Each element is a choice between no and yes."""
        flat = [bool(self.choose((1.0 - x, x))) for x in prob.double().flatten().tolist()]
        return torch.tensor(flat, dtype=torch.bool).reshape(prob.shape)

    def categorical(self, weights: Float[Tensor, "*rows vocab"]) -> Int[Tensor, "*rows"]:
        """Each row is a choice among the indices with weight; weights are normalised here."""
        rows = weights.double().reshape(-1, weights.shape[-1])
        flat = [self.choose((row / row.sum()).tolist()) for row in rows]
        return torch.tensor(flat, dtype=torch.int64).reshape(weights.shape[:-1])


_Point = tuple[float, float, float]
_TRIANGLE: tuple[_Point, ...] = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0))
_SLIVER = 1e-14  # a smaller share of the triangle is a rounding error


class EnumeratedNoise:
    """Shared noise (`draftproof.rng.NoiseRoundRng`) that follows an EnumeratingRng, for up to three tokens.

    Draws for one place share the times E_1, E_2, E_3 of exponential races: from weights w the token with the smallest
    E_x / w_x is drawn. Their directions E / (E_1 + E_2 + E_3) are uniform in a triangle. What earlier draws have shown
    of a place is a convex polygon in it, and a draw cuts this polygon into one for each token. So the probability of a
    token, given all earlier draws, is the ratio of two areas.

    Args:
        rng: makes the choices and collects their probabilities.
    """

    def __init__(self, rng: EnumeratingRng) -> None:
        self._rng = rng
        self._known: dict[tuple[int, int], tuple[_Point, ...]] = {}

    def round(self, seeds: Sequence[int], places: Sequence[int]) -> _NoiseOfRound:
        """A RoundRng, as the engine asks for it: the rows' seeds and their numbers of output tokens."""
        return _NoiseOfRound(self, list(zip(seeds, places, strict=True)))

    @property
    def decisions(self) -> EnumeratingRng:
        """The Rng of draws that share nothing."""
        return self._rng

    def draw(self, seed: int, place: int, weights: Sequence[float]) -> int:
        """The token that is first from these weights at a place; 0 where none has weight.

        Raises:
            ValueError: more than three tokens.
        """
        if len(weights) > len(_TRIANGLE):
            raise ValueError(f"shared noise: expected up to 3 tokens to enumerate, got {len(weights)}")
        if not any(weights):
            return 0
        known = self._known.get((seed, place), _TRIANGLE)
        parts = [_first(known, token, weights) for token in range(len(weights))]
        areas = [_area(part) for part in parts]
        areas = [area if area > _SLIVER else 0.0 for area in areas]
        token = self._rng.choose([area / sum(areas) for area in areas])
        self._known[seed, place] = parts[token]
        return token


class _NoiseOfRound:
    """The RoundRng of `EnumeratedNoise.round`, and its Rng."""

    def __init__(self, noise: EnumeratedNoise, rows: Sequence[tuple[int, int]]) -> None:
        self._noise = noise
        self._rows = rows

    def at(self, purpose: Purpose, place: int = 0, rows: Sequence[int] | None = None) -> _NoiseOfRound:  # noqa: ARG002
        picked = self._rows if rows is None else [self._rows[row] for row in rows]
        return _NoiseOfRound(self._noise, [(seed, first + place) for seed, first in picked])

    def bernoulli(self, prob: Float[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        return self._noise.decisions.bernoulli(prob)

    def categorical(self, weights: Float[Tensor, "*rows vocab"]) -> Int[Tensor, "*rows"]:
        wide = weights.double().reshape(len(self._rows), -1, weights.shape[-1]).tolist()
        found = [
            self._noise.draw(seed, place + step, row)
            for (seed, place), rows in zip(self._rows, wide, strict=True)
            for step, row in enumerate(rows)
        ]
        return torch.tensor(found, dtype=torch.int64).reshape(weights.shape[:-1])


def _first(polygon: tuple[_Point, ...], token: int, weights: Sequence[float]) -> tuple[_Point, ...]:
    """The part of a polygon in which a token is first: E_token / w_token is at most every other E_x / w_x."""
    if not weights[token]:
        return ()
    for other, weight in enumerate(weights):
        if other != token and weight:
            polygon = _cut(polygon, token, other, weights)
    return polygon


def _cut(polygon: tuple[_Point, ...], token: int, other: int, weights: Sequence[float]) -> tuple[_Point, ...]:
    """The part of a polygon with E_other w_token >= E_token w_other."""
    kept: list[_Point] = []
    above = [point[other] * weights[token] - point[token] * weights[other] for point in polygon]
    for at, point in enumerate(polygon):
        here, there, before = above[at - 1], above[at], polygon[at - 1]
        if (here >= 0) != (there >= 0):
            share = here / (here - there)
            x, y, z = (a + share * (b - a) for a, b in zip(before, point, strict=True))
            kept.append((x, y, z))
        if there >= 0:
            kept.append(point)
    return tuple(kept)


def _area(polygon: tuple[_Point, ...]) -> float:
    """The area of a polygon in the triangle, as a share of the whole."""
    return abs(math.fsum(polygon[i - 1][0] * y - x * polygon[i - 1][1] for i, (x, y, _) in enumerate(polygon)))


def exact_distribution(program: Callable[[EnumeratingRng], Outcome]) -> dict[Outcome, float]:
    """The probability of every outcome of a program, by running it once for each sequence of choices.

    Args:
        program: takes an EnumeratingRng and returns a hashable value; it must be deterministic apart from the Rng.
    """
    found: dict[Outcome, float] = {}
    script: tuple[int, ...] | None = ()
    while script is not None:
        rng = EnumeratingRng(script)
        outcome = program(rng)
        found[outcome] = found.get(outcome, 0.0) + rng.weight
        script = next_script(rng.taken, rng.options)
    return found


def next_script(taken: Sequence[int], options: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The script after the one just run, in depth-first order; None after the last one."""
    for step in range(len(taken) - 1, -1, -1):
        place = options[step].index(taken[step])
        if place + 1 < len(options[step]):
            return (*taken[:step], options[step][place + 1])
    return None


def total_variation(first: Mapping[Outcome, float], second: Mapping[Outcome, float]) -> float:
    """Half the sum of absolute differences between two distributions; a missing outcome has probability 0."""
    return 0.5 * sum(abs(first.get(key, 0.0) - second.get(key, 0.0)) for key in {*first, *second})


class TableModel:
    """A backend with a table of next-token distributions, one random row for each context, in float64.

    Args:
        vocab: number of tokens.
        seed: seed of the rows; two models with the same arguments are equal.
        order: how many of the last tokens a row depends on.
        zeros: probability that an entry of a row is 0 (at least one entry is positive).
        sharpness: a larger number makes rows more peaked.
        rows: explicit rows by context (the last `order` tokens); all other rows are random.
        max_positions: longest sequence in tokens, None for no limit.
        hidden: width of its random hidden states, 0 for none; they depend on the same tokens as the rows.
        predicts: whether it predicts acceptance: at random, from the same tokens.
    """

    def __init__(
        self,
        vocab: int,
        seed: int,
        *,
        order: int = 3,
        zeros: float = 0.0,
        sharpness: float = 2.0,
        rows: Mapping[tuple[int, ...], Sequence[float]] | None = None,
        max_positions: int | None = None,
        hidden: int = 0,
        predicts: bool = False,
    ) -> None:
        self.name = f"table:{seed}"
        self.vocab_size = vocab
        self.max_positions = max_positions
        self.device = torch.device("cpu")
        self.capabilities = Capabilities(trees=True, hidden=hidden, predicts=predicts)
        self.rounding = ""
        self._seed = seed
        self._order = order
        self._zeros = zeros
        self._sharpness = sharpness
        given = (rows or {}).items()
        self._rows = {context: torch.tensor(row, dtype=torch.float64).log() for context, row in given}

    def logits(self, context: Sequence[int]) -> Float[Tensor, " vocab"]:
        """Log-probabilities of the next token after a context."""
        key = self._key(context)
        if key not in self._rows:
            self._rows[key] = self._random_row(key)
        return self._rows[key]

    def _key(self, context: Sequence[int]) -> tuple[int, ...]:
        return tuple(context[-self._order :]) if self._order else ()

    def _random_row(self, key: tuple[int, ...]) -> Float[Tensor, " vocab"]:
        source = torch.Generator().manual_seed(fold(self._seed, *key) >> 1)
        row = torch.rand(self.vocab_size, dtype=torch.float64, generator=source) ** self._sharpness
        gone = torch.rand(self.vocab_size, generator=source) < self._zeros
        gone[int(row.argmax())] = False
        row[gone] = 0
        return (row / row.sum()).log()

    def open(self) -> Session:
        """A session that stores tokens only."""
        return Session()

    def forward(self, feeds: Sequence[Feed], *, hidden: bool = False) -> list[FeedOutput]:
        """Rows of the table after the last token of the chain and after each node."""
        assert self.capabilities.hidden or not hidden, "this table has no hidden states"
        return [self._read(feed, hidden=hidden) for feed in feeds]

    def state(self, context: Sequence[int]) -> Float[Tensor, " dim"]:
        """The hidden state after a context, [hidden]: standard normal numbers."""
        source = torch.Generator().manual_seed(fold(self._seed, 1, *self._key(context)) >> 1)
        return torch.randn(self.capabilities.hidden, generator=source)

    def prediction(self, context: Sequence[int]) -> Float[Tensor, ""]:
        """The predicted probability that the token after a context is accepted: uniform in [0, 1]."""
        source = torch.Generator().manual_seed(fold(self._seed, 2, *self._key(context)) >> 1)
        return torch.rand((), generator=source)

    def _read(self, feed: Feed, *, hidden: bool) -> FeedOutput:
        session, chain = feed.session, torch.as_tensor(feed.tokens, dtype=torch.int64).reshape(-1)
        known = len(session.tail)
        session.read(chain, feed.tree)
        stem, tail = session.tokens[: session.stem], session.tokens[session.stem :]
        contexts = [stem] if chain.shape[0] else []
        paths = [self._path(session.tail, node) for node in range(known, len(tail))]
        contexts.extend([*stem, *(tail[place] for place in path)] for path in paths)
        states = torch.stack([self.state(context) for context in contexts]) if hidden else None
        predicts = self.capabilities.predicts
        accepted = torch.stack([self.prediction(context) for context in contexts]) if predicts else None
        return FeedOutput(torch.stack([self.logits(context) for context in contexts]), states, accepted=accepted)

    @staticmethod
    def _path(parents: Sequence[int], node: int) -> list[int]:
        path: list[int] = []
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        return path


def target_distribution(
    target: TableModel, prompt: Sequence[int], params: SamplingParams, eos_token_ids: Sequence[int] = ()
) -> dict[tuple[int, ...], float]:
    """The distribution of whole outputs when every token is sampled from the target, without an engine.

    Args:
        target: any object with `logits(context)` and `vocab_size`.
        prompt: token ids.
        params: sampling parameters; `max_tokens` bounds the enumeration, and stop strings are ignored.
        eos_token_ids: tokens that end an output.

    Returns:
        the probability of each output, a tuple of token ids.
    """
    transforms = params.bind(vocab_size=target.vocab_size, eos_token_ids=eos_token_ids, prompt_ids=prompt)
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    found: dict[tuple[int, ...], float] = {}
    open_ends: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while open_ends:
        output, weight = open_ends.pop()
        for token, prob in enumerate(_next_row(target, prompt, output, transforms)):
            longer = (*output, token)
            if prob > 0 and (len(longer) == params.max_tokens or token in ends):
                found[longer] = found.get(longer, 0.0) + weight * prob
            elif prob > 0:
                open_ends.append((longer, weight * prob))
    return found


def _next_row(target: TableModel, prompt: Sequence[int], output: Sequence[int], transforms: Transforms) -> list[float]:
    logits = target.logits([*prompt, *output]).unsqueeze(0)
    row: list[float] = probabilities(logits, transforms, output, [()])[0].tolist()
    return row


def engine_distribution(
    make_engine: Callable[[RoundRngFactory], DecodingLoop], prompt: Sequence[int], params: SamplingParams
) -> dict[tuple[int, ...], float]:
    """The distribution of whole outputs of an engine, by enumerating every outcome of every random draw.

    Args:
        make_engine: builds a new engine with the given source of randomness.
        prompt: token ids.
        params: sampling parameters of the request.

    Raises:
        ValueError: the rule shares noise, and the models have more than three tokens.

    Returns:
        the probability of each output, a tuple of token ids.
    """

    def program(rng: EnumeratingRng) -> tuple[int, ...]:
        noise = EnumeratedNoise(rng)
        engine = make_engine(
            lambda seeds, numbers: noise.round(seeds, numbers) if engine.verifier.shared_noise else rng  # one script
        )
        return engine.generate([list(prompt)], params)[0].token_ids

    return exact_distribution(program)


def assert_lossless(
    make_engine: Callable[[RoundRngFactory], DecodingLoop],
    *,
    prompt: Sequence[int] = (0,),
    params: SamplingParams | None = None,
    tolerance: float = 1e-12,
) -> None:
    """Assert that an engine whose target is a TableModel has exactly the target's output distribution.

    Args:
        make_engine: builds a new engine with the given source of randomness; its target must be a TableModel.
        prompt: token ids.
        params: sampling parameters of the request; keep max_tokens at 5 or less, as the time is exponential in it.
        tolerance: largest total variation that passes.

    Raises:
        AssertionError: the distributions differ; with the total variation and the worst output.
    """
    params = params or SamplingParams(max_tokens=3)
    probe = make_engine(lambda seeds, rounds: EnumeratingRng())  # noqa: ARG005 - never drawn from
    target: Backend = probe.target
    assert isinstance(target, TableModel), f"the target is {target.name}: exact distributions need a TableModel"
    expected = target_distribution(target, prompt, params, probe.eos_token_ids)
    found = engine_distribution(make_engine, prompt, params)
    distance = total_variation(found, expected)
    worst = max({*found, *expected}, key=lambda output: abs(found.get(output, 0.0) - expected.get(output, 0.0)))
    assert distance < tolerance, (
        f"total variation {distance:.3g} from the target's distribution; worst output {worst}: "
        f"{found.get(worst, 0.0):.6g} instead of {expected.get(worst, 0.0):.6g}"
    )
