"""What keeps a recurrent state in a layer, for native code: short convolutions, the gated delta rule, state spaces.

Which of them a module of transformers is, its parts say. States have the shapes that transformers' own cache gives
them, so its modules may go on from them; in memory, channels of a convolution and values of a head are neighbours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftproof import native
from draftproof.backends.cache.layout import Layout
from draftproof.backends.lean.inputs import FusedProducts, linear_arguments, whole_product
from draftproof.backends.lean.traits import UnreadError, eps_of
from draftproof.backends.recurrent.states import Held, Key, State
from draftproof.native.structures import MIXERS, STATES, MixerArguments, Sequences
from draftproof.native.tensors import Immutable

_NOTHING = ("transformers.activations", "torch.nn.modules.activation")  # of modules without weights
_RULE = {"conv1d", "out_proj"}
_NUMBERS = {"A_log", "dt_bias"}


@dataclass(frozen=True, eq=False)
class MixerParts:
    """What a module is made of, as native.c has it."""

    kind: str  # of MIXERS
    convolution: nn.Conv1d  # a weight for each channel and each of the last tokens, and biases
    inputs: FusedProducts  # the layers that read hidden states
    numbers: Mapping[str, int | float]  # sizes and factors, by the names of MixerArguments
    tensors: dict[str, Tensor]  # those that it has addresses of, by the same names


def _short(module: Any) -> MixerParts:
    channels = module.conv.in_channels
    return MixerParts(
        "short", module.conv, FusedProducts.of_modules([module.in_proj]), {"inner": channels, "channels": channels}, {}
    )


def _delta(module: Any) -> MixerParts:
    keys, heads = module.num_k_heads, module.num_v_heads
    sizes = {"key_heads": keys, "heads": heads, "dim": module.head_k_dim, "size": module.head_v_dim, "groups": heads}
    numbers = {**sizes, "inner": module.value_dim, "channels": module.conv_dim, **_norm(module.norm, module.head_v_dim)}
    names: tuple[str, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    order = None
    if hasattr(module, "in_proj_qkvz"):  # of each key head: query, key, values and gates; betas and decays
        names, each = ("in_proj_qkvz", "in_proj_ba"), heads // keys
        dim, values = module.head_k_dim, each * module.head_v_dim
        outs = keys * 2 * (dim + values)
        wide = torch.split(torch.arange(outs).view(keys, -1), [dim, dim, values, values], 1)
        few = torch.split((outs + torch.arange(keys * 2 * each)).view(keys, -1), [each, each], 1)
        order = torch.cat([part.flatten() for part in (*wide, *few)])
    weight = module.norm.weight.detach().repeat(heads)
    inputs = FusedProducts.of_modules([getattr(module, name) for name in names], order)
    return MixerParts(
        "delta", module.conv1d, inputs, numbers, {**_rates(module), "norm": _scaled(weight, module.head_v_dim)}
    )


def _scan(module: Any) -> MixerParts:
    inner, norm, groups = module.intermediate_size, getattr(module, "norm", None), 1
    tensors = {**_rates(module), "skip": module.D.detach().float()}
    shortest, longest = map(float, module.time_step_limit)
    if (shortest, longest) != (0.0, float("inf")):
        raise UnreadError("its steps have limits, which transformers' code for single tokens has not")
    numbers: dict[str, int | float] = {}
    if norm is not None and not isinstance(norm, nn.Identity):
        groups = norm.n_groups if hasattr(norm, "n_groups") else inner // norm.group_size
        first = not getattr(norm, "norm_before_gate", False)
        numbers |= {**_norm(norm, inner // groups), "gates_first": int(first)}
        tensors["norm"] = _scaled(norm.weight.detach(), inner // groups)
    numbers |= {"inner": inner, "channels": module.conv_dim, "groups": groups, "key_heads": module.n_groups}
    numbers |= {"heads": module.num_heads, "dim": module.ssm_state_size, "size": module.head_dim}
    factors = None
    if "mup_vector" in dict(module.named_buffers()):
        factors = module.mup_vector.detach().float().flatten() * module.ssm_in_multiplier
        if module.in_proj.bias is not None and module.ssm_in_multiplier != 1.0:
            raise UnreadError(f"its {type(module).__name__} has factors of inputs, and biases")
    return MixerParts(
        "scan", module.conv1d, FusedProducts.of_modules([module.in_proj], None, factors), numbers, tensors
    )


def _rates(module: Any) -> dict[str, Tensor]:
    return {"rates": -module.A_log.detach().float().exp(), "steps": module.dt_bias.detach().float()}


def _norm(norm: Any, size: int) -> dict[str, int | float]:
    return {"least": size * eps_of(norm)}


def _scaled(weight: Tensor, size: int) -> Tensor:
    return weight.float().mul(size**0.5)


_READERS: tuple[tuple[set[str], Callable[[Any], MixerParts]], ...] = (
    ({"conv", "in_proj", "out_proj"}, _short),
    ({"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "norm", *_RULE, *_NUMBERS}, _delta),
    ({"in_proj_qkvz", "in_proj_ba", "norm", *_RULE, *_NUMBERS}, _delta),
    ({"in_proj", "norm", "D", *_RULE, *_NUMBERS}, _scan),
    ({"in_proj", "D", *_RULE, *_NUMBERS}, _scan),
)
"""Readers of modules by the names of all their parts."""


class Mixer(Immutable):
    """A module that keeps a recurrent state, read by native code.

    Args:
        factor: of what it adds to the hidden states.

    Attributes:
        arguments: for native.c; they hold addresses of tensors that are kept here.
        kept: of its states.
    """

    def __init__(self, module: Any, number: int, size: int, factor: float) -> None:
        # The parts decide, not the class: families give one computation different classes, and may change one.
        kinds = {name: type(each) for name, each in module.named_children()}
        names = {name for name, kind in kinds.items() if kind.__module__ not in _NOTHING and kind is not nn.Identity}
        names |= {name for name, _ in module.named_parameters(recurse=False)}
        read = next((read for parts, read in _READERS if parts == names), None)
        if read is None or getattr(module, "activation", "silu") != "silu":
            raise UnreadError(f"its {type(module).__name__} has parts that are not known together here")
        self._parts = parts = read(module)
        self._out = whole_product(module.out_proj)
        self.number = number
        # A product of a file's own numbers may read its inputs in the file's order.
        bias, order = parts.convolution.bias, getattr(module.out_proj, "inputs", None)
        taps = parts.convolution.weight.detach().squeeze(1).t().float().contiguous()
        found = {"taps": taps, "taps_bias": None if bias is None else bias.detach().float()}
        found["order"] = None if order is None else order.to(torch.int32)
        self._tensors = parts.tensors | {name: each for name, each in found.items() if each is not None}
        self.arguments = MixerArguments(
            kind=MIXERS.index(parts.kind),
            inputs=parts.inputs.arguments,
            out=linear_arguments(self._out),
            kernel=len(taps),
            **{"factor": factor, "groups": 1, **parts.numbers},
            **{name: tensor.data_ptr() for name, tensor in self._tensors.items()},
        )
        given = self.arguments
        sizes = {"taps_bias": given.channels, "order": given.inner, "norm": given.inner}
        sizes |= dict.fromkeys(("rates", "steps", "skip"), given.heads)
        fits = taps.shape[1] == given.channels and given.fits
        fits = fits and (self._out.weight.ins, self._out.weight.outs) == (given.inner, size)
        if not fits or any(len(each) != sizes.get(name, len(each)) for name, each in self._tensors.items()):
            raise UnreadError(f"its {type(module).__name__} has sizes that native code does not know")
        conv = StateLayout(
            Key("conv", number, 0),
            (given.kernel, given.channels),
            parts.convolution.weight.dtype,
            given.channels,
            _shifted,
            turned=True,
        )
        self.kept = [conv]
        if given.heads:
            shape, key = (given.heads, given.dim, given.size), Key("recurrent", number, 0)
            held = given.key_heads * given.dim + given.heads * (given.size + 2)
            turned = parts.kind == "scan"
            self.kept.append(StateLayout(key, shape, torch.float32, held, self._replayed, turned=turned))

    def _replayed(self, state: Tensor, inputs: Tensor) -> Tensor:
        """A recurrent state after tokens whose inputs are held as native.c writes them."""
        given = self.arguments
        sizes = [given.key_heads * given.dim, given.heads * given.size, given.heads, given.heads]
        keys, values, decays, betas = torch.split(inputs, sizes, -1)
        keys = keys.reshape(*keys.shape[:2], given.key_heads, given.dim)
        values = values.reshape(*values.shape[:2], given.heads, given.size)
        operations = native.operations_for(values)
        assert operations is not None, "it was there when the inputs were made"
        replaces = self._parts.kind == "delta"
        before = state if replaces else state.transpose(-1, -2)
        _, end = operations.delta_rule(keys, keys, values, decays, betas if replaces else None, before, unit=replaces)
        return end if replaces else end.transpose(-1, -2)


def _shifted(state: Tensor, inputs: Tensor) -> Tensor:
    """The last inputs of a convolution after some more."""
    return torch.cat([state, inputs.transpose(-1, -2)], -1)[..., -state.shape[-1] :]


@dataclass(frozen=True)
class StateLayout:
    """A state of a layer."""

    key: Key  # its name
    shape: tuple[int, ...]  # of a sequence's, in memory
    dtype: torch.dtype  # of its numbers
    held: int  # numbers of a token's inputs, from which it changes the state
    replay: Callable[[Tensor, Tensor], Tensor]  # as of `Held`
    turned: bool  # whether transformers has the last two dimensions exchanged

    @functools.cached_property
    def strides(self) -> tuple[int, ...]:
        """Of a sequence's state in transformers' shape."""
        return self.new(1)[1].stride()[1:]

    def new(self, rows: int) -> tuple[Tensor, Tensor]:
        """Memory for some sequences, and the same in transformers' shape."""
        made = torch.empty((rows, *self.shape), dtype=self.dtype)
        return made, made.transpose(-1, -2) if self.turned else made

    def address(self, tensor: Tensor, row: int, copies: list[Tensor]) -> int:
        """Where a sequence's state is, among several in transformers' shape; in a new copy if that is needed."""
        if tensor.dtype == self.dtype and tensor.stride()[1:] == self.strides:
            return _address(tensor, row)
        own = tensor[row].transpose(-1, -2) if self.turned else tensor[row]
        copies.append(own.to(self.dtype).contiguous())
        return copies[-1].data_ptr()


