"""The C library's structures of a pass: which slots its tokens may read, attention's arguments, and layers' weights."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.native.tensors import AS_THEY_ARE, GROUPS, LANES, require

GGML_SEGMENTS, GGML_PAD, GGML_ROWS = 4, 256, 8  # as in ggml.h
MOST_DIM, MOST_STATE, MOST_INPUTS, MOST_KERNEL, STATES = 512, 256, 4, 8, 10  # as in native.c
MIXERS = ("short", "delta", "scan")
"""Kinds of mixers: a short convolution, the gated delta rule, and a state space (mixers.h)."""
_WHOLE = 2 * LANES  # numbers of a head are copied in so many at once
SPAN = 1024  # keys, as in native.c
DIVISIONS = WHOLE_TILES, BY_PARTS, BY_SPANS = range(3)  # likewise
_NEAR = 1 << 17  # float32 scores that are kept near the processor
_MANY_SPANS = 8  # for each thread: so many can be divided among them whole
_WORTH_DIVIDING = 1 << 16  # products of queries and keys in a tile; threads wait for one another twice


class PassMask:
    """Which slots each token of a pass may read, and working memory that the layers of the pass share.

    Args:
        places: slot, first new position and number of new tokens of each row.
        visible: for each token of each row, how many leading slots it may read; what a row has beyond its number of new
            tokens is padding.
        mask: added to the scores of these slots, for every token; None where `visible` is enough.
    """

    def __init__(
        self,
        places: Sequence[tuple[int, int, int]],
        visible: Sequence[Sequence[int]],
        mask: Float[Tensor, "*tokens horizon"] | None,
    ) -> None:
        self.rows = len(visible)
        widths = [len(row) for row in visible]
        flat = list(itertools.chain.from_iterable(visible))
        if len(places) != self.rows:
            raise ValueError(f"{len(places)} places for {self.rows} rows")
        self.tokens = len(flat)  # of all rows, with padding
        self.width = max(widths)  # tokens of the longest row, with padding
        self.horizon = max(flat)  # the most slots that a token may read
        self.slots = 1 + max(slot for slot, _, _ in places)
        self.end = max(base + width for _, base, width in places)
        least = min(*flat, *itertools.chain.from_iterable(places))
        if least < 0 or any(place[2] > width for place, width in zip(places, widths, strict=True)):
            raise ValueError("a slot, position, width or number of slots is out of range")
        if mask is not None and (mask.shape[:-1].numel() != self.tokens or mask.shape[-1] < self.horizon):
            raise ValueError(f"a mask of {tuple(mask.shape)} for {self.tokens} tokens and {self.horizon} slots")
        self.mask = mask
        # ctypes arrays, because tensors cost several times as much, and a pass of a small model takes a millisecond
        firsts = itertools.accumulate(widths, initial=0)
        placed = itertools.chain.from_iterable((*place, first) for place, first in zip(places, firsts, strict=False))
        self.places = (ctypes.c_int64 * (4 * self.rows))(*placed)
        self.visible = (ctypes.c_int64 * len(flat))(*flat)

    def pieces(self, columns: int) -> int:
        """How many times at most this many columns of a row attend together."""
        return sum(-(-width // columns) for width in self.places[2::4])

    @functools.cached_property
    def halved(self) -> Float[Tensor, "*tokens horizon"] | None:
        """The mask in bfloat16, where the least number of float32 would be infinite."""
        least = torch.finfo(torch.bfloat16).min
        return None if self.mask is None else self.mask.clamp(min=least).to(torch.bfloat16)

    @functools.cached_property
    def _buffers(self) -> dict[int, Tensor]:
        return {}

    def buffer(self, size: int, dtype: torch.dtype, number: int) -> Tensor:
        """Working memory of at least this many entries; every call with the same number gets the same memory."""
        if number not in self._buffers or self._buffers[number].numel() < size:
            self._buffers[number] = torch.empty(size, dtype=dtype)
        return self._buffers[number]


class AttentionArguments(ctypes.Structure):
    """The C structure `attention` of typed.h: what attention reads and writes in a pass, except a layer's own tensors.

    It holds addresses: the tensors and the mask that it was made from must outlive it.
    """

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("fused", "cos", "sin", "keys", "values", "scales", "places", "visible")),
        *((name, ctypes.c_void_p) for name in ("mask", "out", "scratch", "sinks")),
        *((name, ctypes.c_int64) for name in ("rows", "tokens", "heads", "key_heads", "dim", "capacity", "horizon")),
        *((name, ctypes.c_int64) for name in ("angles", "columns", "scratch_size")),
        *((name, ctypes.c_int64) for name in ("copied", "held", "outcomes", "divided", "own", "halved")),
        ("scale", ctypes.c_float),
        ("cap", ctypes.c_float),
    ]

    @classmethod
    def of(
        cls,
        cos: Float[Tensor, "tokens 1 dim"],
        sin: Float[Tensor, "tokens 1 dim"],
        shape: Sequence[int],
        mask: PassMask,
        *,
        heads: int,
        scale: float,
        cap: float = 0.0,
        halved: bool = False,
    ) -> AttentionArguments:
        """Make the structure from tensors.

        Angles are contiguous in the last dimension, sines with the sign of `rotate_half`; `shape` is that of the
        buffers of keys and of values, [slots, key heads, capacity, dim]; neighbouring query heads share a key head.
        `halved`: whether rows are float32, and keys and values have fewer bits.

        Raises:
            ValueError: shapes that do not fit together; C would read past an end.
        """
        _require_fitting(cos, sin, shape, mask, heads)
        _, key_heads, capacity, dim = shape
        group, threads = heads // key_heads, torch.get_num_threads()
        columns = _columns(mask, key_heads, group, threads)
        queries = -(-columns * group // LANES) * LANES
        whole = -(-dim // _WHOLE) * _WHOLE
        copied = queries * min(-(-mask.horizon // _WHOLE) * _WHOLE, SPAN)
        held = copied + queries * whole
        scratch_size = held + queries * (LANES + whole)
        tiles = key_heads * mask.pieces(columns)
        spans = tiles * -(-mask.horizon // SPAN)
        divided = WHOLE_TILES
        if tiles % threads and tiles < 2 * threads and columns * group * mask.horizon * dim > _WORTH_DIVIDING:
            divided = BY_SPANS if spans >= _MANY_SPANS * threads else BY_PARTS
        outcomes = scratch_size * (max(threads, spans) if divided == BY_PARTS else threads)
        size = outcomes + (spans if divided else threads) * columns * group * (LANES + whole)
        of_halves = size if halved else 0
        size += mask.tokens * heads * dim if halved else 0  # as many queries and as many outputs, of two bytes
        added = mask.halved if halved else mask.mask
        return cls(
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            places=ctypes.addressof(mask.places),
            visible=ctypes.addressof(mask.visible),
            mask=None if added is None else added.data_ptr(),
            scratch=mask.buffer(size, torch.float32, 0).data_ptr(),
            rows=mask.rows,
            tokens=mask.tokens,
            heads=heads,
            key_heads=key_heads,
            dim=dim,
            capacity=capacity,
            horizon=0 if mask.mask is None else mask.mask.shape[-1],
            angles=cos.stride(0),
            columns=columns,
            scratch_size=scratch_size,
            copied=copied,
            held=held,
            outcomes=outcomes,
            divided=divided,
            own=key_heads,
            halved=of_halves,
            scale=scale,
            cap=cap,
        )


def _columns(mask: PassMask, key_heads: int, group: int, threads: int) -> int:
    """How many tokens of a row attend together.

    Keys are transposed once for all of them, so many are better; but their scores should stay near the processor, and
    each thread should get as many pieces of work as another. Where there are less than two for each thread, threads
    share them instead (`divided`).
    """
    most = min(max(_NEAR // (group * min(mask.horizon + LANES, SPAN)), 8), 32)
    pieces = -(-mask.width // most)
    tiles = mask.rows * key_heads
    while (
        tiles * pieces > 2 * threads and tiles * pieces % threads and 4 * pieces < mask.width and pieces < 2 * threads
    ):
        pieces += 1
    return -(-mask.width // pieces)


def _require_fitting(cos: Tensor, sin: Tensor, shape: Sequence[int], mask: PassMask, heads: int) -> None:
    slots, key_heads, capacity, dim = shape
    for name, angles in (("cos", cos), ("sin", sin)):
        require(name, angles, cos.dtype, (mask.tokens, 1, dim), packed=False)
        if angles.stride(-1) != 1 or angles.stride(0) != cos.stride(0):
            raise ValueError(
                f"expected {name} with neighbours in its rows, as far apart as cos's, got strides {angles.stride()}"
            )
    if mask.slots > slots or max(mask.end, mask.horizon) > capacity or heads % key_heads:
        raise ValueError(
            f"slot {mask.slots - 1}, position {max(mask.end, mask.horizon) - 1} and {heads} heads do not fit into "
            f"buffers of shape {tuple(shape)}"
        )
    if mask.mask is not None:
        require("mask", mask.mask, cos.dtype)


class _GGMLSegment(ctypes.Structure):
    _fields_: ClassVar = [("weight", ctypes.c_void_p), ("outs", ctypes.c_int64), ("type", ctypes.c_int64)]


class LinearArguments(ctypes.Structure):
    """The C structure `linear` of typed.h: a linear layer's weight and bias."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int64) for name in ("bits", "group")),
    ]


