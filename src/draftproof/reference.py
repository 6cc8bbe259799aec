"""Speculative sampling on one page, in plain loops: the page to read first, and the slow twin of functional/chain.py.

Knows: one draft chain, its q, the target's p. Does not know: batches, models, speed.

A draft x_1..x_n was drawn from q_1..q_n (each given what precedes it); p_1..p_{n+1} are the target's distributions at
the same places and after the last token. Both rules return how many drafted tokens are kept, and the token that follows
them; the tokens that come out have exactly the law of sampling from p alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Row = Sequence[float]
Uniform = Callable[[], float]


def residual(p: Row, q: Row, scale: float) -> list[float]:
    """norm(max(scale p - q, 0)): what the draft has not served yet; p itself where nothing is left."""
    rest = [max(scale * a - b, 0.0) for a, b in zip(p, q, strict=True)]
    return rest if sum(rest) > 0 else list(p)


def draw(weights: Row, uniform: Uniform) -> int:
    """An index with probability proportional to its weight."""
    goal = uniform() * sum(weights)
    running = 0.0
    for index, weight in enumerate(weights):
        running += weight
        if goal < running:
            return index
    return max(index for index, weight in enumerate(weights) if weight > 0)


def token_acceptance(tokens: Sequence[int], q: Sequence[Row], p: Sequence[Row]) -> list[float]:
    """min(1, p/q) of each drafted token: each is accepted if all before it were.

    Source: Block Verification, arXiv 2403.10444, Algorithm 1.
    """
    return [min(1.0, p[i][x] / q[i][x]) for i, x in enumerate(tokens)]


def block_acceptance(tokens: Sequence[int], q: Sequence[Row], p: Sequence[Row]) -> tuple[list[float], list[float]]:
    """P_i = min(1, P_{i-1} p/q), and h_i with which the prefix of length i passes.

    Source: Block Verification, arXiv 2403.10444, Algorithm 2.
    """
    running, passes, level = [], [], 1.0
    for i, x in enumerate(tokens):
        level = min(1.0, level * p[i][x] / q[i][x])
        running.append(level)
        if i + 1 == len(tokens):
            passes.append(level)
            continue
        surplus = sum(max(level * a - b, 0.0) for a, b in zip(p[i + 1], q[i + 1], strict=True))
        passes.append(1.0 if level == 1.0 else surplus / (surplus + 1.0 - level))
    return running, passes


def token_verify(tokens: Sequence[int], q: Sequence[Row], p: Sequence[Row], uniform: Uniform) -> tuple[int, int]:
    """Token verification: stop at the first refusal, and draw there from what the draft left over."""
    for i, accept in enumerate(token_acceptance(tokens, q, p)):
        if not uniform() < accept:
            return i, draw(residual(p[i], q[i], 1.0), uniform)
    return len(tokens), draw(p[-1], uniform)


def block_verify(tokens: Sequence[int], q: Sequence[Row], p: Sequence[Row], uniform: Uniform) -> tuple[int, int]:
    """Block verification: test every prefix, keep the longest that passes; P at that place scales the residual."""
    running, passes = block_acceptance(tokens, q, p)
    kept = max((i + 1 for i, h in enumerate(passes) if uniform() < h), default=0)
    if kept == len(tokens):
        return kept, draw(p[-1], uniform)
    return kept, draw(residual(p[kept], q[kept], running[kept - 1] if kept else 1.0), uniform)