class PassStates:
    """The recurrent states of a pass: from where its sequences go on, and what they leave.

    A sequence with drafts behind its chain leaves the state after the chain, and what the drafts bring to each
    recurrence; another one the state at its end.

    Args:
        layout: of the pass; packed.

    Attributes:
        sequences: for native.c.
        after: of each sequence, the state after everything that it read.
    """

    def __init__(self, mixers: Sequence[Mixer], layers: int, layout: Layout, before: Sequence[State | None]) -> None:
        chains = [len(feed.tokens) for feed in layout.feeds]
        sizes, rows = layout.plan.widths, len(chains)
        marks = [chain if 0 < chain < size else 0 for chain, size in zip(chains, sizes, strict=True)]
        drafts = [size - mark if mark else 0 for mark, size in zip(marks, sizes, strict=True)]
        made: dict[Key, Tensor] = {}
        held: dict[Key, Held] = {}
        self._copies = list[Tensor]()
        addresses = [0] * (layers * rows * STATES)
        for mixer in mixers:
            for place, kept in enumerate(mixer.kept):
                memory, made[kept.key] = kept.new(rows)
                behind = torch.empty((rows, max(drafts), kept.held), dtype=kept.dtype)
                held[kept.key] = Held(behind, kept.replay)
                for row, state in enumerate(before):
                    at = (mixer.number * rows + row) * STATES + STATES // 2 * place
                    if state is not None:
                        addresses[at] = kept.address(state.tensors[kept.key], state.row, self._copies)
                        addresses[at + 3] = _address(state.held[kept.key].inputs, state.row) if state.replayed else 0
                    addresses[at + (1 if drafts[row] else 2)] = _address(memory, row)
                    addresses[at + 4] = _address(behind, row) if drafts[row] else 0
        replayed = [0 if state is None else state.replayed for state in before]
        self.sequences = Sequences(list(zip(layout.starts, sizes, marks, replayed, strict=True)), addresses)
        self.after = [State(made, row, held if count else {}, count) for row, count in enumerate(drafts)]


def _address(rows: Tensor, row: int) -> int:
    return rows.data_ptr() + row * rows.stride(0) * rows.itemsize
