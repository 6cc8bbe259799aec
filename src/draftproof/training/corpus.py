"""Streams of tokens from texts, and windows of them: the batches of models that are trained on text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from draftproof.errors import UserError
from draftproof.rng import fold


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Texts one after another (`ids`), with the end token before each text (at `starts`) and after the last one."""

    ids: Int[Tensor, " tokens"]
    starts: Int[Tensor, " texts"]

    def window(self, length: int, generator: torch.Generator) -> Int[Tensor, " length"]:
        """Tokens from a random position, or from the beginning of its text if that is less than a window away."""
        place = int(torch.randint(len(self.ids) - length + 1, (1,), generator=generator))
        start = int(self.starts[int(torch.searchsorted(self.starts, place, right=True)) - 1])
        if place - start < length:
            place = min(start, len(self.ids) - length)
        return self.ids[place : place + length].long()


def stream(rows: Sequence[Sequence[int]], end: int, *, length: int) -> TokenStream:
    """The stream of texts, given without end tokens, from which windows of `length` tokens will be cut."""
    flat: list[int] = []
    starts = []
    for row in rows:
        starts.append(len(flat))
        flat += [end, *row]
    flat.append(end)
    if len(flat) < length:
        raise UserError(f"texts: expected at least one window of {length} tokens, got {len(flat)} (give more text)")
    return TokenStream(torch.tensor(flat, dtype=torch.int32), torch.tensor(starts))


@dataclass(frozen=True, eq=False)
class Batches:
    """The batch of each step, a pure function of (seed, step): `rows` windows of `length` tokens.

    The share of `background`, other text in the same language, falls linearly from twice `share` to 0 over `steps`;
    where `share` is above one half, it falls from 1 to 2 `share` - 1.
    """

    main: TokenStream
    background: TokenStream | None
    share: float
    rows: int
    length: int
    steps: int
    seed: int

    def __call__(self, step: int) -> Int[Tensor, "rows length"]:
        """The windows of a step."""
        generator = torch.Generator().manual_seed(fold(self.seed, 8, step) >> 1)
        first, last = min(2 * self.share, 1.0), max(2 * self.share - 1, 0.0)
        other = torch.rand(self.rows, generator=generator) < first + (last - first) * step / self.steps
        return torch.stack([self._source(bool(one)).window(self.length, generator) for one in other])

    def _source(self, background: bool) -> TokenStream:
        return self.background if background and self.background is not None else self.main


def held_out(
    rows: Sequence[Sequence[int]], end: int, *, length: int, tokens: int
) -> tuple[Int[Tensor, "windows length"], int]:
    """Complete texts one after another, in windows that overlap by one token, so that each token is predicted once.

    Texts, given without end tokens, are taken until there are `tokens` tokens. The last window is padded with -1.
    Returns the windows and the number of texts in them.
    """
    flat: list[int] = []
    taken = 0
    for row in rows:
        if len(flat) >= tokens:
            break
        flat += [end, *row]
        taken += 1
    flat.append(end)
    step = length - 1
    windows = [flat[at : at + length] for at in range(0, len(flat) - 1, step)]
    return torch.tensor([[*window, *[-1] * (length - len(window))] for window in windows]), taken
