"""Cost of runs and rounds in time, and the draft length with the least time per token.

The model of SpecDec++ (arXiv 2405.19715) assumes that a forward pass takes the same time for any input, and that a
round of n drafted tokens takes n draft passes and one target pass. `RoundCosts` is more detailed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from draftproof.theory.lengths import iid_block_efficiency


@dataclass(frozen=True)
class PassCosts:
    """Seconds of one forward pass of the draft model and of the target."""

    draft: float
    target: float


@dataclass(frozen=True)
class RoundCosts:
    """Time of a round, in seconds or any other unit.

    A round with K drafts of n > 0 tokens takes `target` + `begin` + n (`draft` + (K - 1) `more` + K `token`), as if no
    two drafts had a token in common.

    Attributes:
        target: a round without a draft.
        draft: drafting one token.
        token: additional time of the target's pass and of the rule for one drafted token.
        more: additional time of drafting one token for each draft after the first.
        begin: additional time of a round with a draft of any length.
        shared: whether the requests of a round share its costs; here not, as the costs are those of one request.
    """

    shared: ClassVar[bool] = False

    target: float
    draft: float
    token: float = 0.0
    more: float = 0.0
    begin: float = 0.0

    def of(self, drafted: int, drafts: int = 1, most: float = math.inf) -> float:
        """Time of a round with `drafts` drafts of `drafted` tokens each, of which a request has at most `most`."""
        if not drafted:
            return self.target
        each = self.draft + (drafts - 1) * self.more + drafts * self.token
        return self.target + self.begin + drafted * each - max(drafts * drafted - most, 0.0) * self.token

    def at(self, rows: int) -> RoundCosts:  # noqa: ARG002
        """The same costs for any number of requests in a round."""
        return self


@dataclass(frozen=True)
class BatchCosts:
    """Costs of rounds for several numbers of requests.

    Attributes:
        sizes: the numbers of requests that were measured, ascending.
        costs: costs of a round for each of these numbers.
        shared: whether the requests of a round share its costs; here they do: a round is as wide as its widest draft,
            so it costs as much as if all drafts were that long.
    """

    shared: ClassVar[bool] = True
    sizes: tuple[int, ...]
    costs: tuple[RoundCosts, ...]

    def at(self, rows: int) -> RoundCosts:
        """Costs of a round of `rows` requests: interpolated between two sizes, constant outside them."""
        above = next((place for place, size in enumerate(self.sizes) if size >= rows), len(self.sizes) - 1)
        below = above if self.sizes[above] <= rows else max(above - 1, 0)
        few, many = self.costs[below], self.costs[above]
        if below == above:
            return many
        share = (rows - self.sizes[below]) / (self.sizes[above] - self.sizes[below])
        return RoundCosts(
            target=few.target + share * (many.target - few.target),
            draft=few.draft + share * (many.draft - few.draft),
            token=few.token + share * (many.token - few.token),
            more=few.more + share * (many.more - few.more),
            begin=few.begin + share * (many.begin - few.begin),
        )


def total_time(costs: PassCosts, drafted: int, target_calls: int) -> float:
    """Seconds of a run, T = t_draft N_draft + t_target N_target (SpecDec++, arXiv 2405.19715, equation (2.1))."""
    return costs.draft * drafted + costs.target * target_calls


def total_time_by_waste(costs: PassCosts, emitted: int, discarded: int, target_calls: int) -> float:
    """Seconds of a run, T = t_draft N + t_draft N_discarded + (t_target - t_draft) N_target.

    This is the time of `total_time`, because N_draft + N_target = N + N_discarded: every round emits its accepted
    tokens and one token of the target.

    Source: SpecDec++, arXiv 2405.19715, equation (2.2).
    """
    return costs.draft * (emitted + discarded) + (costs.target - costs.draft) * target_calls


def latency(costs: PassCosts, discard_rate: float, verification_rate: float) -> float:
    """Seconds per token from discard rate and verification rate (SpecDec++, arXiv 2405.19715, equation (2.3))."""
    return costs.draft * (1 + discard_rate) + (costs.target - costs.draft) * verification_rate


def time_per_token(costs: PassCosts, drafted: int, block_efficiency: float) -> float:
    """Seconds per token when rounds of `drafted` tokens emit `block_efficiency` tokens on average."""
    return (drafted * costs.draft + costs.target) / block_efficiency


def best_length(costs: PassCosts, block_efficiency: Callable[[int], float], longest: int = 64) -> int:
    """The constant draft length, 0 to `longest`, with the least time per token; the shortest of equals.

    `block_efficiency` gives the tokens emitted per round for a draft length.
    """
    return min(range(longest + 1), key=lambda n: time_per_token(costs, n, block_efficiency(n)))


def best_iid_length(costs: PassCosts, alpha: float, longest: int = 64) -> int:
    """`best_length` when tokens are accepted independently with probability alpha (Leviathan et al. 2023, 3.5)."""
    return best_length(costs, lambda n: iid_block_efficiency(alpha, n), longest)


def best_round_length(
    costs: RoundCosts, alpha: float, longest: int = 64, gain: float = 1.0, *, later: float | None = None
) -> int:
    """The draft length with the most tokens per second; 0 if this is not more than `gain` times plain decoding.

    The first token is accepted with probability alpha, and each later one with probability `later` if all tokens before
    it were accepted: 1 + alpha (1 + later + later^2 + ...) tokens per round. With equal probabilities this is i.i.d.
    acceptance.

    Args:
        costs: costs of a round.
        alpha: acceptance probability of the first drafted token.
        longest: the largest length to consider.
        gain: required speed relative to plain decoding.
        later: acceptance probability of a later token; None for alpha.
    """
    beyond = alpha if later is None else later
    return best_round(costs, {1: expected_tokens(alpha, beyond, longest)}, gain)[0]


def expected_tokens(first: float, later: float, longest: int = 64) -> tuple[float, ...]:
    """Expected tokens of a round with a draft of 0, 1, ..., `longest` tokens, from the two acceptance rates."""
    return (1.0, *(1 + first * iid_block_efficiency(later, n - 1) for n in range(1, longest + 1)))


def best_round(
    costs: RoundCosts, tokens: Mapping[int, Sequence[float]], gain: float = 1.0, most: float = math.inf
) -> tuple[int, int]:
    """The length and the number of drafts with the most tokens per second.

    It is (0, 1), plain decoding, if the best speed is not more than `gain` times that of plain decoding. Of equal
    speeds, the first number of drafts and the shorter length are chosen.

    Args:
        costs: costs of a round.
        tokens: for each number of drafts, the expected tokens of a round with drafts of 0, 1, 2, ... tokens, summed
            over the requests of the round.
        gain: required speed relative to plain decoding.
        most: drafted tokens of a request, on average.
    """
    best, highest = (0, 1), gain * next(iter(tokens.values()))[0] / costs.of(0)
    for drafts, sums in tokens.items():
        for n, made in enumerate(sums[1:], start=1):
            speed = made / costs.of(n, drafts, most)
            if speed > highest:
                best, highest = (n, drafts), speed
    return best