class GGMLArguments(ctypes.Structure):
    """The C structure `ggml_matrix` of ggml.h: a matrix, or several whose outputs follow one another."""

    _fields_: ClassVar = [("count", ctypes.c_int64), ("of", _GGMLSegment * GGML_SEGMENTS)]


class InputsArguments(ctypes.Structure):
    """The C structure `inputs` of inputs.h: linear layers that read the same rows; it holds addresses."""

    _fields_: ClassVar = [
        ("of", LinearArguments * MOST_INPUTS),
        ("outs", ctypes.c_int64 * MOST_INPUTS),
        *((name, ctypes.c_void_p) for name in ("order", "factors")),
        *((name, ctypes.c_int64) for name in ("count", "places")),
    ]

    @property
    def rounds(self) -> bool:
        """Whether some of them round their inputs."""
        return any(each.bits not in (0, AS_THEY_ARE) for each in self.of)

    @property
    def sizes(self) -> tuple[int, ...]:
        """What their working memory depends on."""
        return self.count, self.places, self.rounds, *self.outs

    def work(self, tokens: int, ins: int) -> int:
        """Elements of working memory that they need for some tokens."""
        return int(2 * tokens * sum(self.outs)) + (inputs_size(tokens, ins) if self.rounds else 0)


class MixtureArguments(ctypes.Structure):
    """The C structure `mixture` of mixture.h: a mixture of experts; it holds addresses."""

    _fields_: ClassVar = [
        *((name, LinearArguments) for name in ("router", "gate_up", "down")),
        *((name, LinearArguments) for name in ("shared_router", "shared_down")),
        ("shared_gate_up", InputsArguments),
        *((name, ctypes.c_int64) for name in ("size", "experts", "chosen", "inner", "shared_inner")),
        *((name, ctypes.c_int64) for name in ("whole", "activation", "sigmoid")),
        *((name, ctypes.c_float) for name in ("factor", "least")),
        *((name, ctypes.c_void_p) for name in ("scales", "biases")),
    ]

    @property
    def sizes(self) -> tuple[int, ...]:
        """What its working memory depends on."""
        return self.size, self.experts, self.chosen, self.inner, self.shared_inner, *self.shared_gate_up.sizes

    def work(self, tokens: int) -> int:
        """Elements of working memory that it needs for some tokens."""
        pairs, size = tokens * self.chosen, self.size
        inner = max(pairs * self.inner, tokens * self.shared_inner)
        numbers = 64 + 52 * pairs  # bytes, which are no fewer elements
        inputs = inputs_size(pairs, max(size, self.inner)) + inputs_size(tokens, max(size, self.shared_inner))
        inputs += self.shared_gate_up.work(tokens, size)
        return int(tokens * (self.experts + 1 + size) + 3 * inner + pairs * size + numbers + inputs)


