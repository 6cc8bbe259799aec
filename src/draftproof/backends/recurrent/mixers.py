"""The modules of a model that keep recurrent states: which they are, and how they read a pass in pieces.

Such a module (a mixer) reads the tokens of a pass one after another, and has a state only at their end. If drafts are
refused, the state before them is needed. A mixer whose recurrence can be divided (`recurrences`) reads the pass once
and keeps that state on its way. Any other reads it in two pieces: up to the root, then the drafts. All other modules
read the pass as a whole. Rows that read different numbers of tokens have pieces of their own, so that no mixer ever
reads padding.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from draftproof.backends.cache.slot_cache import SlotCache, WritePlan
from draftproof.backends.model_info import cache_name, input_device, relative_error
from draftproof.backends.recurrent.recurrences import FEW, in_pass
from draftproof.backends.recurrent.states import Key, RowGroup, StateView

_ROOT = 3  # where mixers are divided when they are compared
_SHORT = _ROOT + FEW + 1  # tokens that they read then: both forms of a recurrence are used
_LAST = 4  # of which so many are read one by one
_SAME = 1e-4  # relative difference in float32 that rounding explains

_KERNELS = "transformers.integrations.hub_kernels"  # the logger that recommends packages whose kernels need a GPU


def _no_advice(record: logging.LogRecord) -> bool:
    return "is falling back to its reference PyTorch implementation" not in record.getMessage()


def mixers_of(model: Any) -> tuple[nn.Module, ...] | None:
    """The modules of a model that keep recurrent states in the cache they are given; empty where none does.

    The model is observed while it reads two tokens. None if it cannot read with such a cache.
    """
    if not torch.cuda.is_available():
        logging.getLogger(_KERNELS).addFilter(_no_advice)
    name, found, running = cache_name(model), list[nn.Module](), list[nn.Module]()
    if name is None:
        return None

    def enter(module: nn.Module, _: object) -> None:
        running.append(module)

    def leave(*_: object) -> None:
        running.pop()

    view = _Watching(2, lambda: found.append(running[-1]))
    with ExitStack() as hooks:
        for module in model.modules():
            for handle in (module.register_forward_pre_hook(enter), module.register_forward_hook(leave)):
                hooks.callback(handle.remove)
        try:
            _read(model, view, name)
        except Exception:  # noqa: BLE001 - the model needs another cache, whatever it raises without it
            return None
    inner = {id(each) for module in found for each in module.modules() if each is not module}
    return tuple(each for each in dict.fromkeys(found) if id(each) not in inner)


@torch.inference_mode()
def _read(model: Any, view: _Watching, name: str) -> None:
    device = input_device(model)
    vocab = int(model.get_input_embeddings().weight.shape[0])
    ids = torch.linspace(0, vocab - 1, view.width, device=device).long().unsqueeze(0)
    model(input_ids=ids, use_cache=True, **{name: view})


class _Watching(StateView):
    """A cache of one row that reports when a state is asked for or left.

    Args:
        cuts: the pieces in which mixers read; by default one.
    """

    def __init__(
        self,
        width: int,
        report: Callable[[], None] = lambda: None,
        cuts: Sequence[int] = (),
        mark: int | None = None,
    ) -> None:
        cache = SlotCache()
        group = RowGroup(rows=[0], cuts=tuple(cuts) or (width,), mark=mark, before=[None])
        super().__init__(cache, WritePlan((cache.acquire(),), (0,), (width,)), [group])
        cache.reserve(width)
        self.width = width
        self._report = report

    def _get(self, key: Key) -> Tensor | None:
        self._report()
        return super()._get(key)

    def _put(self, key: Key, state: Tensor) -> None:
        self._report()
        super()._put(key, state)


@dataclass(frozen=True)
class ResumedMixers:
    """How the mixers of a model go on from a state."""

    several: bool  # whether several tokens after a state are read as in one pass over everything
    single: bool  # whether single tokens are
    divisible: frozenset[type]  # the types of mixers that keep the right state at the root while they read on

    @property
    def stepwise(self) -> bool:
        """Whether tokens after a state are to be read one by one, as transformers' own generation reads them."""
        return not (self.several and self.single)

    @property
    def own(self) -> bool:
        """Whether transformers' own generation differs from one pass over everything."""
        return not self.single


def continuation(model: Any, mixers: Sequence[nn.Module]) -> ResumedMixers:
    """Compare what each mixer computes in one pass, in two, and token by token, in float32.

    A state that is left out is seen here in every dtype of the model. In the logits of a model in bfloat16 it could
    hide behind rounding.
    """
    several = single = True
    divisible = {type(each) for each in mixers}
    for mixer, inputs in _inputs(model, mixers):
        twin = copy.deepcopy(mixer).float() if next(mixer.parameters()).dtype.itemsize < 4 else mixer
        whole, _ = _outputs(twin.forward, (_SHORT,), inputs)
        pieces, kept = _outputs(twin.forward, (_ROOT, _SHORT), inputs, follow=True)
        steps, _ = _outputs(twin.forward, range(_SHORT - _LAST, _SHORT + 1), inputs)
        several &= _far(pieces, whole) < _SAME
        single &= _far(steps, whole) < _SAME
        divided, marked = _outputs(twin.forward, (_ROOT, _SHORT), inputs, follow=True, divisible=True)
        alike = marked.keys() == kept.keys() and (
            _far([*divided, *marked.values()], [*pieces, *(kept[key] for key in marked)]) < _SAME
        )
        if not alike:
            divisible.discard(type(mixer))
    return ResumedMixers(several, single, frozenset(divisible if several and single else ()))


