"""What is known of a layer's inputs before its weights are quantized: their means and variances in a text of the model.

A weight's error is multiplied by the layer's input. The error due to the mean input is the same in every row, so the
bias cancels it. The rest grows with the input's variance. A rounding that knows means and variances therefore drafts
better: variances are the diagonal of the second-order matrix of GPTQ (arXiv 2210.17323) after the means are taken away,
and llama.cpp's importance matrix has mean squares. The text needs no data and no tokenizer: each row begins with the
token that begins a text, and goes on with what the model draws. It depends on the model only, so drafts are the same in
every run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn
from typing_extensions import override

from draftproof.backends.base import Feed
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.products.packed_linear import PackedLinear
from draftproof.native.tensors import MeasuredInputs
from draftproof.rng import CounterRng

ROWS, TOKENS = 16, 9  # of the text: sequences, and passes
FLOOR = 0.03  # of the mean variance: the least that an input counts
MEASURED_BITS = 4  # of a weight; with 8, errors are small wherever they are


class InputStatistics:
    """Sums of one layer's inputs, and of their squares."""

    def __init__(self) -> None:
        self.rows = 0  # that were added
        self._sum: Float32[Tensor, " in"] | None = None
        self._squares: Float32[Tensor, " in"] | None = None

    def add(self, x: Float[Tensor, "*rows in"]) -> None:
        """Add some rows of inputs."""
        rows = x.detach().reshape(-1, x.shape[-1]).to(torch.float32)
        more, squares = rows.sum(0), rows.square().sum(0)
        self._sum = more if self._sum is None else self._sum + more
        self._squares = squares if self._squares is None else self._squares + squares
        self.rows += len(rows)

    def clear(self) -> None:
        """Forget what was added."""
        self.rows = 0
        self._sum = None
        self._squares = None

    def sums(self) -> Float32[Tensor, "2 in"] | None:
        """The sums, on the CPU; None where nothing was added."""
        return None if self._sum is None or self._squares is None else torch.stack((self._sum, self._squares)).cpu()

    def restore(self, rows: int, sums: Float32[Tensor, "2 in"]) -> None:
        """Take what `sums` gave after so many rows in place of all that was added."""
        self.rows = rows
        self._sum = sums[0]
        self._squares = sums[1]

    def found(self) -> MeasuredInputs | None:
        """What is known now; None where nothing was added that differs from row to row."""
        if self._sum is None or self._squares is None:
            return None
        mean = self._sum / self.rows
        variance = (self._squares / self.rows - mean.square()).clamp(min=0)
        whole = variance.mean()
        if not (whole > 0 and whole.isfinite()):
            return None
        return MeasuredInputs((variance / whole + FLOOR).contiguous(), mean)


class MeasuredProduct(PackedLinear):
    """A product that also adds to the statistics of its inputs."""

    def __init__(self, product: PackedLinear, statistics: InputStatistics) -> None:
        self.weight = product.weight
        self.bias = product.bias
        self.layout = "measured"
        self._product = product
        self._statistics = statistics

    def __call__(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """The product with every row."""
        self._statistics.add(x)
        return self._product(x)

    @override
    def onto(self, x: Float[Tensor, "*rows in"], rows: Float[Tensor, "*rows out"]) -> Float[Tensor, "*rows out"]:
        self._statistics.add(x)
        return self._product.onto(x, rows)


class MeasuredLinear(nn.Module):
    """A layer of a transformers model that also adds to the statistics of its inputs."""

    def __init__(self, layer: nn.Module, statistics: InputStatistics) -> None:
        super().__init__()
        self._layer: Any = layer
        self._statistics = statistics

    @property
    def weight(self) -> Tensor:
        """That of the layer."""
        weight: Tensor = self._layer.weight
        return weight

    @property
    def bias(self) -> Tensor | None:
        """That of the layer."""
        bias: Tensor | None = self._layer.bias
        return bias

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """The layer's outputs."""
        self._statistics.add(x)
        made: Tensor = self._layer(x)
        return made


def write(backend: SlotBackend, statistics: Collection[InputStatistics]) -> Iterator[None]:
    """Let a model write a text of ROWS times TOKENS tokens, in steps: None after each pass.

    Rows begin with the token that begins a text, or with the one that ends it, as texts do in training: a model that
    has never read a text without such a token has inputs of another kind there. If a model names neither,
    rows begin with tokens spread over the vocabulary. The first pass is left out: activations of first tokens are not
    typical.
    """
    vocab, most, facts = backend.vocab_size, backend.max_positions, backend.facts
    named = (each for each in (facts.bos_token_id, *facts.eos_token_ids) if each is not None and 0 <= each < vocab)
    first = next(named, None)
    given = [[(2 * row + 1) * vocab // (2 * ROWS) if first is None else first] for row in range(ROWS)]
    draws = CounterRng(range(len(given)))
    sessions = [backend.open() for _ in given]
    try:
        for number in range(TOKENS if most is None else min(TOKENS, most)):
            outputs = backend.forward([Feed(session, ids) for session, ids in zip(sessions, given, strict=True)])
            if not number:
                for each in statistics:
                    each.clear()
            probs = torch.cat([output.logits[-1:] for output in outputs]).to(torch.float32).softmax(-1)
            if not probs.isfinite().all():
                return
            given = [[int(token)] for token in draws.categorical(probs)]
            yield None
    finally:
        for session in sessions:
            session.close()
