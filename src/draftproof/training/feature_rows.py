"""What a feature head learns from: rows of tokens with the target's last hidden states, computed once and kept.

Knows: windows of texts, the target's own answers, files of states. Does not know: heads, losses.

A shard of rows is computed when it is first asked for, so training begins at once and every later pass is cheap; a
shard is a function of its rows and the target alone, so a run that was killed goes on with the same numbers.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftproof.backends.loading import Loaded
from draftproof.files import whole_file
from draftproof.provenance import digest
from draftproof.rng import fold

SHARD = 32  # rows
T = TypeVar("T")
_AGAIN = 3  # times a turn that a shard of a small kind comes at most
_CHUNK = 512  # positions whose full rows of logits are in memory at once


@dataclass(frozen=True)
class Row:
    """Tokens, and from which of them on the next one is learnt from (the end of a prompt)."""

    tokens: tuple[int, ...]
    start: int = 0


@dataclass(frozen=True, eq=False)
class StateRows:
    """Rows of one length with what the target makes of them.

    Attributes:
        ids: tokens, padded with 0.
        counts: positions whose next token is learnt from.
        states: the target's last hidden states.
        log_mass: log of the sum of exponentials of all its logits.
    """

    ids: Int[Tensor, "rows length"]
    counts: Bool[Tensor, "rows length"]
    states: Float[Tensor, "rows length dim"]
    log_mass: Float[Tensor, "rows length"]

    def pick(self, index: Sequence[int]) -> StateRows:
        """Some of the rows."""
        where = list(index)
        return StateRows(self.ids[where], self.counts[where], self.states[where], self.log_mass[where])

    def to(self, device: torch.device) -> StateRows:
        """The same rows on another device."""
        return StateRows(*(part.to(device) for part in (self.ids, self.counts, self.states, self.log_mass)))


def windows(texts: Sequence[str], tokenizer: Any, *, length: int, most: int, seed: int) -> list[Row]:
    """Windows of `length` tokens, each from consecutive texts, in an order that the seed decides.

    Args:
        texts: in their order in the files; windows are cut where a new one begins.
        tokenizer: the target's.
        length: tokens of each window.
        most: windows to return, fewer when there are no more.
        seed: of the choice.
    """
    pages, page = [], ""
    for text in texts:
        page = f"{page}\n\n{text}" if page else text
        if len(page) >= 5 * length:  # English has about four characters a token; a page that is short of it is dropped
            pages.append(page[: 12 * length])
            page = ""
    random.Random(fold(seed, 1)).shuffle(pages)
    found: list[Row] = []
    for first in range(0, len(pages), SHARD):
        if len(found) >= most:
            break
        ids = tokenizer(pages[first : first + SHARD])["input_ids"]
        found += [Row(tuple(row[:length])) for row in ids if len(row) >= length]
    return found[:most]


def frequent(kinds: Sequence[Sequence[Row]], size: int, vocab_size: int, always: Sequence[int] = ()) -> list[int]:
    """The `size` most frequent tokens of several kinds of rows, in ascending order.

    Each kind has the same say, however few its rows are: a token's count is the mean of its shares of the kinds. Ties
    and the rest go by id, low ones being common.

    Args:
        kinds: rows to count, by kind.
        size: tokens wanted, at most the vocabulary.
        vocab_size: of the target.
        always: tokens that are taken whatever their count, such as those that end a text.
    """
    shares: defaultdict[int, float] = defaultdict(float)
    for rows in kinds:
        counted = Counter(token for row in rows for token in row.tokens[row.start + 1 :])
        for token, count in counted.items():
            shares[token] += count / counted.total()
    first = set(always)
    order = sorted(range(vocab_size), key=lambda token: (token not in first, -shares[token], token))
    return sorted(order[:size])


def spread(kinds: Sequence[Sequence[T]]) -> list[T]:
    """The members of all kinds in one order, each kind evenly over it; small kinds are repeated, up to `_AGAIN` times.

    A kind is repeated until it is an equal share of a fair division, or as often as allowed.
    """
    most = max((len(kind) for kind in kinds), default=0)
    placed: list[tuple[float, int, int, T]] = []
    for number, kind in enumerate(kinds):
        times = max(1, min(_AGAIN, most // max(len(kind), 1)))
        whole = [*kind] * times
        placed += [((i + 0.5) / len(whole), number, i, member) for i, member in enumerate(whole)]
    return [member for *_, member in sorted(placed, key=lambda each: each[:3])]


class Store:
    """Rows with the target's states, shard by shard, from files where they are there.

    Args:
        target: makes the states.
        kinds: rows; a shard holds neighbours of one kind, so more rows at the end leave the files of the others true.
            Kinds are spread evenly over a turn. A small kind comes up to `_AGAIN` times a turn, to be a share of it.
        length: every row is cut or padded to this.
        cache: folder of the files.
        key: names the target and how it is run.
    """

    def __init__(self, target: Loaded, kinds: Sequence[Sequence[Row]], *, length: int, cache: Path, key: str) -> None:
        self.target = target
        self.length = length
        cut = [[list(rows[i : i + SHARD]) for i in range(0, len(rows), SHARD)] for rows in kinds if rows]
        self._shards = spread(cut)
        told = [[[list(row.tokens), row.start] for row in rows] for rows in self._shards]
        self._names = [digest(key, length, rows)[:24] for rows in told]
        self.key = digest(self._names)
        self.folder = cache / "feature-rows"
        self._last: tuple[int, StateRows] | None = None

    def __len__(self) -> int:
        return len(self._shards)

    def shard(self, number: int) -> StateRows:
        """The rows of a shard, on the host."""
        if self._last is None or self._last[0] != number:
            file = self.folder / f"{self._names[number]}.safetensors"
            if not file.exists():
                made = self._make(self._shards[number])
                with whole_file(file) as work:
                    save_file({name: value.cpu().contiguous() for name, value in vars(made).items()}, work)
            self._last = (number, StateRows(**load_file(file)))
        return self._last[1]

    def batch(self, step: int, size: int, seed: int) -> StateRows:
        """The rows of a training step: shards in order at first, then in another order each time round.

        A function of its arguments alone. Rows of a shard come together, in an order of their own.
        """
        per = SHARD // size
        turn, place = divmod(step, len(self) * per)
        number, part = divmod(place, per)
        if turn:
            order = list(range(len(self)))
            random.Random(fold(seed, 2, turn)).shuffle(order)
            number = order[number]
        shard = self.shard(number)
        index = list(range(shard.ids.shape[0]))
        random.Random(fold(seed, 3, turn, number)).shuffle(index)
        chosen = [index[(part * size + i) % len(index)] for i in range(size)]
        return shard.pick(chosen)

    @torch.inference_mode()
    def _make(self, rows: Sequence[Row]) -> StateRows:
        size, device = self.length, self.target.device
        ids = torch.tensor([[*row.tokens[:size], *[0] * (size - len(row.tokens))] for row in rows], dtype=torch.int64)
        ends = torch.tensor([min(len(row.tokens), size) for row in rows]).unsqueeze(1)
        starts = torch.tensor([row.start for row in rows]).unsqueeze(1)
        places = torch.arange(size)
        parts = [self._states(part) for part in torch.split(ids.to(device), 8)]
        states = torch.cat([part[0] for part in parts])
        mass = torch.cat([part[1] for part in parts])
        return StateRows(ids, (places >= starts) & (places < ends), states, mass)

    def _states(self, ids: Int[Tensor, "rows length"]) -> tuple[Tensor, Tensor]:
        """Last hidden states, and log of the mass of all logits; full rows of logits exist a few at a time."""
        keep = torch.zeros(1, dtype=torch.int64, device=ids.device)
        out = self.target.model(input_ids=ids, use_cache=False, output_hidden_states=True, logits_to_keep=keep)
        states: Tensor = out.hidden_states[-1]
        head = self.target.model.get_output_embeddings()
        wide = (head(part) for part in torch.split(states.flatten(0, 1), _CHUNK))
        mass = [few.float().logsumexp(-1) for part in wide for few in torch.split(part, _CHUNK // 16)]
        return states, torch.cat(mass).view(ids.shape)