class MixerArguments(ctypes.Structure):
    """The C structure `mixer` of mixers.h: what keeps a recurrent state; it holds addresses."""

    _fields_: ClassVar = [
        ("inputs", InputsArguments),
        ("out", LinearArguments),
        *((name, ctypes.c_void_p) for name in ("order", "taps", "taps_bias", "rates", "steps", "skip", "norm")),
        *(
            (name, ctypes.c_int64)
            for name in ("kind", "inner", "channels", "kernel", "key_heads", "heads", "dim", "size")
        ),
        *((name, ctypes.c_int64) for name in ("groups", "gates_first")),
        *((name, ctypes.c_float) for name in ("least", "factor")),
    ]

    @property
    def fits(self) -> bool:
        """Whether its sizes fit together, so that C does not read past an end."""
        keys, inner, channels, heads = self.key_heads * self.dim, self.inner, self.channels, self.heads
        places = {"short": 3 * channels, "delta": channels + inner + 2 * heads, "scan": inner + channels + heads}
        kind = MIXERS[self.kind]
        if not 1 <= self.kernel <= MOST_KERNEL or self.inputs.places != places[kind] or inner % self.groups:
            return False
        if kind == "short":
            return bool(inner == channels)
        heads_fit = 1 <= self.key_heads <= heads and heads % self.key_heads == 0 and 1 <= self.dim <= MOST_STATE
        return bool(heads_fit and inner == heads * self.size and channels == inner + 2 * keys)

    @property
    def sizes(self) -> tuple[int, ...]:
        """What its working memory depends on."""
        return *self.inputs.sizes, self.inner, self.channels, self.heads

    def work(self, tokens: int, ins: int) -> int:
        """Elements of working memory that it needs for some tokens; a float32 number may take two."""
        floats = 64 + 2 * tokens * (self.channels + self.inner + 2 * self.heads)
        own = 2 * tokens * self.inner + floats + inputs_size(tokens, self.inner)
        return int(tokens * self.inputs.places + max(self.inputs.work(tokens, ins), own))


