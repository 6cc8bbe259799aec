"""Matrices of checkpoints of GPTQ, AWQ, compressed-tensors and bitsandbytes, in their own numbers.

Words of the first three are unpacked once into groups of a scale, the number that stands for 0, and 4 bits for each
input (c/ggml.h); numbers of 8 bits and bitsandbytes' places of 4 bits in a table of floats keep float32 scales.
Inputs are what the layouts say (`ggml.INPUTS`): for compressed-tensors' W8A8 what its own products make of them, for
NF4 and FP4 floats, elsewhere 8 bits with a scale for each 32.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int, Int8, Int64, UInt8
from torch import Tensor

from draftproof.backends.lean.checkpoint import Weights
from draftproof.backends.lean.traits import UnreadError
from draftproof.backends.loading.gguf_tensors import refuse_inexact
from draftproof.backends.products.packed_linear import dense as dense_of
from draftproof.native.ggml import AS_FLOATS, INT8, INT8_BY_ROW, LAYOUTS, LEVELS, WORDS, StoredMatrix

METHODS = ("gptq", "awq", "compressed-tensors", "bitsandbytes")
_OF_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)  # places of a word's outputs 0 to 7


class PackedWeights(Weights):
    """The tensors of a checkpoint; matrices whose weights are packed have the layout of C.

    Args:
        dense: whether packed matrices whose inputs would be rounded are read as the numbers that they stand for.
    """

    def __init__(self, folder: Path, fields: Mapping[str, Any], dtype: torch.dtype, *, dense: bool) -> None:
        super().__init__(folder, dtype, torch.device("cpu"))
        self.fields = fields
        self.dtype = dtype
        self._dense = dense
        self._method = _method_of(fields)
        self.bits = self._method.bits
        ending = f".{self._method.marker}"
        stems = sorted(name.removesuffix(ending) for name in self._files if name.endswith(ending))
        if not stems:
            raise UnreadError(f"it has no tensor whose name ends with {ending}: none of its matrices is packed")
        self._experts = _by_layer(stems)
        apart = {stem for every in self._experts.values() for stem in every}
        # names of the packed matrices, without ".weight"; all experts of a layer have one name
        self.packed = frozenset({*stems, *self._experts} - apart)
        self._places = {_RENAMED.sub(".mlp.", name): name for name in self._files}

    @property
    def names(self) -> Collection[str]:
        """Of all tensors, as they are stored."""
        return self._files.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._files or name in self._places or self._is_packed(name)

    def __getitem__(self, name: str) -> Any:
        """A tensor, or a matrix whose weights were packed."""
        if not self._is_packed(name):
            return super().__getitem__(self._places[name])
        made = self.matrix(name.removesuffix(".weight"))
        return dense_of(made) if self._dense and LAYOUTS[made.type].inputs != AS_FLOATS else made

    def matrix(self, stem: str) -> StoredMatrix:
        """A packed matrix; those of all experts of a layer as one."""
        if stem not in self._experts:
            return self._method.matrix(self, stem)
        every = [self._method.matrix(self, each) for each in self._experts[stem]]
        if len({(each.type, each.ins, each.outs) for each in every}) > 1 or any(
            each.inputs is not None for each in every
        ):
            raise UnreadError(f"its {stem} has several forms or orders of inputs")
        content = torch.cat([each.content for each in every])
        return replace(every[0], content=content, outs=len(every) * every[0].outs)

    def state(self) -> dict[str, torch.Tensor]:
        """Empty tensors with the shapes of all weights, under transformers' names."""
        apart = [stem for every in self._experts.values() for stem in every]
        found = {f"{stem}.weight": self._method.shape(self, stem) for stem in self.packed - set(self._experts)}
        for stem, every in self._experts.items():
            found[f"{stem}.weight"] = (len(every), *self._method.shape(self, every[0]))
        kinds = (self._method.marker, *self._method.beside)
        of_packed = {f"{stem}.{kind}" for stem in (*self.packed, *apart) for kind in kinds}
        for key, place in self._places.items():
            if place not in of_packed and key.rpartition(".")[2] != "inv_freq":
                shape = self.stored_shape(place)
                found[key] = shape[1:] if key.endswith(".shared_expert_gate.weight") else shape  # one output
        return {key: torch.empty(shape, device="meta") for key, shape in found.items()}

    def check(self) -> None:
        """Compare native products with one of the packed matrices with torch's."""
        refuse_inexact(self.matrix(min(self.packed)))

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor as it is stored."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def plain(self, name: str, dtype: torch.dtype | None = None, numbers: int | None = None) -> Tensor:
        """A tensor as it is stored, which must have this dtype and so many numbers."""
        if name not in self._files:
            raise UnreadError(f"it has no tensor {name}")
        found: Tensor = self._files[name].get_tensor(name)
        if dtype not in (None, found.dtype) or numbers not in (None, found.numel()):
            wanted = f"{'' if numbers is None else f'{numbers} numbers of '}{dtype or 'any type'}"
            raise UnreadError(f"its {name} has {found.numel()} numbers of {found.dtype}, expected {wanted}")
        return found

    def optional_plain(self, name: str, numbers: int) -> Tensor | None:
        """The same, with so many numbers of any type, if it is there."""
        return self.plain(name, numbers=numbers) if name in self._files else None

    def _is_packed(self, name: str) -> bool:
        return name.endswith(".weight") and name.removesuffix(".weight") in self.packed


