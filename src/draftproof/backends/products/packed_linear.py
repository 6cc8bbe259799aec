"""Linear layers in the layout that the CPU multiplies fastest, several with the same input as one product.

On the CPU, torch converts a plain weight on every call; here that is done once. No weight is kept twice: where weights
are packed, the plain ones are freed and the model's own modules become `LinearSlice`s of the packed product; elsewhere
the model's parameters become views of the fused weight.
"""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from jaxtyping import Float, Int
from torch import Tensor, nn
from typing_extensions import override

from draftproof import native
from draftproof.backends.model_info import relative_error
from draftproof.errors import UserError
from draftproof.native.ggml import AS_FLOATS, LAYOUTS, SIXTEEN_BITS, GGMLWeight, StoredMatrix, why_not_joined
from draftproof.native.operations import NEIGHBOURS, Operations
from draftproof.native.tensors import Interleaved, MeasuredInputs, Plain, Quantized
from draftproof.triton.choose import installed as triton_is_installed

RESCORED = 64  # largest outputs of a quantized output layer that are computed again with whole weights
MORE_RESCORED = 256  # the same where whole rows lie in one piece, so that reading them costs little
ROUGH_OUTPUTS = 100_000  # from so many outputs on, an output layer has ROUGH_BITS where rows lie in one piece
ROUGH_BITS, ROUGH_GROUP = 2, 64
DRAFTED_BITS = 4  # of a target's output layer that a head drafts with, if it is that large and rows lie apart
ROUGH_SHARE = 128  # one of so many outputs is computed again then
_ROUGH_GAIN = 1.5  # how many times as many bytes a stored output layer has, at least, where a rough copy is made of it
GROUP = 32  # inputs that share a scale in a quantized weight
REORDERED = "reordered"  # layout of a native product whose inputs change their order first, which C code does not do
_CHECKED = 64  # outputs of a stored matrix that are compared with torch's
_TOLERANCE = 0.02  # how far they may be off where inputs have 8 bits, as a share of their size
_ROWS = 9  # rows that the packed layout is optimized for: those of a verification; one row is as fast


@functools.cache
def packs(dtype: torch.dtype, device: str) -> bool:
    """Whether this torch and this processor can multiply packed weights of a dtype."""
    if device != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    try:
        weight = torch.zeros(16, 16, dtype=dtype)
        return _multiply(weight[:1], _pack(weight), None).shape == (1, 16)
    except (AttributeError, RuntimeError):
        return False


def _pack(weight: Float[Tensor, "out in"]) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)  # noqa: SLF001 - has no public name
    return packed


def _multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    made: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")  # noqa: SLF001
    return made


def _multiply_few(x: Float[Tensor, "*rows in"], packed: Tensor, bias: Tensor | None) -> Tensor:
    """`_multiply` with one or two rows repeated to four: oneDNN's kernels for fewer rows take a fifth longer."""
    rows = x.shape[0]
    if rows > 2 or x.dim() != 2:
        return _multiply(x, packed, bias)
    return _multiply(x.expand(4, -1) if rows == 1 else torch.cat((x, x)), packed, bias)[:rows]