class LayerArguments(ctypes.Structure):
    """The C structure `layer` of typed.h: a decoder layer; it holds addresses."""

    _fields_: ClassVar = [
        *((name, InputsArguments) for name in ("qkv", "gate_up")),
        *((name, LinearArguments) for name in ("out", "down", "embedded_gate", "embedded_out")),
        *((name, ctypes.c_void_p) for name in ("before", "mixed", "between", "made", "embedded")),
        *((name, ctypes.c_void_p) for name in ("experts_in", "experts_out", "gated_out", "turned", "sinks")),
        ("mixture", ctypes.POINTER(MixtureArguments)),
        ("mixer", ctypes.POINTER(MixerArguments)),
        *((name, ctypes.c_int64) for name in ("size", "inner", "whole", "activation", "gates")),
        *((name, ctypes.c_int64) for name in ("own", "normed", "embedded_size", "embedded_first")),
        *((f"{name}_least", ctypes.c_float) for name in ("before", "mixed", "between", "made", "embedded")),
        *((f"{name}_least", ctypes.c_float) for name in ("experts_in", "experts_out", "gated_out", "turned")),
        *((name, ctypes.c_float) for name in ("out_factor", "down_factor", "leaving")),
    ]

    @property
    def sizes(self) -> tuple[Any, ...]:
        """What its working memory depends on."""
        parts = [each.contents.sizes if each else () for each in (self.mixture, self.mixer)]
        return self.size, self.inner, self.gates, self.embedded_size, self.qkv.sizes, self.gate_up.sizes, *parts

    def work(self, given: AttentionArguments) -> int:
        """Elements of working memory that a layer needs for a pass."""
        tokens, heads, rest = given.tokens, 2 * (given.heads + given.key_heads), [0]
        if self.qkv.count:
            after = tokens * self.size + inputs_size(tokens, given.heads * given.dim)
            own = tokens * (heads * given.dim + self.gates)
            rest.append(own + max(self.qkv.work(tokens, self.size), after))
        if self.mixer:
            rest.append(self.mixer.contents.work(tokens, self.size))
        if self.mixture:
            rest.append(self.mixture.contents.work(tokens))
        if self.gate_up.count:
            after = max(self.gate_up.work(tokens, self.size), inputs_size(tokens, self.inner))
            rest.append(3 * tokens * self.inner + after)
        if self.embedded_size:
            rest.append(4 * tokens * self.embedded_size + inputs_size(tokens, max(self.size, self.embedded_size)))
        return int(2 * tokens * self.size) + max(rest)


