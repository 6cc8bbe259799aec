"""Speculative sampling on one page, in plain loops: read this first; also a reference for functional/chain.py.

A draft x_1..x_n was drawn from q_1..q_n, each given the tokens before it. p_1..p_{n+1} are the target's distributions
at the same positions and after the last token. Both rules return how many drafted tokens are accepted, and the token
that follows them. The distribution of these tokens is exactly that of sampling from p.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Row = Sequence[float]
Uniform = Callable[[], float]


def residual(p: Row, q: Row, scale: float) -> list[float]:
    """Weights max(scale p - q, 0), the mass of p that the draft has not covered; p where all of them are 0."""
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
    """min(1, p/q) of each drafted token: its acceptance probability, given that all tokens before it were accepted.

    Source: Block Verification, arXiv 2403.10444, Algorithm 1.
    """
    return [min(1.0, p[i][x] / q[i][x]) for i, x in enumerate(tokens)]


def block_acceptance(tokens: Sequence[int], q: Sequence[Row], p: Sequence[Row]) -> tuple[list[float], list[float]]:
    """P_i = min(1, P_{i-1} p/q), and the probability h_i that the prefix of length i passes its test.

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
    """Token verification: stop at the first rejection and draw from the residual there.

    Returns:
        the number of accepted tokens, and the token after them.
    """
    for i, accept in enumerate(token_acceptance(tokens, q, p)):
        if not uniform() < accept:
            return i, draw(residual(p[i], q[i], 1.0), uniform)
    return len(tokens), draw(p[-1], uniform)


def block_verify(tokens: Sequence[int], q: Sequence[Row], p: Sequence[Row], uniform: Uniform) -> tuple[int, int]:
    """Block verification: test every prefix and keep the longest one that passes; its P scales the residual.

    Returns:
        the number of accepted tokens, and the token after them.
    """
    running, passes = block_acceptance(tokens, q, p)
    kept = max((i + 1 for i, h in enumerate(passes) if uniform() < h), default=0)
    if kept == len(tokens):
        return kept, draw(p[-1], uniform)
    return kept, draw(residual(p[kept], q[kept], running[kept - 1] if kept else 1.0), uniform)
