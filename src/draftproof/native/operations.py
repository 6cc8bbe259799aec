"""The functions of the C library on tensors: every argument is checked before C sees its address.

C reads and writes plain memory, so a wrong shape, type or device would read past an end. Each function here checks
device, type, contiguity and shape, and raises ValueError with the argument's name; nothing else may call the library.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Float32, Float64, Int, Int8, Int64
from torch import Tensor

from draftproof.native import numa
from draftproof.native.ggml import INPUTS, LAYOUTS, GGMLWeight, Segment, StoredMatrix, repacked_shape
from draftproof.native.huge_pages import empty_weight
from draftproof.native.structures import (
    MOST_DIM,
    MOST_STATE,
    AttentionArguments,
    LayerStack,
    MixtureArguments,
    Sequences,
    ggml_inputs_size,
    quantized_inputs_size,
)
from draftproof.native.tensors import (
    LANES,
    UNITS,
    Immutable,
    Interleaved,
    MeasuredInputs,
    Quantized,
    require,
    require_quantizable,
)
from draftproof.native.threads import attach_threads

BLOCK, PIECE = 512, 1 << 14  # as in native.c
MOST_EXPERTS = 1024  # as in native.c
ACTIVATIONS = ("silu", "gelu_tanh", "clamped")  # of gates; the last one is gpt-oss's
NEIGHBOURS = 64  # entries of a row of logits whose maximum is taken together
_TOGETHER = 1 << 22  # numbers of a stored matrix that are floats at once while it is quantized
_SUFFIXES = {torch.float32: "float", torch.bfloat16: "bfloat16"}


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _checked_groups(groups: Sequence[tuple[int, int, int]], matrices: int, rows: int) -> ctypes.Array[ctypes.c_int64]:
    for matrix, first, count in groups:
        if not (0 <= matrix < matrices and first >= 0 and count >= 0 and first + count <= rows):
            raise ValueError(f"group {(matrix, first, count)}: there are {matrices} matrices and {rows} rows")
    return (ctypes.c_int64 * (3 * len(groups)))(*itertools.chain.from_iterable(groups))


def _require_same_layouts(sizes: Any) -> None:
    """Check that C knows every layout, and by the same sizes: it writes repacked matrices into memory made here."""
    for kind, layout in LAYOUTS.items():
        found = (ctypes.c_int64 * 5)()
        expected = layout.elements, layout.size, layout.piece, layout.piece_size, INPUTS.index(layout.inputs)
        if not sizes(kind, found) or tuple(found) != expected:
            raise ValueError(f"sizes of {layout.name}: {tuple(found)} in C, {expected} here")


class Operations(Immutable):
    """The functions of the library for rows of one type.

    Attributes:
        dtype: of rows and of what is made.
        level: the level of processors that the library is for.
        in_place: whether many rows are multiplied with weights where they are as fast as with packed ones.
    """

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, level: str) -> None:
        self.dtype = dtype
        self.level = level
        self.in_place = dtype == torch.bfloat16 and level.endswith("amx")
        self._unit = UNITS[dtype]
        attach_threads(library)
        numa.attach(library)
        pointer: Any = ctypes.c_void_p
        number: Any = ctypes.c_int64
        real: Any = ctypes.c_float
        suffix = _SUFFIXES[dtype]

        def function(name: str, arguments: list[Any], result: Any = None) -> Any:
            made = getattr(library, f"draftproof_{name}")
            made.argtypes = arguments
            made.restype = result
            return made

        self._product = function(f"product_{suffix}", [pointer] * 5 + [number] * 4)
        self._quantize = function(f"quantize_{suffix}", [pointer] * 6 + [number] * 5)
        self._quantized_product = function(
            f"quantized_product_{suffix}", [pointer] * 5 + [number] * 5 + [pointer, number]
        )
        self._ggml_product = function(f"ggml_product_{suffix}", [pointer] * 5 + [number] * 3 + [pointer, number])
        self._ggml_rows = function("ggml_rows", [pointer] * 3 + [number] * 3)
        self._ggml_interleave = function("ggml_interleave", [pointer] * 2 + [number] * 4)
        self._ggml_repack = function("ggml_repack", [pointer] * 3 + [number] * 4)
        _require_same_layouts(function("ggml_sizes", [number, pointer], ctypes.c_int))
        self._rows_product = function(f"rows_product_{suffix}", [pointer] * 6 + [number] * 6)
        self._quantized_rows_product = function(
            f"quantized_rows_product_{suffix}", [pointer] * 5 + [number] * 6 + [pointer, number]
        )
        self._rescore = function(f"rescore_{suffix}", [pointer] * 6 + [number] * 8)
        self._norm = function(f"norm_{suffix}", [pointer] * 3 + [number] * 2 + [real, number])
        self._gated = function(f"gated_{suffix}", [pointer] * 2 + [number] * 4)
        self._legal = function(f"legal_{suffix}", [pointer] + [number] * 2, ctypes.c_int)
        self._attend = function(f"attend_{suffix}", [pointer, number])
        self._mixture = function(f"mixture_{suffix}", [pointer] * 3 + [number, pointer, number])
        self._layers = function(
            f"layers_{suffix}", [pointer, number] + [pointer] * 7 + [number, pointer, number] + [pointer] * 2 + [number]
        )
        self._delta_rule = function("delta_rule", [pointer] * 8 + [number] * 9)
        self._softmax = function("softmax", [pointer] * 2 + [number] * 3)
        self._greedy = function("greedy", [pointer] * 2 + [number] * 3)
        self._spread = function("spread", [pointer] * 3 + [number] * 3, ctypes.c_int)
        self._block = function("block", [pointer] * 6 + [number] * 4, ctypes.c_int)
        self._residual = function("residual", [pointer] * 2 + [number, real, pointer, number])
        self._inverse_cdf = function("inverse_cdf", [pointer] * 4 + [number] * 2)
        self._race = function("race", [pointer] * 5 + [number] * 3)

    # --- layers -----------------------------------------------------------------------------------------------------

    @staticmethod
    def attends(dim: int) -> bool:
        """Whether `attend` supports heads of this size."""
        return 1 <= dim <= MOST_DIM

    def product(
        self,
        x: Float[Tensor, "*rows in"],
        weight: Interleaved,
        bias: Float[Tensor, " out"] | None = None,
        onto: Float[Tensor, "*rows out"] | None = None,
    ) -> Float[Tensor, "*rows out"]:
        """x W^T + b, summed in float32 and rounded once; if `onto` is given, added to it and rounded again."""
        ins, outs = weight.ins, weight.outs
        require("weight", weight.blocks, self.dtype, Interleaved.shape(outs, ins, self._unit))
        x, y, addresses = self._rows(x, weight, bias, onto)
        self._product(*addresses, x.numel() // ins, outs, ins, torch.get_num_threads())
        return y

    def _rows(
        self, x: Tensor, weight: Interleaved | Quantized | GGMLWeight, bias: Tensor | None, onto: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[int | None, ...]]:
        """The checked rows of a product, new memory for its outputs, and the addresses of all of them for C."""
        x, outs = x.contiguous(), weight.outs
        require("x", x, self.dtype, (*x.shape[:-1], weight.ins))
        if bias is not None:
            require("bias", bias, self.dtype, (outs,))
        y = x.new_empty((*x.shape[:-1], outs))
        if onto is not None:
            require("onto", onto, self.dtype, y.shape)
        return x, y, (x.data_ptr(), weight.arguments[0], _address(bias), _address(onto), y.data_ptr())

    def rows_product(
        self,
        x: Float[Tensor, "*rows in"],
        weight: Float[Tensor, "*matrices out in"],
        bias: Float[Tensor, "*matrices out"] | None = None,
        groups: Sequence[tuple[int, int, int]] | None = None,
    ) -> Float[Tensor, "*rows out"]:
        """x W^T + b with weights as torch keeps them, for few rows; summed in float32 and rounded once.

        Of one matrix or several, outputs or inputs are neighbours in memory (a transposed view has the latter). A group
        is the number of a matrix, the first row that it multiplies, and the number of rows; by default the only matrix
        multiplies all of them. Rows of no group have undefined outputs.
        """
        x, (outs, ins) = x.contiguous(), weight.shape[-2:]
        matrices, rows = (weight.shape[0] if weight.dim() == 3 else 1), x.numel() // max(ins, 1)
        require("x", x, self.dtype, (*x.shape[:-1], ins))
        require("weight", weight, self.dtype, packed=False)
        by_input, by_output = weight.stride(-1), weight.stride(-2)
        if weight.dim() not in (2, 3) or 1 not in (by_input, by_output) or not outs or not ins:
            raise ValueError(
                "expected a weight of one or several matrices whose inputs or outputs are neighbours in memory, got "
                f"shape {tuple(weight.shape)} with strides {weight.stride()}"
            )
        across = by_input != 1
        if bias is not None:
            require("bias", bias, self.dtype, weight.shape[:-1])
        chosen = ((0, 0, rows),) if groups is None else groups
        given = _checked_groups(chosen, matrices, rows)
        y = x.new_empty((*x.shape[:-1], outs))
        sums = torch.empty((rows, outs), dtype=torch.float32) if across else None
        self._rows_product(
            x.data_ptr(),
            weight.data_ptr(),
            _address(bias),
            y.data_ptr(),
            _address(sums),
            given,
            len(chosen),
            outs,
            ins,
            by_input if across else by_output,
            weight.stride(0) if weight.dim() == 3 else 0,
            torch.get_num_threads(),
        )
        return y

    def quantize(self, weight: Interleaved, bits: int, group: int, inputs: MeasuredInputs | None = None) -> Quantized:
        """Quantize a weight: in each group the best of several ranges, by squared error.

        By default the errors of all weights count alike.
        """
        require_quantizable(bits, group)
        ins = weight.ins
        shape = Interleaved.shape(weight.outs, ins, self._unit)
        require("weight", weight.blocks, self.dtype, shape)
        known: list[int | None] = [None, None, None]
        lost = None
        if inputs is not None:
            require("counts", inputs.counts, torch.float32, (ins,))
            require("mean", inputs.mean, torch.float32, (ins,))
            lost = torch.empty(shape[0] * LANES, dtype=torch.float32)
            known = [each.data_ptr() for each in (inputs.counts, inputs.mean, lost)]
        blocks = empty_weight(Quantized.shape(weight.outs, ins, bits, group), torch.uint8)
        threads = torch.get_num_threads()
        memory = torch.empty(threads * -(-ins // group) * 2 * LANES, dtype=torch.float32)
        addresses = weight.blocks.data_ptr(), blocks.data_ptr(), memory.data_ptr()
        self._quantize(*addresses, *known, shape[0], ins, bits, group, threads)
        return Quantized(blocks, weight.outs, ins, bits, group, None if lost is None else lost[: weight.outs])

    def quantized_product(
        self,
        x: Float[Tensor, "*rows in"],
        weight: Quantized,
        bias: Float[Tensor, " out"] | None = None,
        onto: Float[Tensor, "*rows out"] | None = None,
    ) -> Float[Tensor, "*rows out"]:
        """`product` with a quantized weight; inputs are quantized to 8 bits, with a scale for each group of a row."""
        ins, outs, bits, group = weight.ins, weight.outs, weight.bits, weight.group
        require_quantizable(bits, group)
        require("weight", weight.blocks, torch.uint8, Quantized.shape(outs, ins, bits, group))
        x, y, addresses = self._rows(x, weight, bias, onto)
        rows = x.numel() // ins
        memory = torch.empty(quantized_inputs_size(rows, ins), dtype=torch.uint8)
        sizes = rows, outs, ins, bits, group
        self._quantized_product(*addresses, *sizes, memory.data_ptr(), torch.get_num_threads())
        return y

    def quantized_rows_product(
        self,
        x: Float[Tensor, "rows in"],
        weight: Quantized,
        bias: Float[Tensor, "matrices out"] | None,
        groups: Sequence[tuple[int, int, int]],
    ) -> Float[Tensor, "rows out"]:
        """`rows_product` with several quantized weights."""
        x, ins, outs, bits, group = x.contiguous(), weight.ins, weight.outs, weight.bits, weight.group
        require_quantizable(bits, group)
        matrices = len(weight.blocks)
        require("weight", weight.blocks, torch.uint8, (matrices, *Quantized.shape(outs, ins, bits, group)))
        require("x", x, self.dtype, (len(x), ins))
        if bias is not None:
            require("bias", bias, self.dtype, (matrices, outs))
        given = _checked_groups(groups, matrices, len(x))
        y = x.new_empty((len(x), outs))
        memory = torch.empty(quantized_inputs_size(len(x), ins), dtype=torch.uint8)
        sizes = len(groups), outs, ins, bits, group, weight.blocks.stride(0)
        addresses = x.data_ptr(), weight.blocks.data_ptr(), _address(bias), y.data_ptr()
        self._quantized_rows_product(*addresses, given, *sizes, memory.data_ptr(), torch.get_num_threads())
        return y

    def mixture(self, x: Float[Tensor, "tokens size"], given: MixtureArguments) -> Float[Tensor, "tokens size"]:
        """What a mixture of experts makes of rows."""
        x, tokens = x.contiguous(), len(x)
        require("x", x, self.dtype, (tokens, given.size))
        y, work = torch.empty_like(x), torch.empty(given.work(tokens), dtype=self.dtype)
        addresses = ctypes.addressof(given), x.data_ptr(), y.data_ptr()
        self._mixture(*addresses, tokens, work.data_ptr(), torch.get_num_threads())
        return y

    def ggml_product(
        self,
        x: Float[Tensor, "*rows in"],
        weight: GGMLWeight,
        bias: Float[Tensor, " out"] | None = None,
        onto: Float[Tensor, "*rows out"] | None = None,
    ) -> Float[Tensor, "*rows out"]:
        """`product` with a weight of few bits, whose layouts say how inputs are rounded (`ggml.INPUTS`)."""
        x, y, addresses = self._rows(x, weight, bias, onto)
        rows = x.numel() // weight.ins
        memory = torch.empty(ggml_inputs_size(rows, weight.ins), dtype=torch.uint8)
        self._ggml_product(*addresses, rows, weight.outs, weight.ins, memory.data_ptr(), torch.get_num_threads())
        return y

    def ggml_repacked(self, matrix: StoredMatrix) -> GGMLWeight:
        """A stored matrix in the order in which `ggml_product` reads it."""
        blocks = empty_weight(repacked_shape(matrix.outs, matrix.ins, matrix.type), torch.uint8)
        addresses = matrix.content.data_ptr(), _address(matrix.rows), blocks.data_ptr()
        self._ggml_repack(*addresses, matrix.outs, matrix.ins, matrix.type, torch.get_num_threads())
        return GGMLWeight((Segment(blocks, matrix.outs, matrix.type),), matrix.ins)

    def ggml_rows(self, matrix: StoredMatrix, ids: Int[Tensor, "*some"]) -> Float[Tensor, "*some in"]:
        """Rows of a stored matrix, in this type and in the layer's order of inputs."""
        ids = ids.to(torch.int64).contiguous()
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < matrix.outs:
            raise ValueError(f"rows {ids.flatten().tolist()[:3]}... are not all of 0 to {matrix.outs - 1}")
        if matrix.rows is not None:
            ids = matrix.rows[ids]
        made = torch.empty((*ids.shape, matrix.ins), dtype=torch.float32)
        sizes = ids.numel(), matrix.ins, matrix.type
        self._ggml_rows(matrix.content.data_ptr(), ids.data_ptr(), made.data_ptr(), *sizes)
        made = made if matrix.inputs is None else made[..., matrix.inputs.argsort()]
        return made.to(self.dtype)

    def ggml_quantized(self, matrix: StoredMatrix, bits: int, group: int) -> Quantized:
        """A stored matrix with fewer bits, by the rounding of `quantize`; of rows in float32 only.

        It is read a part at a time, and the pages of its file are let go.
        """
        if self.dtype != torch.float32 or not matrix.is_in_order:
            raise ValueError("expected operations on float32, and a matrix whose rows and inputs are in order")
        made = empty_weight(Quantized.shape(matrix.outs, matrix.ins, bits, group), torch.uint8)
        together, size = max(_TOGETHER // (LANES * matrix.ins), 1) * LANES, len(matrix.content) // matrix.outs
        for start in range(0, matrix.outs, together):
            outs = min(together, matrix.outs - start)
            blocks = torch.empty(Interleaved.shape(outs, matrix.ins, self._unit), dtype=torch.float32)
            addresses = matrix.content[start * size :].data_ptr(), blocks.data_ptr()
            self._ggml_interleave(*addresses, outs, matrix.ins, matrix.type, torch.get_num_threads())
            part = self.quantize(Interleaved(blocks, outs, matrix.ins), bits, group).blocks
            made[start // LANES : start // LANES + len(part)] = part
            if matrix.release is not None:
                matrix.release()
        return Quantized(made, matrix.outs, matrix.ins, bits, group)

    def rescore(
        self,
        logits: Float[Tensor, "*rows out"],
        x: Float[Tensor, "*rows in"],
        weight: Float[Tensor, "out in"] | Interleaved | StoredMatrix,
        bias: Float[Tensor, " out"] | None = None,
        *,
        count: int,
    ) -> None:
        """Replace the largest entries of each row of logits by those of x W^T + b.

        The weight is plain, in C's order, or stored as in a file: rows of it are read one by one then.

        Logits are contiguous; NaN stays. `count` entries of a row are replaced, at most as many as there are.
        """
        x, (outs, ins) = x.contiguous(), (logits.shape[-1], x.shape[-1])
        blocked, kind = isinstance(weight, Interleaved), 0
        if isinstance(weight, StoredMatrix):
            if tuple(weight.shape) != (outs, ins) or not weight.is_in_order:
                raise ValueError(f"expected a weight of {outs} x {ins} in order, got {tuple(weight.shape)}")
            numbers, kind = weight.content, weight.type
        else:
            numbers = weight.blocks if isinstance(weight, Interleaved) else weight
            require("weight", numbers, self.dtype, Interleaved.shape(outs, ins, self._unit) if blocked else (outs, ins))
        require("x", x, self.dtype, (*logits.shape[:-1], ins))
        require("logits", logits, self.dtype)
        if bias is not None:
            require("bias", bias, self.dtype, (outs,))
        if not 1 <= count <= outs:
            raise ValueError(f"expected 1 to {outs} outputs to compute again, got {count}")
        rows, threads = logits.numel() // outs, torch.get_num_threads()
        places = torch.empty(rows * count, dtype=torch.int64)
        size = 2 * -(-outs // NEIGHBOURS) + 3 * count * NEIGHBOURS
        memory = torch.empty(threads * size, dtype=torch.float32)
        addresses = x.data_ptr(), numbers.data_ptr(), _address(bias), logits.data_ptr()
        sizes = rows, outs, ins, count, int(blocked), kind, size
        self._rescore(*addresses, places.data_ptr(), memory.data_ptr(), *sizes, threads)

    def norm(
        self, x: Float[Tensor, "*rows dim"], scaled: Float32[Tensor, " dim"], least: float
    ) -> Float[Tensor, "*rows dim"]:
        """x scaled / sqrt(sum x^2 + least) of each row."""
        x, dim = x.contiguous(), x.shape[-1]
        require("x", x, self.dtype)
        require("scaled", scaled, torch.float32, (dim,))
        y = torch.empty_like(x)
        rows = x.numel() // max(dim, 1)
        self._norm(x.data_ptr(), scaled.data_ptr(), y.data_ptr(), rows, dim, least, torch.get_num_threads())
        return y

    def gated(self, x: Float[Tensor, "*rows both"], activation: str = "silu") -> Float[Tensor, "*rows dim"]:
        """act(gate) up, where each row holds gate and up; the activation is one of ACTIVATIONS."""
        x, dim = x.contiguous(), x.shape[-1] // 2
        require("x", x, self.dtype, (*x.shape[:-1], 2 * dim))
        y = x.new_empty((*x.shape[:-1], dim))
        sizes = y.numel() // max(dim, 1), dim, ACTIVATIONS.index(activation)
        self._gated(x.data_ptr(), y.data_ptr(), *sizes, torch.get_num_threads())
        return y

    def delta_rule(
        self,
        queries: Float32[Tensor, "rows tokens key_heads dim"],
        keys: Float32[Tensor, "rows tokens key_heads dim"],
        values: Float32[Tensor, "rows tokens heads size"],
        decays: Float32[Tensor, "rows tokens heads *dim"],
        betas: Float32[Tensor, "rows tokens heads"] | None,
        state: Float32[Tensor, "rows heads dim size"] | None = None,
        *,
        unit: bool = True,
    ) -> tuple[Float32[Tensor, "rows tokens heads size"], Float32[Tensor, "rows heads dim size"]]:
        """The gated delta rule, token by token: outputs, and the state at the end (arXiv 2412.06464, equation 10).

        Args:
            queries: one head for several of the values' heads; scaled by 1 / sqrt(dim) where there are betas.
            keys: as queries.
            values: what is remembered.
            decays: logarithms, for a head or for each of its key channels.
            betas: how much of a value replaces what its key recalls; None where values are added and nothing is
                replaced, as in a state space (arXiv 2405.21060, equation 1).
            state: to begin with; zeros by default. It is not changed.
            unit: queries and keys are first brought to length one.
        """
        (rows, tokens, key_heads, dim), (heads, size) = keys.shape, values.shape[2:]
        if not 1 <= dim <= MOST_STATE or not key_heads or heads % key_heads:
            raise ValueError(
                f"expected keys of up to {MOST_STATE} numbers in heads that divide {heads}, got {keys.shape}"
            )
        of_head = (rows, tokens, heads)
        by_channel = decays.dim() == 4
        queries, keys, values, decays = (x.contiguous() for x in (queries, keys, values, decays))
        require("queries", queries, torch.float32, keys.shape)
        require("keys", keys, torch.float32)
        require("values", values, torch.float32, (*of_head, size))
        require("decays", decays, torch.float32, (*of_head, dim) if by_channel else of_head)
        if betas is not None:
            betas = betas.contiguous()
            require("betas", betas, torch.float32, of_head)
        if state is not None:
            state = state.contiguous()
            require("state", state, torch.float32, (rows, heads, dim, size))
        out, end = torch.empty_like(values), values.new_empty((rows, heads, dim, size))
        given = (queries, keys, values, decays, betas, state, end, out)
        sizes = (rows, tokens, key_heads, heads, dim, size, dim if by_channel else 1, int(unit))
        self._delta_rule(*map(_address, given), *sizes, torch.get_num_threads())
        return out, end

    def attend(
        self,
        fused: Float[Tensor, "tokens heads dim"],
        given: AttentionArguments,
        keys: Float[Tensor, "slots key_heads capacity dim"] | Int8[Tensor, "slots key_heads capacity dim"],
        values: Float[Tensor, "slots key_heads capacity dim"] | Int8[Tensor, "slots key_heads capacity dim"],
        scales: Float32[Tensor, "slots both_heads capacity 1"] | None = None,
    ) -> Float[Tensor, "tokens inner"]:
        """Rotate queries and keys, write keys and values to the cache, and attend; outputs of padding are zeros.

        Queries, keys and values of every token are contiguous, and overwritten. The layer's buffers have the shape that
        `given` was made with; with 8 bits where there are scales, those of keys and behind them those of values; else
        in bfloat16 where `given` is of float32 rows and halves them.
        """
        tokens, heads = given.tokens, given.heads + 2 * given.key_heads
        require("fused", fused, self.dtype, (tokens, heads, given.dim))
        self._require_buffers(given, keys, values, scales)
        out = fused.new_empty((tokens, given.heads * given.dim))
        given.fused = fused.data_ptr()
        given.out = out.data_ptr()
        given.keys = keys.data_ptr()
        given.values = values.data_ptr()
        given.scales = _address(scales)
        self._attend(ctypes.addressof(given), torch.get_num_threads())
        return out

    def _require_buffers(self, given: AttentionArguments, keys: Tensor, values: Tensor, scales: Tensor | None) -> None:
        if not self.attends(given.dim):
            raise ValueError(f"expected heads of size 1 to {MOST_DIM}, got {given.dim}")
        dtype = torch.int8 if scales is not None else torch.bfloat16 if given.halved else self.dtype
        shape = (keys.shape[0], given.key_heads, given.capacity, given.dim)
        require("keys", keys, dtype, shape)
        require("values", values, dtype, shape)
        if scales is not None:
            require("scales", scales, torch.float32, (keys.shape[0], 2 * given.key_heads, given.capacity, 1))

    def layers(
        self,
        stack: LayerStack,
        x: Float[Tensor, "tokens size"],
        given: ctypes.Array[AttentionArguments],
        buffers: tuple[ctypes.Array[ctypes.c_void_p], ...],
        work: Float[Tensor, " elements"],
        sequences: Sequences | None = None,
        first: int = 0,
        embedded: Float[Tensor, "tokens numbers"] | None = None,
    ) -> None:
        """Run decoder layers one after another; x is overwritten by the last layer's output.

        Args:
            stack: the layers.
            x: hidden states.
            given: their attentions; `stack` says which one a layer has.
            buffers: addresses of each layer's keys, of its values, and of its scales.
            work: working memory, of the size that `LayerStack.work` returns.
            sequences: those of the pass, for layers with recurrent states.
            first: number of the first layer in the model.
            embedded: what layers with embeddings of their own read of each token.
        """
        tokens = given[0].tokens
        require("x", x, self.dtype, (tokens, stack.size))
        require("work", work, self.dtype)
        sizes = [each.dim for each in given]
        if len(given) < stack.attentions or any(each.tokens != tokens for each in given):
            raise ValueError(f"{len(given)} attentions of {tokens} tokens, of {stack.attentions}")
        if work.numel() < stack.work(given) or not all(map(self.attends, sizes)):
            raise ValueError(f"{work.numel()} elements of work, of {stack.work(given)}; heads of size {sizes}")
        found = [len(each) for each in buffers]
        if found != [len(stack)] * 3:
            raise ValueError(f"{found} buffers of keys, values and scales for {len(stack)} layers")
        states: tuple[int | None, int | None, int] = (None, None, 0)
        if sequences is not None:
            sequences.require_fitting(tokens, first + len(stack))
            states = sequences.arguments(first)
        elif stack.keeps_states:
            raise ValueError("layers with recurrent states, and no sequences")
        stride = 0
        if embedded is not None:
            stride = embedded.shape[-1]
            require("embedded", embedded, self.dtype, (tokens, stride))
        if stride < stack.embedded:
            raise ValueError(f"layers that read {stack.embedded} numbers of embeddings of a token, of {stride}")
        self._layers(
            stack.array,
            len(stack),
            given,
            stack.which,
            *buffers,
            *states,
            _address(embedded),
            stride,
            x.data_ptr(),
            work.data_ptr(),
            torch.get_num_threads(),
        )

    # --- rows of scores and of probabilities ------------------------------------------------------------------------

    def softmax(self, x: Float32[Tensor, "*rows dim"]) -> Float32[Tensor, "*rows dim"]:
        """Softmax of each row, in new memory."""
        return self._by_row(self._softmax, x)

    def greedy(self, x: Float32[Tensor, "*rows dim"]) -> Float32[Tensor, "*rows dim"]:
        """1 at the first largest entry of each row, 0 elsewhere, in new memory."""
        return self._by_row(self._greedy, x)

    @staticmethod
    def _by_row(function: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        require("x", x, torch.float32)
        y, dim = torch.empty_like(x), x.shape[-1]
        function(x.data_ptr(), y.data_ptr(), x.numel() // max(dim, 1), dim, torch.get_num_threads())
        return y

    def legal(self, x: Float[Tensor, "*rows dim"]) -> bool:
        """Whether no entry is NaN or +inf, and no row all -inf."""
        x, dim = x.contiguous(), x.shape[-1]
        require("x", x, self.dtype)
        return bool(self._legal(x.data_ptr(), x.numel() // max(dim, 1), dim))

    def spread(
        self, x: Float32[Tensor, "rows width"], ids: Int[Tensor, " width"], dim: int
    ) -> Float32[Tensor, "rows dim"]:
        """Rows of width `dim` with x at the columns `ids`, which all differ, and zeros elsewhere."""
        x, (rows, width) = x.contiguous(), x.shape
        require("x", x, torch.float32)
        ids = ids.to(torch.int64).contiguous()
        require("ids", ids, torch.int64, (width,))
        y = x.new_empty((rows, dim))
        if not self._spread(x.data_ptr(), ids.data_ptr(), y.data_ptr(), rows, width, dim):
            raise ValueError(f"columns {ids.tolist()[:3]}... are not all of 0 to {dim - 1}")
        return y

    def block(
        self,
        tokens: Int[Tensor, "B n"],
        q: Float32[Tensor, "B n V"] | None,
        p: Float32[Tensor, "B m V"],
        lengths: Int[Tensor, " B"],
    ) -> tuple[Float64[Tensor, "B n"], Float64[Tensor, "B n"]]:
        """P_i and h_i of block verification; see `functional.chain.block_acceptance`.

        Source: Block Verification, arXiv 2403.10444, Algorithm 2.
        """
        (batch, places), (_, more, vocab) = tokens.shape, p.shape
        tokens, lengths = (each.to(torch.int64).contiguous() for each in (tokens, lengths))
        p, q = p.contiguous(), None if q is None else q.contiguous()
        require("tokens", tokens, torch.int64)
        require("p", p, torch.float32, (batch, max(more, places), vocab))
        require("lengths", lengths, torch.int64, (batch,))
        if q is not None:
            require("q", q, torch.float32, (batch, places, vocab))
        running, h = (torch.empty(tokens.shape, dtype=torch.float64) for _ in range(2))
        given = tokens.data_ptr(), _address(q), p.data_ptr(), lengths.data_ptr()
        if not self._block(*given, running.data_ptr(), h.data_ptr(), batch, places, more, vocab):
            raise ValueError(f"lengths {lengths.tolist()} of {places}, or drafted tokens outside 0 to {vocab - 1}")
        return running, h

    def residual(
        self,
        p: Float32[Tensor, " V"],
        q: Float32[Tensor, " V"] | None,
        drafted: int,
        scale: float,
        out: Float32[Tensor, " V"],
    ) -> None:
        """Write max(scale p - q, 0) to `out`, or p if that is 0 everywhere."""
        require("p", p, torch.float32)
        require("out", out, torch.float32, p.shape)
        if q is not None:
            require("q", q, torch.float32, p.shape)
        self._residual(p.data_ptr(), _address(q), drafted, scale, out.data_ptr(), p.shape[-1])

    def inverse_cdf(self, weights: Float32[Tensor, "*rows vocab"], u: Float[Tensor, "*rows"]) -> Int[Tensor, "*rows"]:
        """The first index of each row whose cumulative weight exceeds u times the total; see `rng.inverse_cdf`."""
        weights, goals = weights.contiguous(), u.to(torch.float64).contiguous()
        require("weights", weights, torch.float32)
        require("u", goals, torch.float64, weights.shape[:-1])
        dim = weights.shape[-1]
        found = torch.empty(u.shape, dtype=torch.int64)
        running = torch.empty(BLOCK + dim // BLOCK + 1, dtype=torch.float64)
        addresses = (each.data_ptr() for each in (weights, goals, found, running))
        self._inverse_cdf(*addresses, u.numel(), dim)
        return found

    def race(self, weights: Float32[Tensor, "*rows vocab"], keys: Int64[Tensor, "*rows"]) -> Int[Tensor, "*rows"]:
        """The index of each row that is first in an exponential race; see `noise.first_arrival`."""
        weights, keys = weights.contiguous(), keys.contiguous()
        require("weights", weights, torch.float32)
        require("keys", keys, torch.int64, weights.shape[:-1])
        rows, dim = keys.numel(), weights.shape[-1]
        pieces = rows * -(-dim // PIECE)
        found, times, ids = torch.empty_like(keys), torch.empty(pieces, dtype=torch.float64), keys.new_empty(pieces)
        addresses = (each.data_ptr() for each in (weights, keys, found, times, ids))
        self._race(*addresses, rows, dim, torch.get_num_threads())
        return found