class PackedLinear:
    """x W^T + b, for inference.

    Args:
        weight: plain, or several whose outputs follow one another; not kept here where packed weights are supported.
        pack: whether to pack the weight where that is supported.
    """

    few_bits = False  # whether the weight has the numbers of a file, which are not rounded again
    rounds_inputs = False  # whether inputs are rounded to 8 bits

    def __init__(
        self,
        weight: Float[Tensor, "out in"] | Sequence[Tensor],
        bias: Float[Tensor, " out"] | None = None,
        *,
        pack: bool = True,
    ) -> None:
        parts = [weight] if isinstance(weight, Tensor) else list(weight)
        operations = native.operations_for(parts[0]) if pack else None
        weight = parts[0] if operations is not None else _joined(parts)
        self.bias = bias
        self.layout = "plain"  # of the weight, "native", "oneDNN", "plain" or REORDERED
        self.weight: Any = weight  # a tensor, or in a layout of native/
        self._multiply: Callable[..., Tensor] = F.linear
        if operations is not None:
            self.layout = "native"
            self.weight = Interleaved.of(*parts)
            self._multiply = operations.product
        elif pack and packs(weight.dtype, weight.device.type):
            self.layout = "oneDNN"
            self.weight = _pack(weight)
            self._multiply = _multiply_few
        self._latest: tuple[Tensor, Tensor] | None = None

    @property
    def numbers(self) -> Tensor:
        """The weight's numbers, in the order of its layout."""
        weight: Tensor = self.weight.blocks if isinstance(self.weight, Interleaved) else self.weight
        return weight

    def why_not_quantized(self, bits: int, group: int = GROUP) -> str | None:
        """Why it has no quantized form here; None where it has one. Arguments as of `quantized`."""
        if isinstance(self.weight, Quantized):
            return f"its weights have {self.weight.bits} bits already"
        if self.layout == "native":
            return None
        if not isinstance(self.weight, Tensor) or self.weight.device.type != "cuda":
            return "its products are not native (and DRAFTPROOF_NATIVE must not be 0)"
        if not triton_is_installed():
            return f"its products on {self.weight.device} need Triton: pip install 'draftproof[triton]'"
        found: str | None = _on_device().why_not(self.weight.dtype, self.weight.device, bits, group)
        return found

    def quantized(self, bits: int, group: int = GROUP, inputs: MeasuredInputs | None = None) -> PackedLinear:
        """The same product with a quantized weight, as a draft reads it; see `why_not_quantized`.

        What is known of the inputs says which errors count, and what outputs lack on the mean, which is added to the
        bias; by default all errors count alike.
        """
        made = copy.copy(self)
        if isinstance(self.weight, Interleaved):
            operations = native.operations_for(self.weight.blocks)
            assert operations is not None, "the layout is native"
            dtype = operations.dtype
            made.weight = operations.quantize(self.weight, bits, group, inputs)
            made._multiply = operations.quantized_product  # noqa: SLF001 - of this class
        else:
            weights = _on_device()
            dtype = self.weight.dtype
            made.weight = weights.quantize(self.weight, bits, group, inputs)
            made._multiply = weights.product  # noqa: SLF001
        if (lost := made.weight.lost) is not None:
            made.bias = (lost if self.bias is None else lost + self.bias).to(dtype)
        return made

    def quantized_output(
        self, bits: int, table: Float[Tensor, "out in"] | None = None, inputs: MeasuredInputs | None = None
    ) -> PackedLinear:
        """`quantized` for an output layer: with 4 bits its largest outputs are computed again.

        A large layer has 2 bits then, and more outputs are computed again: that reads half as much, and a draft is as
        good. It needs a plain weight, whose rows can be read one by one: the `table` of a tied embedding, else a copy.
        """
        if bits > 4:
            return self.quantized(bits, inputs=inputs)
        if self.layout != "native" or table is None:
            rough, whole, count = self.quantized(bits, inputs=inputs), self.weight if table is None else table, RESCORED
        elif len(table) < ROUGH_OUTPUTS:
            rough, whole, count = self.quantized(bits, inputs=inputs), table, MORE_RESCORED
        else:
            rough = self.quantized(ROUGH_BITS, ROUGH_GROUP, inputs)
            whole, count = table, len(table) // ROUGH_SHARE
        return RescoredProduct(rough, whole, self.bias, count)

    def for_drafts(self, table: Float[Tensor, "out in"] | None = None) -> PackedLinear:
        """An output layer as heads and draft models have it: rounded if it is large, as reading it is much of a draft.

        The largest outputs are whole, so greedy drafts are nearly always the same. `table` as of `quantized_output`.
        """
        large = isinstance(self.weight, Interleaved) and self.weight.outs >= ROUGH_OUTPUTS
        return self.quantized_output(DRAFTED_BITS, table) if large else self

    @property
    def packed(self) -> bool:
        """Whether the weight has a layout for the CPU."""
        return self.layout != "plain"

    def __call__(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """The product with every row."""
        return self._multiply(x, self.weight, self.bias)

    def dense(self) -> Float[Tensor, "out in"]:
        """The weight in its plain layout; a copy where it is packed."""
        return self.weight if isinstance(self.weight, Tensor) and not self.weight.is_mkldnn else self.weight.to_dense()

    def rows(self, ids: Int[Tensor, " ids"]) -> Float[Tensor, "ids in"]:
        """Plain rows of the weight, by output."""
        return self.dense()[ids]

    def onto(self, x: Float[Tensor, "*rows in"], rows: Float[Tensor, "*rows out"]) -> Float[Tensor, "*rows out"]:
        """The product with every row, rounded and then added to `rows`."""
        if self.layout in ("native", REORDERED):
            return self._multiply(x, self.weight, self.bias, rows)
        return self(x).add_(rows)

    def part(self, x: Float[Tensor, "*rows in"], start: int, stop: int) -> Float[Tensor, "*rows part"]:
        """Some of the outputs; calls in order with the same input tensor cost one product together."""
        latest = self._latest
        whole = latest[1] if latest is not None and latest[0] is x and start else self(x)
        self._latest = (x, whole) if stop < whole.shape[-1] else None
        return whole[..., start:stop]


class PlainProduct(PackedLinear):
    """A native product with a weight as torch keeps it: nothing is moved or copied.

    Args:
        weight: contiguous, of a type that has native operations.
    """

    def __init__(self, weight: Float[Tensor, "out in"], bias: Float[Tensor, " out"] | None = None) -> None:
        operations = native.operations_for(weight)
        assert operations is not None, "the caller looked"
        self.bias = bias
        self.layout = "native"
        self.weight = Plain(weight)
        self._operations = operations
        self._latest = None

    @property
    @override
    def numbers(self) -> Tensor:
        return self.dense()

    def __call__(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """The product with every row."""
        return self._operations.rows_product(x, self.weight.weight, self.bias)

    def dense(self) -> Float[Tensor, "out in"]:
        """The weight itself."""
        weight: Tensor = self.weight.weight
        return weight

    @override
    def for_drafts(self, table: Float[Tensor, "out in"] | None = None) -> PackedLinear:
        rows = self.dense()
        return self if len(rows) < ROUGH_OUTPUTS else PackedLinear(rows, self.bias).for_drafts(rows)


class RescoredProduct(PackedLinear):
    """A quantized output layer; the `count` largest outputs of a row are computed again with a table of whole weights.

    Errors of an output layer are errors of logits, and those of the likely tokens matter. So a few whole rows are read
    for each token, and the others cost as little as 4 bits do.
    """

    def __init__(
        self,
        rough: PackedLinear,
        table: Float[Tensor, "out in"] | Interleaved | StoredMatrix,
        bias: Float[Tensor, " out"] | None,
        count: int,
    ) -> None:
        self.weight = rough.weight
        self.bias = bias
        self.layout = rough.layout
        self._rough = rough
        self._table = table
        self._count = count
        self._operations: Operations | None
        if isinstance(table, StoredMatrix):
            self._operations = operations_for_stored(table)
        else:
            blocks = table.blocks if isinstance(table, Interleaved) else table
            self._operations = native.operations_for(blocks) if blocks.is_contiguous() else None

    def __call__(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """The outputs of every row."""
        made = self._rough(x)
        count = min(self._count, made.shape[-1])
        if self._operations is not None and made.dtype == self._operations.dtype:
            self._operations.rescore(made, x, self._table, self.bias, count=count)
            return made
        logits = made.view(-1, made.shape[-1])
        chosen = largest(logits, count)
        whole = self._whole(chosen)
        again = torch.bmm(whole.float(), x.reshape(len(logits), x.shape[-1], 1).float()).squeeze(-1)
        if self.bias is not None:
            again += self.bias[chosen]
        logits.scatter_(-1, chosen, again.to(logits.dtype))
        return made

    def _whole(self, chosen: Int[Tensor, "rows count"]) -> Float[Tensor, "rows count in"]:
        if isinstance(self._table, StoredMatrix):
            return operations_for_stored(self._table).ggml_rows(self._table, chosen)
        return self._table.rows(chosen) if isinstance(self._table, Interleaved) else F.embedding(chosen, self._table)


def _on_device() -> Any:
    """Quantized products on a device, whose module needs Triton."""
    return importlib.import_module("draftproof.triton.weights")


def largest(logits: Float[Tensor, "rows out"], count: int) -> Int[Tensor, "rows count"]:
    """Places of the largest entries of each row, in no order.

    They lie in the `count` pieces of the row with the largest maxima: only a fast operation reads the whole row.
    """
    rows, outs = logits.shape
    pieces = outs // NEIGHBOURS
    if pieces <= count:
        return logits.topk(count, -1, sorted=False).indices
    whole = logits[:, : pieces * NEIGHBOURS].view(rows, pieces, NEIGHBOURS)
    best = whole.amax(-1).topk(count, -1, sorted=False).indices
    places = (best.unsqueeze(-1) * NEIGHBOURS + torch.arange(NEIGHBOURS, device=best.device)).flatten(1)
    if outs > pieces * NEIGHBOURS:
        rest = torch.arange(pieces * NEIGHBOURS, outs, device=best.device)
        places = torch.cat((places, rest.expand(rows, -1)), -1)
    return places.gather(-1, logits.gather(-1, places).topk(count, -1, sorted=False).indices)


class LinearSlice(nn.Module):
    """The replacement of a linear layer whose weight is part of a packed product: some of its outputs.

    Args:
        places: where each of the layer's outputs is among these; None where they have the same order.
    """

    def __init__(
        self, product: PackedLinear, start: int, stop: int, places: Int[Tensor, " part"] | None = None
    ) -> None:
        super().__init__()
        self.product = product
        self.start = start
        self.stop = stop
        self._places = places

    @property
    def few_bits(self) -> bool:
        """As of the product."""
        return self.product.few_bits

    @property
    def rounds_inputs(self) -> bool:
        """As of the product."""
        return self.product.rounds_inputs

    @property
    def outputs(self) -> Int[Tensor, " part"]:
        """Which of the product's outputs are the layer's."""
        return self.start + (torch.arange(self.stop - self.start) if self._places is None else self._places)

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """A plain copy of the weight, made at every access."""
        part = self.product.dense()[self.start : self.stop]
        return part if self._places is None else part[self._places]

    @property
    def bias(self) -> Float[Tensor, " out"] | None:
        """The bias, if there is one."""
        if self.product.bias is None:
            return None
        part = self.product.bias[self.start : self.stop]
        return part if self._places is None else part[self._places]

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        """The layer's outputs."""
        part = self.product.part(x, self.start, self.stop)
        return part if self._places is None else part[..., self._places]


@torch.no_grad()
def fuse(
    owner: Any, names: Sequence[str], *, rows: Int[Tensor, " outs"] | None = None, pack: bool = True
) -> PackedLinear:
    """Make one product from linear layers of a module that read the same input; the module works on, untrainable.

    If some of them have a bias, the others get zeros. `rows` is another order of all outputs, in which those of a layer
    stay together.
    """
    layers = [getattr(owner, name) for name in names]
    weights, bias = [layer.weight for layer in layers], None
    if any(layer.bias is not None for layer in layers):
        like = next(layer.bias for layer in layers if layer.bias is not None)
        each = (like.new_zeros(len(layer.weight)) if layer.bias is None else layer.bias for layer in layers)
        bias = _joined(list(each))
    if any(isinstance(weight, StoredMatrix) for weight in weights):
        return of_stored(weights, bias, rows=rows)
    weight = _joined(weights)
    if rows is not None:
        rows = rows.to(weight.device)
        weight, bias = weight[rows], None if bias is None else bias[rows]
    product, start = PackedLinear(weight, bias, pack=pack), 0
    for name, layer, outs in zip(names, layers, map(len, weights), strict=True):
        stop = start + outs
        if product.packed or rows is not None:
            places = None if rows is None else rows[start:stop].argsort()
            setattr(owner, name, LinearSlice(product, start, stop, places))
        else:  # views of the one weight, so that nothing is in memory twice
            layer.weight = nn.Parameter(weight[start:stop], requires_grad=False)
            layer.bias = None if bias is None else nn.Parameter(bias[start:stop], requires_grad=False)
        start = stop
    return product


def product_of(
    weight: StoredMatrix | Tensor, bias: Float[Tensor, " out"] | None = None, *, pack: bool = True
) -> PackedLinear:
    """The product with one matrix, plain or of few bits."""
    return of_stored([weight], bias) if isinstance(weight, StoredMatrix) else PackedLinear(weight, bias, pack=pack)


def of_stored(
    weights: Sequence[StoredMatrix | Tensor], bias: Tensor | None, *, rows: Int[Tensor, " outs"] | None = None
) -> PackedLinear:
    """The product of matrices with the same inputs, some of which are stored in few bits; arguments as of `fuse`."""
    bias = bias if bias is None or rows is None else bias[rows]
    starts, groups = list(itertools.accumulate((len(each) for each in weights), initial=0)), list[list[Any]]()
    for weight, (start, stop) in zip(weights, itertools.pairwise(starts), strict=True):
        mine = weight if rows is None else _in_order(weight, rows[start:stop] - start)
        if groups and _is_one_product([*groups[-1], mine]):
            groups[-1].append(mine)
        else:
            groups.append([mine])
    products, start = list[PackedLinear](), 0
    for group in groups:
        stop = start + sum(len(each) for each in group)
        part = None if bias is None else bias[start:stop]
        if _is_plain(group[0]):
            products.append(PackedLinear([plain_of(each) for each in group], part))
            release_pages(group)
        else:
            products.append(StoredProduct(group, part))
        start = stop
    return products[0] if len(products) == 1 else SplitProduct(products)


def _in_order(weight: StoredMatrix | Tensor, rows: Int[Tensor, " outs"]) -> StoredMatrix | Tensor:
    return weight.in_order(rows) if isinstance(weight, StoredMatrix) else weight[rows]


def _is_plain(weight: StoredMatrix | Tensor) -> bool:
    return isinstance(weight, Tensor) or weight.is_plain


def _is_one_product(weights: Sequence[StoredMatrix | Tensor]) -> bool:
    """Whether neighbouring matrices are read by one product."""
    if any(_is_plain(each) for each in weights):
        return all(_is_plain(each) for each in weights)
    return why_not_joined([each for each in weights if isinstance(each, StoredMatrix)]) is None


def plain_of(weight: StoredMatrix | Tensor) -> Float[Tensor, "*out in"]:
    """A matrix as a tensor: in the map of its file, where its floats are of the type that products make."""
    if isinstance(weight, Tensor):
        return weight
    return weight.plain() if weight.is_plain else dense(weight)


def release_pages(weights: Sequence[StoredMatrix | Tensor]) -> None:
    """Let the pages of files go that hold matrices."""
    for each in weights:
        if isinstance(each, StoredMatrix) and each.release is not None:
            each.release()


class StoredProduct(PackedLinear):
    """x W^T + b with the numbers of stored matrices; inputs are rounded to 8 bits, or as their types have it.

    Where the matrices have another order of inputs, rows get it once, before they are rounded.

    Args:
        matrices: whose outputs follow one another (`ggml.why_not_joined`).
    """

    few_bits = True

    def __init__(self, matrices: Sequence[StoredMatrix], bias: Float[Tensor, " out"] | None = None) -> None:
        operations = operations_for_stored(matrices[0])
        self.bias = bias
        self._inputs = matrices[0].inputs
        self.layout = "native" if self._inputs is None else REORDERED
        self._latest = None
        self.rounds_inputs = LAYOUTS[matrices[0].type].inputs != AS_FLOATS
        self._types = sorted({LAYOUTS[each.type].name for each in matrices})
        self._matrices = matrices if all(each.release for each in matrices) else ()
        self._operations = operations
        self._multiply = functools.partial(_multiplied, operations, self._inputs)
        self.weight = GGMLWeight.joined([repacked(each) for each in matrices])

    @override
    def why_not_quantized(self, bits: int, group: int = GROUP) -> str | None:
        if all(each.type in SIXTEEN_BITS for each in self.weight.segments):
            return f"its weights stay as the file has them ({', '.join(self._types)})"
        return f"its weights have few bits already ({', '.join(self._types)})"

    @override
    def for_drafts(self, table: Float[Tensor, "out in"] | None = None) -> PackedLinear:
        """The same with rows of the file in place of a table, which stay mapped; where that reads much less."""
        matrix = self._matrices[0] if len(self._matrices) == 1 else None
        if matrix is None or matrix.outs < ROUGH_OUTPUTS or not matrix.is_in_order:
            return self
        blocks, size = Quantized.shape(matrix.outs, matrix.ins, ROUGH_BITS, ROUGH_GROUP)
        if self.weight.nbytes < _ROUGH_GAIN * blocks * size:
            return self
        floats = native.operations_for(torch.empty(0, dtype=torch.float32))
        assert floats is not None, "there are operations for the matrix"
        rough = copy.copy(self)
        rough.weight = floats.ggml_quantized(matrix, ROUGH_BITS, ROUGH_GROUP)
        rough._multiply = self._operations.quantized_product  # noqa: SLF001 - of this class
        return RescoredProduct(rough, matrix, self.bias, matrix.outs // ROUGH_SHARE)

    @override
    def rows(self, ids: Int[Tensor, " ids"]) -> Float[Tensor, "ids in"]:
        return self._operations.ggml_rows(self._matrices[0], ids) if len(self._matrices) == 1 else self.dense()[ids]

    @override
    def dense(self) -> Float[Tensor, "out in"]:
        if not self._matrices:  # outputs of inputs that are 1 once, which 8 bits hold with a scale for each group
            weight, ones = self.weight.by_group(), torch.eye(self.weight.ins, dtype=self._operations.dtype)
            return self._multiply(ones, weight, None).t()
        return torch.cat([dense(each) for each in self._matrices])


class SplitProduct(PackedLinear):
    """Native products with the same inputs whose weights are of several kinds; their outputs follow one another."""

    few_bits = True

    def __init__(self, products: Sequence[PackedLinear]) -> None:
        self.products = products
        self.layout = REORDERED if any(each.layout == REORDERED for each in products) else "native"
        self.rounds_inputs = any(each.rounds_inputs for each in products)
        self.bias = None
        self.weight: Any = None
        self._latest = None
        self._multiply = self._split

    @override
    def why_not_quantized(self, bits: int, group: int = GROUP) -> str | None:
        return next(filter(None, (each.why_not_quantized(bits, group) for each in self.products)), "it is in parts")

    @override
    def dense(self) -> Float[Tensor, "out in"]:
        return torch.cat([each.dense() for each in self.products])

    def _split(self, x: Tensor, _: object, __: object, onto: Tensor | None = None) -> Tensor:
        made = torch.cat([each(x) for each in self.products], -1)
        return made if onto is None else made.add_(onto)


def _multiplied(
    operations: Operations,
    inputs: Tensor | None,
    x: Tensor,
    weight: GGMLWeight,
    bias: Tensor | None,
    onto: Tensor | None = None,
) -> Tensor:
    """The product in the dtype of the rows: a model of bfloat16 may be compared in float32."""
    chosen = operations if x.dtype == operations.dtype else native.operations_for(x)
    assert chosen is not None, "the caller looked"
    return chosen.ggml_product(x if inputs is None else x[..., inputs], weight, bias, onto)


def operations_for_stored(matrix: StoredMatrix) -> Operations:
    """The native operations that multiply a stored matrix."""
    operations = native.operations_for(torch.empty(0, dtype=matrix.dtype))
    if operations is None:
        raise UserError(f"weights of few bits in their own numbers need native operations ({native.VARIABLE})")
    return operations


def repacked(matrix: StoredMatrix) -> GGMLWeight:
    """A stored matrix in the order in which native products read it; the pages of its file are let go."""
    made = operations_for_stored(matrix).ggml_repacked(matrix)
    release_pages([matrix])
    return made


def dense(matrix: StoredMatrix) -> Float[Tensor, "out in"]:
    """What the numbers of a stored matrix stand for, in its dtype."""
    made = operations_for_stored(matrix).ggml_rows(matrix, torch.arange(len(matrix)))
    release_pages([matrix])
    return made


def why_not_exact(matrix: StoredMatrix) -> str | None:
    """Why native products with some rows of a stored matrix are wrong; None where they are torch's but for rounding."""
    some, operations = replace(matrix.first(_CHECKED), inputs=None), operations_for_stored(matrix)
    x = torch.randn((3, some.ins), generator=torch.Generator().manual_seed(0)).to(some.dtype)
    expected = x.double() @ dense(some).double().T
    found = operations.ggml_product(x, operations.ggml_repacked(some)).double()
    error = relative_error(found, expected)
    return None if error < _TOLERANCE else f"native products of {LAYOUTS[some.type].name} are off by {error:.2g}"


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0].detach()
