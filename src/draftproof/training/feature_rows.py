"""The rows that a feature head is trained on: tokens with the target's last hidden states, kept on disk.

A shard of rows is computed when it is first used, so training begins at once. A shard depends on its rows and on the
target only, so a resumed run continues with the same numbers.
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
from torch import Tensor

from draftproof.backends.loading.by_name import Loaded
from draftproof.provenance import digest
from draftproof.rng import fold
from draftproof.training.shards import SHARD, shard

T = TypeVar("T")
_REPEATS = 3  # how often a shard of a small kind is used in one pass over the data, at most
_CHUNK = 512  # number of positions whose full rows of logits are in memory at once


@dataclass(frozen=True)
class TrainingRow:
    """Token ids, and the position of the first token whose successor is learnt (the end of a prompt)."""

    tokens: tuple[int, ...]
    start: int = 0


@dataclass(frozen=True, eq=False)
class StateRows:
    """Rows of one length with the target's states."""

    ids: Int[Tensor, "rows length"]  # padded with 0
    counts: Bool[Tensor, "rows length"]  # whether the next token of a position is learnt
    states: Float[Tensor, "rows length dim"]  # the target's last hidden states
    log_mass: Float[Tensor, "rows length"]  # of all logits of the target: log of the sum of exponentials
    features: Float[Tensor, "rows length inner"] | None = None  # hidden states of several layers, side by side

    def pick(self, index: Sequence[int]) -> StateRows:
        """The rows with these numbers."""
        where = list(index)
        return StateRows(**{name: value[where] for name, value in self.kept().items()})

    def to(self, device: torch.device) -> StateRows:
        """The same rows on another device."""
        return StateRows(**{name: value.to(device) for name, value in self.kept().items()})

    def kept(self) -> dict[str, Tensor]:
        """The tensors by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


def windows(texts: Sequence[str], tokenizer: Any, *, length: int, most: int, seed: int) -> list[TrainingRow]:
    """At most `most` windows of `length` tokens, each from consecutive texts, in an order that depends on the seed.

    A window begins at the beginning of a text.
    """
    pages, page = [], ""
    for text in texts:
        page = f"{page}\n\n{text}" if page else text
        if len(page) >= 5 * length:  # a token of English has about four characters; shorter pages are dropped below
            pages.append(page[: 12 * length])
            page = ""
    random.Random(fold(seed, 1)).shuffle(pages)
    found: list[TrainingRow] = []
    for first in range(0, len(pages), SHARD):
        if len(found) >= most:
            break
        ids = tokenizer(pages[first : first + SHARD])["input_ids"]
        found += [TrainingRow(tuple(row[:length])) for row in ids if len(row) >= length]
    return found[:most]


def frequent(
    kinds: Sequence[Sequence[TrainingRow]], size: int, vocab_size: int, always: Sequence[int] = ()
) -> list[int]:
    """The `size` most frequent tokens of several kinds of rows, in ascending order; those in `always` in any case.

    Every kind has the same weight, for any number of rows: tokens are ordered by the mean of their shares in the kinds.
    Tokens with equal shares are ordered by id, since tokens with low ids are usually frequent.
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
    """The members of all kinds, each kind spread evenly; a small kind is repeated up to `_REPEATS` times."""
    most = max((len(kind) for kind in kinds), default=0)
    placed: list[tuple[float, int, int, T]] = []
    for number, kind in enumerate(kinds):
        times = max(1, min(_REPEATS, most // max(len(kind), 1)))
        whole = [*kind] * times
        placed += [((i + 0.5) / len(whole), number, i, member) for i, member in enumerate(whole)]
    return [member for *_, member in sorted(placed, key=lambda each: each[:3])]


class FeatureStore:
    """Rows with the target's states, one shard at a time, from files where they exist.

    Args:
        target: the model that computes the states.
        kinds: the rows by kind. A shard has consecutive rows of one kind, so its file stays valid when rows are added
            at the end. The order of the shards is that of `spread`.
        length: every row is cut or padded to this number of tokens.
        cache: folder of the files.
        key: identifies the target and how it is run.
        layers: of the target, whose hidden states are kept in addition to the last ones.
    """

    def __init__(
        self,
        target: Loaded,
        kinds: Sequence[Sequence[TrainingRow]],
        *,
        length: int,
        cache: Path,
        key: str,
        layers: Sequence[int] = (),
    ) -> None:
        self.target = target
        self.layers = tuple(layers)
        key = digest(key, list(layers)) if layers else key
        self.length = length
        cut = [[list(rows[i : i + SHARD]) for i in range(0, len(rows), SHARD)] for rows in kinds if rows]
        self._shards = spread(cut)
        contents = [[[list(row.tokens), row.start] for row in rows] for rows in self._shards]
        self._names = [digest(key, length, rows)[:24] for rows in contents]
        self.key = digest(self._names)
        self.folder = cache / "feature-rows"
        self._last: tuple[int, StateRows] | None = None

    def __len__(self) -> int:
        return len(self._shards)

    def shard(self, number: int) -> StateRows:
        """The rows of a shard, on the host."""
        if self._last is None or self._last[0] != number:
            file = self.folder / f"{self._names[number]}.safetensors"
            found, _ = shard(file, lambda: self._make(self._shards[number]).kept())
            self._last = (number, StateRows(**found))
        return self._last[1]

    def batch(self, step: int, size: int, seed: int) -> StateRows:
        """The rows of a training step, which depend on the arguments only.

        The first pass over the data uses the shards in order, every later pass in a new random order. Rows of a shard
        are used together, in random order.
        """
        per = SHARD // size
        turn, place = divmod(step, len(self) * per)
        number, part = divmod(place, per)
        if turn:
            order = list(range(len(self)))
            random.Random(fold(seed, 2, turn)).shuffle(order)
            number = order[number]
        rows = self.shard(number)
        index = list(range(rows.ids.shape[0]))
        random.Random(fold(seed, 3, turn, number)).shuffle(index)
        chosen = [index[(part * size + i) % len(index)] for i in range(size)]
        return rows.pick(chosen)

    @torch.inference_mode()
    def _make(self, rows: Sequence[TrainingRow]) -> StateRows:
        size, device = self.length, self.target.device
        ids = torch.tensor([[*row.tokens[:size], *[0] * (size - len(row.tokens))] for row in rows], dtype=torch.int64)
        ends = torch.tensor([min(len(row.tokens), size) for row in rows]).unsqueeze(1)
        starts = torch.tensor([row.start for row in rows]).unsqueeze(1)
        places = torch.arange(size)
        parts = [self._states(part) for part in torch.split(ids.to(device), 8)]
        states = torch.cat([part[0] for part in parts])
        mass = torch.cat([part[1] for part in parts])
        features = torch.cat([part[2] for part in parts]) if self.layers else None
        return StateRows(ids, (places >= starts) & (places < ends), states, mass, features)

    def _states(self, ids: Int[Tensor, "rows length"]) -> tuple[Tensor, Tensor, Tensor]:
        """Last hidden states, log of the sum of exponentials of all logits, and the states of `layers`."""
        keep = torch.zeros(1, dtype=torch.int64, device=ids.device)
        out = self.target.model(input_ids=ids, use_cache=False, output_hidden_states=True, logits_to_keep=keep)
        states: Tensor = out.hidden_states[-1]
        head = self.target.model.get_output_embeddings()
        wide = (head(part) for part in torch.split(states.flatten(0, 1), _CHUNK))
        mass = [few.float().logsumexp(-1) for part in wide for few in torch.split(part, _CHUNK // 16)]
        inner = [out.hidden_states[layer] for layer in self.layers]
        return states, torch.cat(mass).view(ids.shape), torch.cat(inner, -1) if inner else states
