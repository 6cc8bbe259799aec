"""The draft budget: a number of drafted tokens for all requests of a round, spent on the likeliest to be accepted.

If the target's pass is bound by arithmetic, every drafted token costs the whole batch time. So the requests compete.
Before a token is drawn, its acceptance is estimated from the draft model's row, and that of the tokens after it from
earlier rounds. A chain continues if its next token is among the likeliest that still fit the budget.

The decision depends on the rows of the next tokens, on all tokens drawn so far of every request, and on earlier rounds;
it never depends on the token itself. Under this condition every rule that is lossless for chains of any length stays
lossless, and the outputs of the requests stay independent (docs/concepts/lossless.md has the proof).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.draft import Draft
from draftproof.errors import UserError
from draftproof.stoppers.base import AcceptanceRates
from draftproof.stoppers.rates import RequestRates, SharedRates

CLASSES = 8  # number of classes of rows, by their largest probability


class DraftBudget:
    """A limit on the drafted tokens of a round, over all its requests: `most`, or None for no limit.

    Acceptance is counted for each request, and for each class of rows by the largest probability of the draft model's
    own distribution (at temperature 1, before any transform).
    """

    def __init__(self, most: int | None = None) -> None:
        if most is not None and most < 1:
            raise UserError(f"draft_budget: expected 1 or more drafted tokens per round, got {most}")
        self.most = most
        self._by_class = SharedRates({kind: AcceptanceRates((kind + 0.5) / CLASSES) for kind in range(CLASSES)})
        self._all = SharedRates()
        self._requests: dict[int, RequestRates] = {}
        self._left = math.inf
        self._reached: dict[int, float] = {}  # probability that all tokens of a request's chain so far are accepted
        self._kinds: dict[int, list[int]] = {}  # classes of the rows of these tokens
        self.begin()

    def begin(self) -> None:
        """Start a round."""
        self._left = math.inf if self.most is None else self.most
        self._reached.clear()
        self._kinds.clear()

    def within(self, length: int) -> int:
        """The length, or the rest of the budget if that is less."""
        return length if self._left >= length else int(self._left)

    def reserve(self, tokens: int) -> None:
        """Set tokens of the budget aside for drafts that are not drawn."""
        self._left = max(self._left - tokens, 0)

    def admit(self, rows: Sequence[int], rooms: Sequence[int], logits: Sequence[Float[Tensor, " width"]]) -> list[bool]:
        """Which chains may draw their next token.

        Args:
            rows: the request of each chain.
            rooms: how many more tokens each chain may get apart from the budget, 1 or more.
            logits: logits of the next token of each chain, before any transform.
        """
        if sum(rooms) <= self._left:  # there is enough for all
            self._left -= len(rows)
            return [True] * len(rows)
        sure = torch.stack(list(logits)).float().softmax(-1).amax(-1)
        kinds = (CLASSES * sure.nan_to_num(0.0)).long().clamp(max=CLASSES - 1).tolist()  # what draws refuses NaN
        chances = []
        for row, room, kind in zip(rows, rooms, kinds, strict=True):
            reached = self._reached.get(row, 1.0) * self._rate(kind)
            later = self._rates(row).expected(1)[1]
            chances.append([reached * later**place for place in range(min(room, int(self._left)))])
        going = [size > 0 for size in likeliest(chances, int(self._left))]
        for row, kind, goes in zip(rows, kinds, going, strict=True):
            if goes:
                self._reached[row] = self._reached.get(row, 1.0) * self._rate(kind)
                self._kinds.setdefault(row, []).append(kind)
        self._left -= sum(going)
        return going

    def cut(self, rows: Sequence[int], drafts: Sequence[Draft]) -> list[Draft]:
        """The drafts, cut to the budget; drawn tokens are kept and count first.

        Only tokens that are functions of the tokens before them are dropped, which is allowed after looking at them.
        """
        if self.most is None or sum(map(len, drafts)) <= self.most:
            return list(drafts)
        drawn = [draft.drawn for draft in drafts]
        chances = []
        for row, draft, size in zip(rows, drafts, drawn, strict=True):
            first, later = self._rates(row).expected(1)
            begin = self._reached.get(row, 1.0) * (later if size else first)
            chances.append([begin * later**place for place in range(len(draft) - size)])
        more = likeliest(chances, max(self.most - sum(drawn), 0))
        return [
            draft if size + kept == len(draft) else draft.first(size + kept)
            for draft, size, kept in zip(drafts, drawn, more, strict=True)
        ]

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """Count the outcome of a request's draft."""
        if self.most is None or not drafted:
            return
        self._rates(row).learn(1, drafted, accepted)
        for place, kind in enumerate(self._kinds.get(row, ())[: min(accepted + 1, drafted)]):
            self._by_class.learn(kind, 1, int(place < accepted))

    def release(self, row: int) -> None:
        """Forget an ended request; unknown ids are ignored."""
        self._requests.pop(row, None)

    def _rate(self, kind: int) -> float:
        """The acceptance rate of tokens from rows of a class."""
        known = self._by_class.expected(kind)
        assert known is not None, "every class has an assumed rate"
        return known.first

    def _rates(self, row: int) -> RequestRates:
        return self._requests.setdefault(row, RequestRates(self._all))


UNLIMITED = DraftBudget()


def likeliest(chances: Sequence[Sequence[float]], most: int) -> list[int]:
    """How many tokens of each chain are among the `most` likeliest of all.

    For each chain, `chances` has the probabilities that its next token, the one after it, ... are reached and accepted;
    they never increase.
    """
    places = [(-chance, place, chain) for chain, own in enumerate(chances) for place, chance in enumerate(own)]
    sizes = [0] * len(chances)
    for _, _, chain in sorted(places)[:most]:
        sizes[chain] += 1
    return sizes
