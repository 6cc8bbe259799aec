"""States of recurrent layers (convolutions, linear attention, state spaces) in a forward pass, and after it.

A state is never changed after a pass: a pass reads states and leaves new ones. So whoever holds a state can return to
it, and a pass that fails has changed nothing. What a layer changes in place is a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from draftproof.backends.cache.slot_cache import CacheView, SlotCache, WritePlan


class Key(NamedTuple):
    """Which state of which layer."""

    kind: str
    layer: int
    number: int


@dataclass(frozen=True, eq=False)
class Held:
    """What tokens bring to a recurrence, from which their changes of its state can be made."""

    inputs: Tensor  # [rows, tokens, numbers]
    replay: Callable[[Tensor, Tensor], Tensor]  # the state after a state [1, *shape] and some inputs


@dataclass(frozen=True, eq=False)
class State:
    """The states of all layers after some tokens of one sequence: a row of tensors that sequences share.

    The last of these tokens may have changed no state yet: then their inputs of each recurrence are held, and the next
    pass begins with them.
    """

    tensors: Mapping[Key, Tensor]  # of each layer, [rows, *shape]
    row: int  # of this sequence
    held: Mapping[Key, Held] = field(default_factory=dict)  # of tokens after `tensors`
    replayed: int = 0  # of how many held tokens, too, this is the state

    @property
    def nbytes(self) -> int:
        """Memory of this row, in bytes."""
        every = (*self.tensors.values(), *(each.inputs for each in self.held.values()))
        return sum(each[self.row].nbytes for each in every)

    def before(self, tokens: int) -> State:
        """The state so many tokens earlier, which are held."""
        assert tokens <= self.replayed, "only held tokens can be taken out of a state"
        left = self.replayed - tokens
        return replace(self, held=self.held if left else {}, replayed=left)

    def alone(self) -> State:
        """The same in tensors of its own."""
        tensors = {key: each[self.row : self.row + 1].clone() for key, each in self.tensors.items()}
        held = self.held if self.replayed else {}
        return State(tensors, 0, {key: self._inputs(each) for key, each in held.items()}, self.replayed)

    def settled(self) -> State:
        """The same with no token held, for layers that cannot begin with them."""
        if not self.replayed:
            return self
        tensors = {key: each[self.row : self.row + 1] for key, each in self.tensors.items()}
        made = {key: each.replay(tensors[key], self._inputs(each).inputs) for key, each in self.held.items()}
        return State(tensors | made, 0)

    def _inputs(self, held: Held) -> Held:
        return replace(held, inputs=held.inputs[self.row : self.row + 1, : self.replayed].clone())


def _together(states: Sequence[State | None]) -> dict[Key, Tensor]:
    """The states of several sequences as tensors with one row each; the same tensors if they are that already."""
    known = [each.settled() for each in states if each is not None]
    assert len(known) in (0, len(states)), "rows that begin and rows that continue are in different groups"
    if not known:
        return {}
    first = known[0].tensors
    size = next(iter(first.values())).shape[0]
    if all(each.tensors is first for each in known) and [each.row for each in known] == list(range(size)):
        return dict(first)
    return {key: torch.cat([each.tensors[key][each.row : each.row + 1] for each in known]) for key in first}


@dataclass(eq=False)
class RowGroup:
    """Rows of a pass that recurrent layers read together: they read equally many tokens, in the same pieces."""

    rows: list[int]  # their numbers in the pass
    cuts: tuple[int, ...]  # where each piece ends; the last one is the number of tokens
    mark: int | None  # the cut after which states are kept too; None for none
    before: Sequence[State | None]  # the state of each row
    now: dict[Key, Tensor] = field(default_factory=dict)
    marked: dict[Key, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now = _together(self.before)


class StateView(CacheView):
    """A slot cache with states beside it, as transformers' `past_key_values` for one forward pass.

    It also has the methods that recurrent layers call. They see the states of the group that is read at the moment.

    Attributes:
        divide: after how many tokens of a group states are kept too, while a layer reads on; None for nowhere.
        recurrent_state: what the layer that reads now has asked for last.
        state_at_root: what a recurrence has found there, until its layer gives the state at the end.
    """

    def __init__(self, cache: SlotCache, plan: WritePlan, groups: Sequence[RowGroup]) -> None:
        super().__init__(cache, plan)
        self.groups = groups
        self._group = groups[0]
        self._width = groups[0].cuts[-1]
        self._touched = set[Key]()
        self.divide: int | None = None
        self.recurrent_state: Tensor | None = None
        self.state_at_root: Tensor | None = None

    def begin(self, group: RowGroup, width: int, divide: int | None = None) -> None:
        """From now on, layers read this many tokens of each row of a group; `divide` as of the class."""
        self._group = group
        self._width = width
        self._touched.clear()
        self.divide = divide
        self.recurrent_state = None

    def mark(self) -> None:
        """Keep the states that were used since `begin`."""
        self._group.marked |= {key: self._group.now[key] for key in self._touched}

    def _get(self, key: Key) -> Tensor | None:
        found = self._group.now.get(key)
        self._touched.add(key)
        if found is None:
            return None
        if self._width == 1:  # layers change states in place where they read one token
            found = self._group.now[key] = found.clone()
        return found

    def _put(self, key: Key, state: Tensor) -> None:
        self._touched.add(key)
        self._group.now[key] = state

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The last inputs of a layer's convolution; None before the first token."""
        return self._get(Key("conv", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """A layer's recurrent state; None before the first token."""
        self.recurrent_state = self._get(Key("recurrent", layer_idx, state_idx))
        return self.recurrent_state

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: object,
    ) -> Tensor:
        """Take a convolution's new inputs [rows channels tokens]; returns them after those that were kept.

        As many are kept as its kernel reads; by default as many as these.
        """
        key = Key("conv", layer_idx, state_idx)
        known = self._group.now.get(key)
        size = conv_kernel_size or (conv_states if known is None else known).shape[-1]
        if known is None:
            missing = max(size - conv_states.shape[-1], 0)
            every = torch.nn.functional.pad(conv_states, (missing, 0))
        else:
            every = torch.cat([known, conv_states], dim=-1)
        self._put(key, every[..., -size:].clone())
        if self.divide is not None:
            root = every[..., : every.shape[-1] - conv_states.shape[-1] + self.divide]
            root = torch.nn.functional.pad(root, (max(size - root.shape[-1], 0), 0))
            self._group.marked[key] = root[..., -size:].clone()
        return every

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> Tensor:
        """Take a layer's new recurrent state, and return it."""
        key = Key("recurrent", layer_idx, state_idx)
        self._put(key, recurrent_states)
        if self.divide is not None and self.state_at_root is not None:
            self._group.marked[key] = self.state_at_root
            self.state_at_root = None
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a layer has read tokens before; without a layer, whether any has."""
        return any(layer_idx in (None, key.layer) and state_idx in (None, key.number) for key in self._group.now)

    def is_recording_past(self, layer_idx: int) -> bool:  # noqa: ARG002
        """Always False: layers may use their fastest way to read one token."""
        return False

    def get_query_offset(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """Position of the first token; a family that asks for it must get rows that begin at the same position."""
        return self._plan.bases[0]
