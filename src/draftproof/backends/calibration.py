"""How much the error of a weight counts: mean squares of its inputs, while a model writes a text by itself.

A weight's error is multiplied by the layer's input. So errors of weights with large inputs count more, and a rounding
that knows the mean square of each input makes better drafts (as in llama.cpp's importance matrix, and as the diagonal
of the second-order matrix of GPTQ, arXiv 2210.17323). The text needs no data and no tokenizer: each row begins with a
token id, and goes on with what the model draws. It depends on the model only, so drafts are the same in every run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from jaxtyping import Float, Float32
from torch import Tensor, nn

from draftproof.backends.base import Feed
from draftproof.backends.packed import Product
from draftproof.backends.slots import SlotBackend
from draftproof.rng import CounterRng

ROWS, TOKENS = 16, 4  # of the text: sequences, and passes
FLOOR = 0.01  # of the mean: the least that an input counts
MEASURED_BITS = 4  # of a weight; with 8, errors are small wherever they are


class InputSquares:
    """Sums of squares of one layer's inputs."""

    def __init__(self) -> None:
        self._sum: Float32[Tensor, " in"] | None = None

    def add(self, x: Float[Tensor, "*rows in"]) -> None:
        """Add some rows of inputs."""
        more = x.detach().reshape(-1, x.shape[-1]).to(torch.float32).square().sum(0)
        self._sum = more if self._sum is None else self._sum + more

    def clear(self) -> None:
        """Forget what was added."""
        self._sum = None

    def counts(self) -> Float32[Tensor, " in"] | None:
        """How much the error of each input's weights counts; None where that is not known."""
        if self._sum is None:
            return None
        mean = self._sum.mean()
        if not (mean > 0 and mean.isfinite()):
            return None
        return (self._sum / mean + FLOOR).contiguous()


class MeasuredProduct(Product):
    """A product that also adds the squares of its inputs.

    Args:
        product: the product.
        squares: of its inputs.
    """

    def __init__(self, product: Product, squares: InputSquares) -> None:
        self.weight, self.bias, self.layout = product.weight, product.bias, "measured"
        self._product, self._squares = product, squares

    def __call__(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """The product with every row."""
        self._squares.add(x)
        return self._product(x)

    def onto(self, x: Float[Tensor, "*rows in"], rows: Float[Tensor, "*rows out"]) -> Float[Tensor, "*rows out"]:
        """See `Product.onto`."""
        self._squares.add(x)
        return self._product.onto(x, rows)


class MeasuredLinear(nn.Module):
    """A layer of a transformers model that also adds the squares of its inputs.

    Args:
        layer: a linear layer.
        squares: of its inputs.
    """

    def __init__(self, layer: nn.Module, squares: InputSquares) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self._layer, self._squares = layer, squares

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """The layer's outputs."""
        self._squares.add(x)
        made: Tensor = self._layer(x)
        return made


def write(backend: SlotBackend, squares: Collection[InputSquares]) -> Iterator[None]:
    """Let a model write a text of ROWS times TOKENS tokens, in steps: None after each pass.

    What the first pass adds is dropped: first tokens have activations like no others.

    Args:
        backend: with sessions of its own.
        squares: those that its layers add to.
    """
    vocab, most = backend.vocab_size, backend.max_positions
    given = [[row] for row in sorted({(2 * row + 1) * vocab // (2 * ROWS) for row in range(ROWS)})]
    draws = CounterRng(range(len(given)))
    sessions = [backend.open() for _ in given]
    try:
        for number in range(TOKENS if most is None else min(TOKENS, most)):
            outputs = backend.forward([Feed(session, ids) for session, ids in zip(sessions, given, strict=True)])
            if not number:
                for each in squares:
                    each.clear()
            probs = torch.cat([output.logits[-1:] for output in outputs]).to(torch.float32).softmax(-1)
            if not probs.isfinite().all():
                return
            given = [[int(token)] for token in draws.categorical(probs)]
            yield None
    finally:
        for session in sessions:
            session.close()