def _inputs(model: Any, mixers: Sequence[nn.Module]) -> list[tuple[nn.Module, tuple[Any, Any]]]:
    """What mixers get when the model reads a few tokens; floating-point numbers as float32 at least."""
    found: dict[nn.Module, tuple[Any, Any]] = {}

    def enter(module: nn.Module, args: Any, options: Any) -> None:
        found.setdefault(module, (args, options))

    with ExitStack() as hooks:
        for module in mixers:
            hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        _read(model, _Watching(_SHORT), cache_name(model) or "")
    return [(module, _each_tensor(inputs, _widened)) for module, inputs in found.items()]


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize < 4 else tensor


@torch.inference_mode()
def _outputs(
    forward: Callable[..., Any], cuts: Sequence[int], inputs: Any, *, follow: bool = False, divisible: bool = False
) -> tuple[list[Tensor], Mapping[Key, Tensor]]:
    """The tensors that a mixer returns when it reads in pieces that end at `cuts`, and its states after the first one.

    With `follow` it reads as in our passes; a `divisible` one reads all pieces at once.
    """
    view, found = _Watching(_SHORT, cuts=cuts, mark=_ROOT if len(cuts) == 2 else None), list[Tensor]()

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    args, options = _each_tensor(inputs, torch.clone, view)
    with in_pass(view) if follow else nullcontext():
        _each_tensor(_Divided(forward, view, 1, _SHORT, divisible=divisible)(*args, **options), collect)
    return found, view.groups[0].marked


def _far(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest relative difference of two rows of tensors."""
    return max(relative_error(*pair) for pair in zip(found, expected, strict=True))


def _each_tensor(value: Any, change: Callable[[Tensor], Tensor], view: StateView | None = None) -> Any:
    """A mixer's inputs or outputs with every tensor changed, and the cache replaced where there is another."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, StateView):
        return value if view is None else view
    if isinstance(value, tuple | list):
        return type(value)(_each_tensor(each, change, view) for each in value)
    if isinstance(value, dict):
        return {name: _each_tensor(each, change, view) for name, each in value.items()}
    return value


@contextmanager
def in_pieces(
    mixers: Sequence[nn.Module], view: StateView, rows: int, width: int, divisible: Collection[type] = ()
) -> Iterator[None]:
    """While this is open, mixers read a pass group by group and piece by piece; the view keeps the states.

    The caller holds the lock of the model's cache: the modules are changed meanwhile. Rows and width are those of the
    padded pass; mixers of the types in `divisible` read all pieces of a group at once.
    """
    if len(view.groups) == 1 and view.groups[0].cuts == (width,):
        yield
        return
    with ExitStack() as stack:
        for module in mixers:
            divided = _Divided(module.forward, view, rows, width, divisible=type(module) in divisible)
            stack.enter_context(mock.patch.object(module, "forward", divided))
        yield


class _Divided:
    """A mixer's forward pass that reads in pieces, or at once where its recurrence is divided."""

    def __init__(self, forward: Callable[..., Any], view: StateView, rows: int, width: int, *, divisible: bool) -> None:
        self._forward = forward
        self._view = view
        self._rows = rows
        self._width = width
        self._divisible = divisible

    def __call__(self, *args: Any, **options: Any) -> Any:
        made = [(group, self._read(group, args, options)) for group in self._view.groups]
        if len(made) == 1 and made[0][0].cuts[-1] == self._width:
            return made[0][1]
        return _spread(made, self._rows, self._width)

    def _read(self, group: RowGroup, args: Any, options: Any) -> Any:
        parts, start = [], 0
        cuts = group.cuts[-1:] if self._divisible else group.cuts
        for stop in cuts:
            self._view.begin(group, stop - start, group.mark if self._divisible else None)
            mine = [_cut(each, group.rows, self._rows, self._width, start, stop) for each in (args, options)]
            parts.append(self._forward(*mine[0], **mine[1]))
            if stop == group.mark:
                self._view.mark()
            start = stop
        widths = [stop - start for start, stop in zip((0, *cuts), cuts, strict=False)]
        return parts[0] if len(parts) == 1 else _joined(parts, widths)


def _cut(value: Any, chosen: list[int], rows: int, width: int, start: int, stop: int) -> Any:
    """The part of a mixer's input for some rows and some of their tokens; what has no tokens stays."""

    def part_of(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2 or tensor.shape[1] != width or tensor.shape[0] not in (1, rows):
            return tensor
        part = tensor[:, start:stop]
        return part if tensor.shape[0] == 1 or len(chosen) == rows else part[chosen]

    return _each_tensor(value, part_of)


def _tokens_dim(parts: Sequence[Tensor], widths: Sequence[int]) -> int | None:
    """The dimension of a mixer's outputs that counts tokens; None if there is none."""
    sizes = [part.shape for part in parts]
    return next((dim for dim in range(1, parts[0].dim()) if [size[dim] for size in sizes] == list(widths)), None)


def _joined(parts: Sequence[Any], widths: Sequence[int]) -> Any:
    """The outputs of pieces as one output."""
    if isinstance(parts[0], Tensor):
        dim = _tokens_dim(parts, widths)
        return parts[-1] if dim is None else torch.cat(list(parts), dim=dim)
    if isinstance(parts[0], tuple | list):
        return type(parts[0])(_joined(each, widths) for each in zip(*parts, strict=True))
    return parts[-1]


def _spread(made: Sequence[tuple[RowGroup, Any]], rows: int, width: int) -> Any:
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
