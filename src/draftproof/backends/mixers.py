"""The modules of a model that keep recurrent states: which they are, and how they read a pass in pieces.

Such a module (a mixer) reads the tokens of a pass one after another, and has a state only at their end. If drafts are
refused, the state before them is needed. So a mixer reads a pass in two pieces: up to the root, then the drafts. All
other modules read the pass as a whole. Rows that read different numbers of tokens have pieces of their own, so that no
mixer ever reads padding.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from draftproof.backends.slot_cache import SlotCache, WritePlan
from draftproof.backends.states import Group, StateView

STATES_ONLY = "cache_params"  # the name of the cache in models without attention
_CACHE_NAMES = ("past_key_values", STATES_ONLY)


def cache_name(model: Any) -> str | None:
    """The name under which a model's forward pass takes its cache; None if it takes none of transformers' own."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in _CACHE_NAMES if name in taken), None)


def mixers_of(model: Any) -> tuple[nn.Module, ...]:
    """The modules of a model that keep recurrent states in the cache they are given; empty where none does.

    The model is observed while it reads two tokens.
    """
    name, found, running = cache_name(model), list[nn.Module](), list[nn.Module]()
    if name is None:
        return ()

    def enter(module: nn.Module, _: object) -> None:
        running.append(module)

    def leave(*_: object) -> None:
        running.pop()

    device = model.get_input_embeddings().weight.device
    cache = SlotCache()
    cache.acquire()
    cache.reserve(2)
    group = Group(rows=[0], cuts=(2,), mark=None, before=[None])
    view = _Watching(cache, WritePlan((0,), (0,), (2,)), [group], lambda: found.append(running[-1]))
    with ExitStack() as hooks, torch.inference_mode():
        for module in model.modules():
            for handle in (module.register_forward_pre_hook(enter), module.register_forward_hook(leave)):
                hooks.callback(handle.remove)
        try:
            ids = torch.zeros((1, 2), dtype=torch.int64, device=device)
            model(input_ids=ids, use_cache=True, **{name: view})
        except Exception:  # noqa: BLE001 - the model needs another cache: no state of this kind can be kept for it
            return ()
    outer = [each for each in dict.fromkeys(found) if not any(_inside(each, other) for other in found)]
    return tuple(outer)


def _inside(module: nn.Module, other: nn.Module) -> bool:
    return module is not other and any(module is each for each in other.modules())


class _Watching(StateView):
    """A cache that reports when a state is asked for or left."""

    def __init__(self, cache: SlotCache, plan: WritePlan, groups: Sequence[Group], report: Callable[[], None]) -> None:
        super().__init__(cache, plan, groups)
        self._report = report

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self._report()
        return super().get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        self._report()
        return super().get_recurrent_state(layer_idx, state_idx)

    def update_conv_state(self, *args: Any, **options: Any) -> Tensor:
        self._report()
        return super().update_conv_state(*args, **options)

    def update_recurrent_state(self, *args: Any, **options: Any) -> Tensor:
        self._report()
        return super().update_recurrent_state(*args, **options)


@contextmanager
def in_pieces(mixers: Sequence[nn.Module], view: StateView, rows: int, width: int) -> Iterator[None]:
    """While this is open, mixers read a pass group by group and piece by piece; the view keeps the states.

    The caller holds the lock of the model's cache: the modules are changed meanwhile.

    Args:
        mixers: see `mixers_of`.
        view: the cache of the pass.
        rows, width: of the padded pass.
    """
    if len(view.groups) == 1 and view.groups[0].cuts == (width,):
        yield
        return
    for module in mixers:
        module.forward = _Divided(module.forward, view, rows, width)
    try:
        yield
    finally:
        for module in mixers:
            del module.forward


class _Divided:
    """A mixer's forward pass that reads in pieces."""

    def __init__(self, forward: Callable[..., Any], view: StateView, rows: int, width: int) -> None:
        self._forward, self._view, self._rows, self._width = forward, view, rows, width

    def __call__(self, *args: Any, **options: Any) -> Any:
        made = [(group, self._read(group, args, options)) for group in self._view.groups]
        if len(made) == 1 and made[0][0].cuts[-1] == self._width:
            return made[0][1]
        return _spread(made, self._rows, self._width)

    def _read(self, group: Group, args: Any, options: Any) -> Any:
        parts, start = [], 0
        for stop in group.cuts:
            self._view.begin(group, stop - start)
            mine = [_cut(each, group.rows, self._rows, self._width, start, stop) for each in (args, options)]
            parts.append(self._forward(*mine[0], **mine[1]))
            if stop == group.mark:
                self._view.mark()
            start = stop
        widths = [stop - start for start, stop in zip((0, *group.cuts), group.cuts, strict=False)]
        return parts[0] if len(parts) == 1 else _joined(parts, widths)


def _cut(value: Any, chosen: list[int], rows: int, width: int, start: int, stop: int) -> Any:
    """The part of a mixer's input for some rows and some of their tokens; what has no tokens stays."""
    if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[1] == width and value.shape[0] in (1, rows):
        part = value[:, start:stop]
        return part if value.shape[0] == 1 or len(chosen) == rows else part[chosen]
    if isinstance(value, tuple | list):
        return type(value)(_cut(each, chosen, rows, width, start, stop) for each in value)
    if isinstance(value, dict):
        return {name: _cut(each, chosen, rows, width, start, stop) for name, each in value.items()}
    return value


def _tokens_dim(parts: Sequence[Tensor], widths: Sequence[int]) -> int | None:
    """The dimension of a mixer's outputs that counts tokens; None if there is none."""
    sizes = [part.shape for part in parts]
    return next(
        (dim for dim in range(1, parts[0].dim()) if [size[dim] for size in sizes] == list(widths)), None
    )


def _joined(parts: Sequence[Any], widths: Sequence[int]) -> Any:
    """The outputs of pieces as one output."""
    if isinstance(parts[0], Tensor):
        dim = _tokens_dim(parts, widths)
        return parts[-1] if dim is None else torch.cat(list(parts), dim=dim)
    if isinstance(parts[0], tuple | list):
        return type(parts[0])(_joined(each, widths) for each in zip(*parts, strict=True))
    return parts[-1]


def _spread(made: Sequence[tuple[Group, Any]], rows: int, width: int) -> Any:
    """The outputs of groups as the output of a padded pass."""
    group, first = made[0]
    if isinstance(first, Tensor):
        dim = _tokens_dim([first], [group.cuts[-1]])
        if dim is None:
            return first
        shape = [rows, *first.shape[1:]]
        shape[dim] = width
        whole = first.new_zeros(shape)
        for each, part in made:
            whole.narrow(dim, 0, each.cuts[-1])[each.rows] = part
        return whole
    if isinstance(first, tuple | list):
        return type(first)(
            _spread([(each, part[place]) for each, part in made], rows, width) for place in range(len(first))
        )
    return first