class LayerStack:
    """Decoder layers that run one after another.

    Args:
        which: of each the number of its attention, among those that `work` and `Operations.layers` get.
    """

    def __init__(self, layers: Sequence[LayerArguments], which: Sequence[int]) -> None:
        self.array = (LayerArguments * len(layers))(*layers)
        self.which = (ctypes.c_int64 * len(layers))(*which)
        self.size = layers[0].size
        self.attentions = 1 + max(which)
        self.embedded = max(each.embedded_first + each.embedded_size for each in layers)  # numbers of a token
        self.keeps_states = any(each.mixer for each in layers)
        needs = {(one, each.sizes): (one, each) for one, each in zip(which, self.array, strict=True)}
        self._different = list(needs.values())  # by what they need

    def __len__(self) -> int:
        return len(self.array)

    def work(self, given: ctypes.Array[AttentionArguments]) -> int:
        """Elements of working memory that they need for a pass."""
        return max(int(each.work(given[one])) for one, each in self._different)


class Sequences:
    """The sequences of a pass, and where their recurrent states are.

    Args:
        spans: of each its first token, its number of tokens, after how many of them states are kept too (0: not), and
            how many earlier tokens, whose inputs are held, its states lack.
        addresses: for each layer of the model and each sequence, those of STATES states; 0 where there is none.
    """

    def __init__(self, spans: Sequence[tuple[int, int, int, int]], addresses: Sequence[int]) -> None:
        self.rows = len(spans)
        self.tokens = sum(tokens for _, tokens, _, _ in spans)
        if any(first < 0 or not 0 <= mark < tokens or replayed < 0 for first, tokens, mark, replayed in spans):
            raise ValueError(f"spans of tokens, or of some of them, that are none: {spans}")
        self.end = max(first + tokens for first, tokens, _, _ in spans)
        self._layer = self.rows * STATES
        self._spans = (ctypes.c_int64 * (4 * self.rows))(*itertools.chain.from_iterable(spans))
        self._states = (ctypes.c_int64 * len(addresses))(*addresses)

    def require_fitting(self, tokens: int, layers: int) -> None:
        """Check that every token of a pass is in a sequence, and that so many layers have states.

        Raises:
            ValueError: otherwise; C would read past an end.
        """
        if self.tokens != tokens or self.end > tokens or len(self._states) < layers * self._layer:
            raise ValueError(
                f"sequences of {self.tokens} tokens up to {self.end} and {len(self._states)} states, for {tokens} "
                f"tokens and {layers} layers"
            )

    def arguments(self, layer: int) -> tuple[int, int, int]:
        """Addresses of spans, and of the states from a layer of the model on, and the number of sequences."""
        states = ctypes.addressof(self._states) + layer * self._layer * ctypes.sizeof(ctypes.c_int64)
        return ctypes.addressof(self._spans), states, self.rows


def inputs_size(rows: int, ins: int) -> int:
    """Elements, of which none is smaller than a byte, that suffice for the inputs of any product with few bits."""
    return max(quantized_inputs_size(rows, ins), ggml_inputs_size(rows, ins))


def quantized_inputs_size(rows: int, ins: int) -> int:
    """Bytes that suffice for the inputs of a quantized product: numbers, padded, and twelve more for each group.

    A number has 16 bits where bytes are multiplied so (`byte_input` in lanes.h).
    """
    least, most = GROUPS[0], GROUPS[-1]
    return 64 + rows * (2 * (ins + most) + 12 * -(-ins // least))


def ggml_inputs_size(rows: int, ins: int) -> int:
    """Bytes that suffice for the inputs of a product with weights of a GGUF file: float32, or less."""
    padded = -(-ins // GGML_PAD) * GGML_PAD
    return 64 + max(rows, GGML_ROWS) * padded * 4
