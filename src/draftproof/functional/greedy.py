"""Greedy block verification, and the modified target that keeps its output distribution exact over several rounds.

One round of the greedy rule accepts with the unclipped joint ratio. Later rounds correct the output distribution: after
a round of n drafted tokens that emitted tau + 1 tokens, the next n - tau - 1 tokens must come from
norm(max(r p - q, 0)), where r is the joint ratio p/q of all tokens emitted since the start of that round. These
n - tau - 1 positions are called a window. Later rounds verify against the modified target of the open windows, and may
open windows of their own: `GreedyState` lists them, oldest first. Every round runs

    target = modified_target(state, p, q, tokens)
    verdict = greedy_block_verify(tokens, q, target.rows, rng=rng)
    state = advance(state, target, q, tokens, verdict)

Inside a window the rule needs the draft model's q at that context: the rows of q of the drafted positions. At the start
of a round a window has at most n - 1 positions left. So the bonus token, at position n, is never inside a window, as
long as every round drafts n tokens (or at least as many as the longest window has left).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.functional.chain import ChainVerdict, log_ratios, row_lengths
from draftproof.functional.checks import check_chain
from draftproof.rng import Rng


@dataclass(frozen=True, eq=False)
class GreedyState:
    """The open windows of each row, oldest first; a window is open for less than n rounds, so L = n - 1 is enough.

    Attributes:
        remaining: positions of the window that are still to come; 0 for a closed window.
        log_r: log joint ratio of the window's own target to q, over the tokens emitted since its round began.
    """

    remaining: Int[Tensor, "B L"]
    log_r: Float[Tensor, "B L"]

    @classmethod
    def fresh(cls, rows: int, drafted: int, device: torch.device | str = "cpu") -> GreedyState:
        """The state at the start of a request, with no open window, for rounds of `drafted` tokens."""
        shape = (rows, max(drafted - 1, 0))
        return cls(
            torch.zeros(shape, dtype=torch.int64, device=device), torch.zeros(shape, dtype=torch.float64, device=device)
        )

    def rows(self, index: Int[Tensor, " b"]) -> GreedyState:
        """The state of some rows, in that order."""
        return GreedyState(self.remaining[index], self.log_r[index])

    @classmethod
    def stack(cls, states: list[GreedyState]) -> GreedyState:
        """The states of several requests as one batch."""
        return cls(torch.cat([s.remaining for s in states]), torch.cat([s.log_r for s in states]))


class ModifiedTarget(NamedTuple):
    """The target of a round.

    Attributes:
        rows: the modified target before each drafted token and after the last one.
        layers: for each window, oldest first, the target before this window was applied; layers[0] is the model's p.
        log_r: for each window, the log joint ratio at the context of each row.
    """

    rows: Float[Tensor, "B m V"]
    layers: tuple[Float[Tensor, "B m V"], ...]
    log_r: Float[Tensor, "B L m"]


def _difference(
    p: Float[Tensor, "*rows V"], q: Float[Tensor, "*rows V"], log_r: Float[Tensor, "*rows"]
) -> Float[Tensor, "*rows V"]:
    """r p - q times a positive factor that keeps it finite for every r from 0 to infinity."""
    scale_p, scale_q = log_r.clamp(max=0).exp(), (-log_r).clamp(max=0).exp()
    return p * scale_p.to(p.dtype).unsqueeze(-1) - q * scale_q.to(q.dtype).unsqueeze(-1)


def _surplus(
    p: Float[Tensor, "*rows V"], q: Float[Tensor, "*rows V"], log_r: Float[Tensor, "*rows"]
) -> Float[Tensor, "*rows V"]:
    """norm(max(r p - q, 0)); p where this has no mass (a context that the target never reaches)."""
    weights = _difference(p, q, log_r).clamp_(min=0)
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total.masked_fill(total <= 0, 1), p)


def modified_target(
    state: GreedyState, p: Float[Tensor, "B m V"], q: Float[Tensor, "B n V"], tokens: Int[Tensor, "B n"]
) -> ModifiedTarget:
    """The target that this round must verify against: the windows applied to p one after another, oldest first.

    The last row is never modified (see the module's docstring).

    Args:
        state: the windows that are open at the start of the round.
        p: the model's distribution before each drafted token and after the last one.
        q: the draft model's distribution before each drafted token.
        tokens: the drafted tokens; each window's ratio is continued along them.

    Source: Block Verification, arXiv 2403.10444, Algorithms 5 and 6.
    """
    n = tokens.shape[1]
    place = torch.arange(n, device=tokens.device)
    rows, layers, ratios = p, [], []
    for level in range(state.remaining.shape[1]):
        steps = log_ratios(tokens, q, rows).cumsum(-1)
        log_r = state.log_r[:, level : level + 1] + torch.cat([torch.zeros_like(steps[:, :1]), steps], -1)
        log_r = log_r.nan_to_num(-math.inf, math.inf, -math.inf)  # after a token with p = 0: never reached
        inside = place < state.remaining[:, level : level + 1]
        head = torch.where(inside.unsqueeze(-1), _surplus(rows[:, :n], q, log_r[:, :n]), rows[:, :n])
        layers.append(rows)
        ratios.append(log_r)
        rows = torch.cat([head, rows[:, n:]], 1)
    none = state.log_r.new_zeros(tokens.shape[0], 0, n + 1)
    return ModifiedTarget(rows, tuple(layers), torch.stack(ratios, 1) if ratios else none)


def _ratio_after(
    rows: Float[Tensor, "B m V"], q: Float[Tensor, "B n V"], log_r: Float[Tensor, "B m"], verdict: ChainVerdict
) -> Float[Tensor, " B"]:
    """log r after the accepted tokens and the bonus token; after a full chain, where q is not known, it is not used."""
    at = torch.arange(rows.shape[0], device=rows.device)
    place = verdict.accepted.clamp(max=q.shape[1] - 1)
    step = rows[at, place, verdict.token].double().log() - q[at, place, verdict.token].double().log()
    return log_r[at, verdict.accepted] + step


def advance(
    state: GreedyState,
    target: ModifiedTarget,
    q: Float[Tensor, "B n V"],
    tokens: Int[Tensor, "B n"],
    verdict: ChainVerdict,
) -> GreedyState:
    """The state after a round: open windows get shorter by the emitted tokens, and a new window opens.

    The new window covers the drafted positions that were not reached. The oldest entry is dropped: a window that
    entered the list n - 1 rounds ago is closed.

    Args:
        state: the state that `modified_target` was given.
        target: what `modified_target` returned.
        q: the rows of q of this round.
        tokens: the drafted tokens of this round.
        verdict: the outcome of this round; all its tokens count as emitted.
    """
    n = tokens.shape[1]
    if state.remaining.shape[1] == 0:
        return state
    emitted = (verdict.accepted + 1).unsqueeze(-1)
    start = log_ratios(tokens, q, target.rows).cumsum(-1)
    fresh = _ratio_after(target.rows, q, torch.cat([torch.zeros_like(start[:, :1]), start], -1), verdict)
    moved = [_ratio_after(rows, q, target.log_r[:, i], verdict) for i, rows in enumerate(target.layers)]
    remaining = torch.cat([(state.remaining - emitted).clamp_(min=0), (n - emitted).clamp_(min=0)], -1)
    log_r = torch.stack([*moved, fresh], -1).masked_fill(remaining == 0, 0)
    return GreedyState(remaining[:, 1:], log_r[:, 1:])


def greedy_acceptance(
    tokens: Int[Tensor, "B n"], q: Float[Tensor, "B n V"], p: Float[Tensor, "B m V"], lengths: Int[Tensor, " B"]
) -> tuple[Float[Tensor, "B n+1"], Float[Tensor, "B n"]]:
    """log r_i for i = 0..n and h_i for i = 1..n.

    h_i = min(1, sum max(r_i p - q, 0) / sum max(q - r_i p, 0)), and min(1, r) at a row's length. Where both sums are
    0, a longer prefix is accepted with certainty, and 1 is used.

    Source: Block Verification, arXiv 2403.10444, Algorithm 4.
    """
    n = tokens.shape[1]
    log_r = log_ratios(tokens, q, p).cumsum(-1)
    place = torch.arange(1, n + 1, device=tokens.device)
    h = torch.where(place == lengths.unsqueeze(-1), log_r.clamp(max=0).exp(), torch.zeros_like(log_r))
    if n > 1:
        gap = _difference(p[:, 1:n], q[:, 1:], log_r[:, :-1])
        total = gap.sum(-1, dtype=torch.float64)
        surplus = gap.clamp_(min=0).sum(-1, dtype=torch.float64)
        deficit = (surplus - total).clamp_(min=0)
        inner = torch.where(deficit > 0, (surplus / deficit).clamp(max=1), 1)
        h[:, :-1] = torch.where(place[:-1] < lengths.unsqueeze(-1), inner, h[:, :-1])
    return torch.cat([torch.zeros_like(log_r[:, :1]), log_r], -1) if n else log_r.new_zeros(tokens.shape[0], 1), h


def greedy_block_verify(
    tokens: Int[Tensor, "B n"],
    q: Float[Tensor, "B n V"],
    p: Float[Tensor, "B n+1 V"],
    *,
    rng: Rng,
    lengths: Int[Tensor, " B"] | None = None,
    validate: bool = True,
) -> ChainVerdict:
    """One round of greedy block verification: Pr(at least i accepted | x) = min(1, r_i), r_i the unclipped joint ratio.

    It is lossless only together with `modified_target` and `advance`: after the bonus token, the next n - accepted - 1
    tokens must come from the modified target. It accepts more than block verification in a single round, and less over
    many rounds (Block Verification, arXiv 2403.10444, table 4). p is the target of this round,
    `modified_target(...).rows`; other arguments and errors are those of `draftproof.functional.token_verify`.

    Source: Block Verification, arXiv 2403.10444, Algorithm 4; Block Verification v1, arXiv 2403.10444v1, Algorithm 3.
    """
    if validate:
        check_chain(tokens, q, p, lengths)
    n = tokens.shape[1]
    size = row_lengths(tokens, lengths)
    log_r, h = greedy_acceptance(tokens, q, p, size)
    at = torch.arange(tokens.shape[0], device=tokens.device)
    if n == 0:
        return ChainVerdict(torch.zeros_like(size), rng.categorical(p[:, 0]))
    accepted = (rng.bernoulli(h) * torch.arange(1, n + 1, device=tokens.device)).amax(-1)
    weights = p[at, accepted]
    residual = _surplus(weights, q[at, accepted.clamp(max=n - 1)], log_r[at, accepted])
    return ChainVerdict(accepted, rng.categorical(torch.where((accepted < size).unsqueeze(-1), residual, weights)))