_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)")
_RENAMED = re.compile(r"\.block_sparse_moe\.")  # Mixtral's name of a mixture
_OF_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def _by_layer(stems: Iterable[str]) -> dict[str, list[str]]:
    """Names of the matrices of experts, by the lean forward's name for those of all experts of a layer.

    Raises:
        UnreadError: an expert is missing.
    """
    found: dict[str, dict[int, str]] = {}
    for stem in stems:
        if (parts := _EXPERT.fullmatch(stem)) is not None:
            owner, number, kind = parts.groups()
            name = f"{_RENAMED.sub('.mlp.', owner)}.{_OF_MIXTRAL.get(kind, kind)}"
            found.setdefault(name, {})[int(number)] = stem
    for name, every in found.items():
        if sorted(every) != list(range(len(every))):
            raise UnreadError(f"its {name} lacks experts before number {max(every)}")
    return {name: [every[number] for number in range(len(every))] for name, every in found.items()}


def grouped(
    numbers: UInt8[Tensor, "out in"],
    zeros: UInt8[Tensor, "out groups"],
    scales: Float[Tensor, "out groups"],
    dtype: torch.dtype,
    group_of: Int[Tensor, " in"] | None = None,
) -> StoredMatrix:
    """A matrix in groups as C reads it: numbers of 4 bits, and of each group a scale and the number that stands for 0.

    `group_of` is the group of each input, where neighbours may be in different ones (GPTQ's act-order). Inputs of a
    group are put side by side then, and products take them in that order.

    Raises:
        UnreadError: scales that float16 does not hold, or sizes of groups that are not known.
    """
    outs, ins = numbers.shape
    groups = scales.shape[1]
    inputs = None if group_of is None else _grouped_inputs(group_of.long(), groups)
    numbers = numbers if inputs is None else numbers[:, inputs]
    half = scales.to(torch.float16)
    if not torch.equal(half.to(scales.dtype), scales):
        raise UnreadError("float16 does not hold its scales exactly")
    size = ins // groups
    if size > max(WORDS) and size % max(WORDS) == 0:  # a scale for a whole row, or for larger groups
        more = size // max(WORDS)
        half, zeros, size = half.repeat_interleave(more, 1), zeros.repeat_interleave(more, 1), max(WORDS)
    if size not in WORDS or ins % size:
        raise UnreadError(f"its groups have {size} inputs, not {', '.join(map(str, WORDS))}")
    both = numbers.view(outs, -1, size // 2, 2)
    bytes_of = both[..., 0] | both[..., 1] << 4
    parts = (half.contiguous().view(torch.uint8).view(outs, -1, 2), zeros.unsqueeze(-1), bytes_of)
    return StoredMatrix(torch.cat(parts, -1).flatten(), outs, ins, WORDS[size], dtype, inputs=inputs)


def _grouped_inputs(group_of: Int64[Tensor, " in"], groups: int) -> Int64[Tensor, " in"] | None:
    """All inputs, group by group; None where they are so already."""
    sizes = torch.bincount(group_of.clamp(min=0), minlength=groups)
    if bool((group_of < 0).any()) or len(sizes) != groups or bool((sizes != len(group_of) // groups).any()):
        raise UnreadError(f"its {len(group_of)} inputs are not in {groups} groups of one size")
    order = group_of.argsort(stable=True)
    return None if torch.equal(order, torch.arange(len(order))) else order


def in_bytes(
    numbers: Int8[Tensor, "out in"], scales: Float[Tensor, "out groups"], kind: int, dtype: torch.dtype
) -> StoredMatrix:
    """A matrix of signed numbers of 8 bits as C reads it, with a scale for each row or each 128 inputs or more."""
    (outs, ins), groups, size = numbers.shape, scales.shape[1], LAYOUTS[kind].elements
    if ins % size or (groups > 1 and (ins % groups or ins // groups % LAYOUTS[kind].piece)):
        raise UnreadError(f"its rows have {ins} inputs in {groups} groups, which are not read here with 8 bits")
    each = scales.float().repeat_interleave(ins // size // groups, 1)
    parts = each.view(torch.uint8).view(outs, -1, 4), numbers.contiguous().view(torch.uint8).view(outs, -1, size)
    return StoredMatrix(torch.cat(parts, -1).flatten(), outs, ins, kind, dtype)


# --- the methods -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Method:
    """How a method stores matrices."""

    bits: int  # of a number
    marker: str  # kind of a tensor that only packed matrices have
    beside: tuple[str, ...]  # kinds of their further tensors
    shape: Callable[[PackedWeights, str], tuple[int, ...]]  # of a matrix by its name without a kind, [out, in]
    matrix: Callable[[PackedWeights, str], StoredMatrix]  # by that name


def _method_of(fields: Mapping[str, Any]) -> _Method:
    find = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed, "bitsandbytes": _bitsandbytes}
    return find[fields["quant_method"]](fields)


def _numbers(packed: Int[Tensor, "rows words"], bits: int = 4) -> UInt8[Tensor, "rows numbers"]:
    """The numbers in each word, the lowest first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((packed.unsqueeze(-1) >> shifts) & (1 << bits) - 1).to(torch.uint8).flatten(1)


def _gptq(fields: Mapping[str, Any]) -> _Method:
    if fields.get("bits") != 4:
        raise UnreadError(f"its weights have {fields.get('bits')} bits")
    if fields.get("dynamic"):
        raise UnreadError("its layers have forms of their own (dynamic)")
    return _Method(4, "qweight", ("qzeros", "scales", "g_idx"), _shape_gptq, _matrix_gptq)


def _shape_gptq(weights: PackedWeights, stem: str) -> tuple[int, ...]:
    words, outs = weights.stored_shape(f"{stem}.qweight")
    return outs, 8 * words


def _matrix_gptq(weights: PackedWeights, stem: str) -> StoredMatrix:
    numbers = _numbers(weights.plain(f"{stem}.qweight").t().contiguous())
    scales = weights.plain(f"{stem}.scales").t().contiguous()
    missing = 0 if weights.fields.get("checkpoint_format") == "gptq_v2" else 1
    zeros = _numbers(weights.plain(f"{stem}.qzeros")).t() + missing
    return grouped(numbers, zeros, scales, weights.dtype, weights.optional_plain(f"{stem}.g_idx", numbers.shape[1]))


def _awq(fields: Mapping[str, Any]) -> _Method:
    version = str(fields.get("version", "gemm")).lower()
    if fields.get("bits") != 4 or version != "gemm":
        raise UnreadError(f"its weights have {fields.get('bits')} bits in the form {version}")
    return _Method(4, "qweight", ("qzeros", "scales"), _shape_awq, _matrix_awq)


def _shape_awq(weights: PackedWeights, stem: str) -> tuple[int, ...]:
    ins, words = weights.stored_shape(f"{stem}.qweight")
    return 8 * words, ins


def _matrix_awq(weights: PackedWeights, stem: str) -> StoredMatrix:
    def outputs(packed: Tensor) -> Tensor:
        words = _numbers(packed).view(len(packed), -1, 8)
        return words[..., list(_OF_AWQ)].flatten(1).t().contiguous()

    numbers, zeros = (outputs(weights.plain(f"{stem}.{kind}")) for kind in ("qweight", "qzeros"))
    return grouped(numbers, zeros, weights.plain(f"{stem}.scales").t().contiguous(), weights.dtype)


_PACKED, _BYTES, _ZEROS, _GROUPS = "pack-quantized", "int-quantized", "weight_zero_point", "weight_g_idx"
_DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
"""Inputs of W8A8: in 8 bits by a scale that each row gets when it is there."""


def _compressed(fields: Mapping[str, Any]) -> _Method:
    form, groups = fields.get("format"), (fields.get("config_groups") or {}).values()
    if form not in (_PACKED, _BYTES) or not groups:
        raise UnreadError(f"its form is {form!r}, not {_PACKED!r} or {_BYTES!r}")
    if fields.get("kv_cache_scheme"):
        raise UnreadError("its keys and values are quantized")
    legal = (4, 8) if form == _PACKED else (8,)
    found = set()
    for group in groups:
        weights, inputs = group.get("weights") or {}, group.get("input_activations")
        if weights.get("num_bits") not in legal or weights.get("type") != "int":
            raise UnreadError(f"its weights are not whole numbers of {' or '.join(map(str, legal))} bits")
        if weights["num_bits"] == 8 and not weights.get("symmetric"):
            raise UnreadError("its weights of 8 bits are not symmetric")
        if inputs and (form == _PACKED or any(inputs.get(name) != value for name, value in _DYNAMIC.items())):
            raise UnreadError("its inputs are rounded otherwise than in 8 bits with a scale for each row")
        found.add((weights["num_bits"], bool(inputs)))
    if len(found) > 1:  # a group names its layers by patterns, which nothing here reads
        raise UnreadError("its layers have several forms")
    ((bits, rounded),) = found
    if form == _BYTES:
        # Where inputs are rounded by row (W8A8), that is a part of the model, so the product does the same.
        matrix = functools.partial(_matrix_bytes, kind=INT8_BY_ROW if rounded else INT8)
        return _Method(8, "weight_scale", ("weight", _ZEROS), _shape_plain, matrix)
    beside = ("weight_scale", "weight_shape", *((_ZEROS, _GROUPS) if bits == 4 else ()))
    return _Method(bits, "weight_packed", beside, _shape_compressed, functools.partial(_matrix_compressed, bits=bits))


def _shape_plain(weights: PackedWeights, stem: str) -> tuple[int, ...]:
    return weights.stored_shape(f"{stem}.weight")


def _matrix_bytes(weights: PackedWeights, stem: str, kind: int) -> StoredMatrix:
    numbers = weights.plain(f"{stem}.weight", torch.int8)
    scales = weights.plain(f"{stem}.weight_scale", numbers=len(numbers))
    if (zeros := f"{stem}.{_ZEROS}") in weights and weights.plain(zeros).any():
        raise UnreadError(f"its {zeros} is not 0")
    return in_bytes(numbers, scales.view(-1, 1), kind, weights.dtype)


def _shape_compressed(weights: PackedWeights, stem: str) -> tuple[int, ...]:
    outs, ins = weights.plain(f"{stem}.weight_shape").tolist()
    return outs, ins


def _matrix_compressed(weights: PackedWeights, stem: str, bits: int) -> StoredMatrix:
    outs, ins = _shape_compressed(weights, stem)
    numbers = _numbers(weights.plain(f"{stem}.weight_packed"), bits)[:, :ins].contiguous()
    scales = weights.plain(f"{stem}.weight_scale")
    if bits == 8:
        return in_bytes((numbers ^ 128).view(torch.int8), scales, INT8, weights.dtype)
    zeros, place = torch.full(scales.shape, 8, dtype=torch.uint8), f"{stem}.{_ZEROS}"
    if place in weights:  # words of neighbouring outputs
        zeros = _numbers(weights.plain(place, torch.int32).t().contiguous())[:, :outs].t().contiguous()
    if zeros.shape != scales.shape:
        raise UnreadError(f"its {place} is {list(zeros.shape)}, not {list(scales.shape)} as its scales")
    return grouped(numbers, zeros, scales, weights.dtype, weights.optional_plain(f"{stem}.{_GROUPS}", ins))


def _bitsandbytes(fields: Mapping[str, Any]) -> _Method:
    if fields.get("load_in_4bit"):
        kinds = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", *map(_STATE.format, LEVELS))
        beside = ("weight", *(f"weight.{kind}" for kind in kinds))
        return _Method(4, "weight.quant_map", beside, _shape_levels, _matrix_levels)
    if not fields.get("load_in_8bit"):
        raise UnreadError("it has no load_in_4bit or load_in_8bit")
    return _Method(8, "SCB", ("weight", "weight_format"), _shape_plain, _matrix_scb)


_STATE = "quant_state.bitsandbytes__{}"


def _state_of(weights: PackedWeights, stem: str) -> tuple[str, dict[str, Any]]:
    """The name of a matrix's table, and what the checkpoint says of the matrix."""
    for kind in LEVELS:
        name = f"{stem}.weight.{_STATE.format(kind)}"
        if name in weights:
            try:
                state = json.loads(bytes(weights.plain(name, torch.uint8).tolist()))
                (outs, ins), size = state["shape"], state["blocksize"]
                return kind, {**state, "shape": (int(outs), int(ins)), "blocksize": int(size)}
            except (KeyError, TypeError, ValueError) as cause:
                raise UnreadError(f"its {name} is no state of bitsandbytes") from cause
    raise UnreadError(f"it has no tensor {stem}.weight.{_STATE.format(' or '.join(LEVELS))}")


def _shape_levels(weights: PackedWeights, stem: str) -> tuple[int, ...]:
    shape: tuple[int, ...] = _state_of(weights, stem)[1]["shape"]
    return shape


def _matrix_levels(weights: PackedWeights, stem: str) -> StoredMatrix:
    kind, state = _state_of(weights, stem)
    (outs, ins), size, at = state["shape"], state["blocksize"], f"{stem}.weight"
    group = LAYOUTS[LEVELS[kind]].elements
    if size < group or size % group or ins % size:
        raise UnreadError(f"its rows of {ins} inputs have blocks of {size}, which are not whole ones of {group}")
    if not torch.equal(weights.plain(f"{at}.quant_map"), _table(kind)):
        raise UnreadError(f"its {at}.quant_map is not the table {kind} of bitsandbytes")
    scales = weights.plain(f"{at}.absmax", numbers=outs * ins // size)
    if f"{at}.nested_absmax" in weights:  # rounded to 8 bits themselves
        blocks = weights.plain(f"{at}.nested_absmax", torch.float32)
        table = weights.plain(f"{at}.nested_quant_map", torch.float32, numbers=256)
        among = blocks.repeat_interleave(state["nested_blocksize"])[: len(scales)]
        scales = table[scales.long()] * among + state["nested_offset"]
    each = scales.float().repeat_interleave(size // group)
    places = weights.plain(at).contiguous().view(torch.uint8)  # `quant_storage` may be another type
    if places.numel() != outs * ins // 2:
        raise UnreadError(f"its {at} has {places.numel()} bytes, expected {outs * ins // 2}")
    content = torch.cat((each.view(torch.uint8).view(-1, 4), places.view(-1, group // 2)), -1).flatten()
    return StoredMatrix(content, outs, ins, LEVELS[kind], weights.dtype)


@functools.cache
def _table(kind: str) -> Float[Tensor, " 16"]:
    """The floats of a table, as C has them: those of a row with each place, and a scale of 1."""
    places = torch.arange(0, 64, 2, dtype=torch.uint8) % 16
    content = torch.cat((torch.ones(1).view(torch.uint8), places << 4 | places + 1))
    return dense_of(StoredMatrix(content, 1, 64, LEVELS[kind], torch.float32))[0, :16]


def _matrix_scb(weights: PackedWeights, stem: str) -> StoredMatrix:
    """Its numbers alone: bitsandbytes multiplies columns with large inputs, in any row of a batch, in floats."""
    numbers = weights.plain(f"{stem}.weight", torch.int8)
    form = f"{stem}.weight_format"
    if form in weights and int(weights.plain(form, numbers=1)) != 0:
        raise UnreadError(f"its {form} is not that of plain rows")
    scales = weights.plain(f"{stem}.SCB", torch.float32, numbers=len(numbers)) / 127
    return in_bytes(numbers, scales.view(-1, 1), INT8, weights.dtype)
