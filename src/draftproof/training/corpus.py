"""Texts as streams of tokens, and windows of them: the batches of models that are trained on text.

Knows: where texts begin, which share of a batch is background. Does not know: files, models, losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from draftproof.errors import UserError
from draftproof.rng import fold


@dataclass(frozen=True, eq=False)
class Stream:
    """Texts one after another, the end token before each and after the last.

    Attributes:
        ids: the tokens.
        starts: for each text the place of the end token before it.
    """

    ids: Int[Tensor, " tokens"]
    starts: Int[Tensor, " texts"]

    def window(self, length: int, generator: torch.Generator) -> Int[Tensor, " length"]:
        """Tokens from a random place on, or from the beginning of the text there if that is in reach.

        So texts shorter than a window are read from their beginning, as they are when a model writes one.
        """
        place = int(torch.randint(len(self.ids) - length + 1, (1,), generator=generator))
        start = int(self.starts[int(torch.searchsorted(self.starts, place, right=True)) - 1])
        if place - start < length:
            place = min(start, len(self.ids) - length)
        return self.ids[place : place + length].long()


def stream(rows: Sequence[Sequence[int]], end: int, *, length: int) -> Stream:
    """The stream of texts.

    Args:
        rows: their token ids, without end tokens.
        end: the end token.
        length: of the windows that shall be cut from it.

    Raises:
        UserError: fewer tokens than a window holds.
    """
    flat: list[int] = []
    starts = []
    for row in rows:
        starts.append(len(flat))
        flat += [end, *row]
    flat.append(end)
    if len(flat) < length:
        raise UserError(f"the texts hold {len(flat)} tokens: legal is at least one window of {length}")
    return Stream(torch.tensor(flat, dtype=torch.int32), torch.tensor(starts))


@dataclass(frozen=True, eq=False)
class Batches:
    """The batch of a step, a pure function of (seed, step).

    Attributes:
        main: what the model shall write.
        background: other text in the same language; its share falls linearly, from twice `share` to nothing, or above
            one half from everything to what keeps the mean.
        share: of the background over all steps.
        rows, length: windows a batch, tokens a window.
        steps: of the run.
        seed: of every choice.
    """

    main: Stream
    background: Stream | None
    share: float
    rows: int
    length: int
    steps: int
    seed: int

    def __call__(self, step: int) -> Int[Tensor, "rows length"]:
        """The windows of a step."""
        generator = torch.Generator().manual_seed(fold(self.seed, 8, step) >> 1)
        first, last = min(2 * self.share, 1.0), max(2 * self.share - 1, 0.0)
        aside = torch.rand(self.rows, generator=generator) < first + (last - first) * step / self.steps
        return torch.stack([self._source(bool(other)).window(self.length, generator) for other in aside])

    def _source(self, aside: bool) -> Stream:
        return self.background if aside and self.background is not None else self.main


def held_out(
    rows: Sequence[Sequence[int]], end: int, *, length: int, tokens: int
) -> tuple[Int[Tensor, "windows length"], int]:
    """Whole texts one after another in windows that overlap by one token, each token predicted once.

    Args:
        rows: token ids of the texts, without end tokens.
        end: the end token; it also fills the last window, marked -1 there.
        length: tokens a window.
        tokens: texts are taken until there are this many.

    Returns:
        The windows, and how many texts were taken.
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
