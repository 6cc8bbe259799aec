"""What a run costs: SpecDec++'s model of time, and the best constant draft length under it.

Knows: counts and seconds. Does not know: models. It assumes that one forward pass takes the same time whatever it
reads, and that a round of n drafted tokens takes n draft passes and one target pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from draftproof.theory.lengths import iid_block_efficiency


@dataclass(frozen=True)
class PassCosts:
    """Seconds of one forward pass.

    Attributes:
        draft: of the draft model.
        target: of the target model.
    """

    draft: float
    target: float


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of a round, or any multiple of them: `target`, and `begin` + n (`draft` + (K - 1) `more` + K `token`).

    The latter is for K drafts of n > 0 tokens, as if they had no token in common.

    Attributes:
        target: of a round without a draft.
        draft: of drafting a token.
        token: what a drafted token adds to the target's pass and to the rule.
        more: what drafting takes longer for each further draft.
        begin: what a round with a draft takes longer whatever its length.
        shared: whether requests that share a round are one another's cost: here each has a round of its own.
    """

    shared: ClassVar[bool] = False

    target: float
    draft: float
    token: float = 0.0
    more: float = 0.0
    begin: float = 0.0

    def of(self, drafted: int, drafts: int = 1) -> float:
        """Of a round with that many drafts of that many tokens."""
        if not drafted:
            return self.target
        return self.target + self.begin + drafted * (self.draft + (drafts - 1) * self.more + drafts * self.token)

    def at(self, rows: int) -> RoundCosts:  # noqa: ARG002
        """The same for any number of requests that share a round."""
        return self


@dataclass(frozen=True)
class BatchCosts:
    """Costs of rounds by how many requests share them.

    Attributes:
        sizes: numbers of requests that were measured, ascending.
        costs: of a round, for each of them.
        shared: a round is as wide as its widest draft, and so costs what it costs if all drafts were as long.
    """

    shared: ClassVar[bool] = True
    sizes: tuple[int, ...]
    costs: tuple[RoundCosts, ...]

    def at(self, rows: int) -> RoundCosts:
        """Costs of a round of that many requests: on the line between two sizes, beyond the ends those of the end."""
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
    """T = t_draft N_draft + t_target N_target (SpecDec++, arXiv 2405.19715, equation (2.1))."""
    return costs.draft * drafted + costs.target * target_calls


def total_time_by_waste(costs: PassCosts, emitted: int, discarded: int, target_calls: int) -> float:
    """T = t_draft N + t_draft N_discarded + (t_target - t_draft) N_target (SpecDec++, equation (2.2)).

    The same time, since N_draft + N_target = N + N_discarded: every round emits its accepted tokens and one from the
    target.
    """
    return costs.draft * (emitted + discarded) + (costs.target - costs.draft) * target_calls


def latency(costs: PassCosts, discard_rate: float, verification_rate: float) -> float:
    """Seconds a token from the discard rate and the verification rate (SpecDec++, arXiv 2405.19715, equation (2.3))."""
    return costs.draft * (1 + discard_rate) + (costs.target - costs.draft) * verification_rate


def time_per_token(costs: PassCosts, drafted: int, block_efficiency: float) -> float:
    """Seconds a token when rounds of `drafted` tokens emit `block_efficiency` on average."""
    return (drafted * costs.draft + costs.target) / block_efficiency


def best_length(costs: PassCosts, block_efficiency: Callable[[int], float], longest: int = 64) -> int:
    """The constant draft length, 0 to `longest`, with the least time a token; the shortest of equals.

    Args:
        costs: seconds of the two passes.
        block_efficiency: tokens emitted a round as a function of the draft length.
        longest: the largest length to consider.
    """
    return min(range(longest + 1), key=lambda n: time_per_token(costs, n, block_efficiency(n)))


def best_iid_length(costs: PassCosts, alpha: float, longest: int = 64) -> int:
    """`best_length` when every token is accepted with probability alpha by itself (Leviathan et al. 2023, 3.5)."""
    return best_length(costs, lambda n: iid_block_efficiency(alpha, n), longest)


def best_round_length(
    costs: RoundCosts, alpha: float, longest: int = 64, gain: float = 1.0, *, later: float | None = None
) -> int:
    """The draft length with the most tokens a second; 0 unless that is over `gain` times plain decoding.

    The first token is accepted with probability alpha and each further one with probability `later`, the earlier ones
    being accepted: 1 + alpha (1 + later + later^2 + ...) tokens a round; i.i.d. acceptance where both are equal.

    Args:
        costs: of a round.
        alpha: probability that the first drafted token is accepted.
        longest: the largest length to consider.
        gain: speed over plain decoding that is asked of a draft.
        later: probability that a further one is; without it alpha.
    """
    beyond = alpha if later is None else later
    return best_round(costs, {1: expected_tokens(alpha, beyond, longest)}, gain)[0]


def expected_tokens(first: float, later: float, longest: int = 64) -> tuple[float, ...]:
    """Tokens of a round with a draft of 0, 1, 2, ... tokens: the first is accepted at one rate, others at another."""
    return (1.0, *(1 + first * iid_block_efficiency(later, n - 1) for n in range(1, longest + 1)))


def best_round(costs: RoundCosts, tokens: Mapping[int, Sequence[float]], gain: float = 1.0) -> tuple[int, int]:
    """The length and the number of drafts with the most tokens a second; (0, 1) unless that is over `gain` times plain.

    Args:
        costs: of a round.
        tokens: for every number of drafts what drafts of 0, 1, 2, ... tokens yield, summed over the requests that share
            the round; of equals the first, and the shorter draft.
        gain: speed over plain decoding that is asked of a draft.
    """
    best, most = (0, 1), gain * next(iter(tokens.values()))[0] / costs.of(0)
    for drafts, sums in tokens.items():
        for n, made in enumerate(sums[1:], start=1):
            speed = made / costs.of(n, drafts)
            if speed > most:
                best, most = (n, drafts), speed
    return best
