"""The tensors of a GGUF file in its own numbers, and what metadata say of a model of any architecture."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftproof import native
from draftproof.backends.lean.traits import Experts, UnreadError
from draftproof.backends.loading.gguf_rotary import ModelMetadata
from draftproof.backends.products.packed_linear import dense, why_not_exact
from draftproof.models.gguf_file import FLOATS, GGUFFile, TensorEntry
from draftproof.native.ggml import SIXTEEN_BITS, TYPES, StoredMatrix
from draftproof.native.operations import MOST_EXPERTS

_STORED = {**TYPES, **SIXTEEN_BITS}  # types of matrices that stay in the file until products are made of them
_SOFTMAX, _SOFTMAX_OF_CHOSEN = 1, 3  # kinds of routers, by the number that files have for them


class FileTensors:
    """The tensors of a file, by the names that it has for them.

    Args:
        dtype: of what products make.
        dense: whether matrices are read into memory, as the numbers that they stand for.
    """

    def __init__(self, file: GGUFFile, dtype: torch.dtype, *, dense: bool) -> None:
        require_native(dtype)
        self.file = file
        self.tick: Callable[[int], object] | None = None  # told how many matrices were asked for
        self._asked = 0
        self._dtype = dtype
        self._dense = dense
        unknown = {entry.type for entry in file.tensors.values()} - set(TYPES) - set(FLOATS)
        if unknown:
            raise UnreadError(f"it has tensors of ggml's types {sorted(unknown)}, which are not read here")

    @property
    def bits(self) -> int | None:
        """Of a weight that is not in `dtype`, on the mean, rounded down; None where all are."""
        sizes = [
            (math.prod(entry.shape), _STORED[entry.type].size * 8 / _STORED[entry.type].elements)
            for entry in self._matrices
            if not self._stored(entry).is_plain
        ]
        return int(sum(count * bits for count, bits in sizes) / sum(count for count, _ in sizes)) if sizes else None

    def check(self) -> None:
        """Compare native products of some rows of each type with torch's."""
        for entry in {entry.type: entry for entry in self._matrices}.values():
            refuse_inexact(self._stored(entry))

    @property
    def _matrices(self) -> list[TensorEntry]:
        return [entry for entry in self.file.tensors.values() if _is_stored(entry)]

    def matrix(self, place: str, rows: Tensor | None = None) -> StoredMatrix | Tensor:
        """A matrix; one of blocks, or of 16 bits, stays in the file. `rows` says which stored row each output is."""
        self._asked += 1
        if self.tick is not None:
            self.tick(self._asked)
        entry = self.file.tensors[place]
        if place.endswith(".bias") or not _is_stored(entry):
            made = self.floats(place)
            return (made if rows is None else made[rows]).to(self._dtype)
        matrix = self._stored(entry)
        matrix = matrix if rows is None else matrix.in_order(rows)
        return dense(matrix).view(entry.shape) if self._dense else matrix

    def floats(self, place: str) -> Tensor:
        """A tensor in float32, whatever its type in the file."""
        return floats_of(self.file, place)

    def _stored(self, entry: TensorEntry) -> StoredMatrix:
        if len(entry.shape) not in (2, 3):
            raise UnreadError(f"a tensor of {len(entry.shape)} dimensions has ggml's type {entry.type}")
        *outs, ins = entry.shape
        return StoredMatrix(entry.content, math.prod(outs), ins, entry.type, self._dtype, release=entry.release)


def _is_stored(entry: TensorEntry) -> bool:
    """Whether a tensor is a matrix that stays in the file; tensors of one dimension are read as floats."""
    return entry.type in TYPES or (entry.type in SIXTEEN_BITS and len(entry.shape) > 1)


def dtype_of(file: GGUFFile) -> torch.dtype:
    """The dtype of hidden states where none is named: bfloat16 for matrices of bfloat16, as with other checkpoints."""
    found = {FLOATS.get(entry.type) for entry in file.tensors.values() if len(entry.shape) > 1}
    return torch.bfloat16 if found - {torch.float32} == {torch.bfloat16} else torch.float32


def floats_of(file: GGUFFile, place: str) -> Tensor:
    """A tensor of floats, in float32."""
    entry = file.tensors[place]
    if entry.type not in FLOATS:
        raise UnreadError(f"its {place} is of ggml's type {entry.type}")
    content = torch.frombuffer(entry.map, dtype=FLOATS[entry.type], count=math.prod(entry.shape), offset=entry.offset)
    made = content.to(torch.float32, copy=True).view(entry.shape)
    entry.release()
    return made


def require_native(dtype: torch.dtype) -> None:
    """Refuse a dtype without native operations."""
    if native.operations_for(torch.empty(0, dtype=dtype)) is None:
        raise UnreadError(f"native operations are off or not available for {dtype} ({native.VARIABLE})")


def refuse_inexact(matrix: StoredMatrix) -> None:
    """Refuse a matrix where native products with some of its rows are not torch's."""
    why = why_not_exact(matrix)
    if why is not None:
        raise UnreadError(why)


def named(keys: ModelMetadata, key: str) -> Any:
    """A value that must be there."""
    found = keys.of_architecture(key)
    if found is None:
        raise UnreadError(f"it does not name its {key}")
    return found


def by_layer(keys: ModelMetadata, key: str, layers: int) -> Any:
    """An array with a number for each layer, from one or from one number for all.

    Raises:
        UnreadError: it is not there, or for fewer layers.
    """
    found = np.atleast_1d(np.asarray(named(keys, key)))
    if found.ndim != 1 or (len(found) != 1 and len(found) < layers):
        raise UnreadError(f"its {key} has {found.size} numbers for {layers} layers")
    return np.broadcast_to(found, layers) if len(found) == 1 else found[:layers]


def single(value: Any, what: str) -> int:
    """One number for all layers."""
    found = {int(each) for each in np.atleast_1d(np.asarray(value))}
    if len(found) != 1:
        raise UnreadError(f"its layers have {sorted(found)} {what}")
    return found.pop()


def experts_of(keys: ModelMetadata, *, whole: bool) -> Experts:
    """How the experts of a layer divide the work; `whole` counts where the file does not say it."""
    of = keys.of_architecture
    count, chosen = int(of("expert_count")), int(named(keys, "expert_used_count"))
    if of("expert_gating_func", _SOFTMAX) not in (_SOFTMAX, _SOFTMAX_OF_CHOSEN):
        raise UnreadError("its experts are not chosen by a softmax")
    if any(of(key, 1) > 1 for key in ("expert_group_count", "interleave_moe_layer_step")):
        raise UnreadError("its experts are chosen from groups, or some of its layers have none")
    if not 1 <= chosen <= count <= MOST_EXPERTS:
        raise UnreadError(f"it chooses {chosen} of {count} experts, of at most {MOST_EXPERTS}")
    return Experts(
        count,
        chosen,
        whole=bool(of("expert_weights_norm", whole)),
        factor=float(of("expert_weights_scale", 0.0)) or 1.0,
        shared="blk.0.ffn_gate_shexp.weight" in keys.tensors,
        weighed="blk.0.ffn_gate_inp_shexp.weight" in keys.tensors,
    )
