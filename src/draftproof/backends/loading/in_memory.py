"""Backends around a transformers model that its owner goes on using: its weights are read and never moved.

The lean forward works on copies of the linear weights, in its own layout. Backend hf shares every weight, and so do
models whose layers differ, but for the small ones that native code has in another form. All go by a shallow copy of
the model, so that none keeps the model itself alive.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.cache.windows import windows_of
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.hf.probe import Probe
from draftproof.backends.hf.truncate import shallow
from draftproof.backends.lean.backend import LeanForward, readable_traits
from draftproof.backends.lean.graph_backend import forward_of
from draftproof.backends.lean.layers import Lean
from draftproof.backends.lean.module_backend import LeanModulesBackend
from draftproof.backends.lean.snapshots import LeanSnapshotBackend
from draftproof.backends.loading.by_name import LEAN_KINDS, reads_modules, suitable
from draftproof.backends.model_info import ModelInfo
from draftproof.errors import UserError
from draftproof.peak import available

LEGAL = ("auto", "lean", "hf", "snapshot")
_SPARE = 1.5  # so many times the memory of the copies must be free before `auto` makes them
_SAMPLED = 512  # words of each tensor that `model_version` reads
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
# What torch keeps in a module (parameters, hooks, its mode), and transformers once it has collected hidden states.
_NO_SETTINGS = frozenset({*vars(nn.Module()), "_output_capturing_hooks_installed"})

_log = logging.getLogger(__name__)

Version = tuple[tuple[Any, ...], ...]
Counter = tuple[int, str]  # the module's identity, and the attribute's name


def backend_in_memory(model: Any, *, backend: str = "auto", name: str | None = None, check: bool = True) -> SlotBackend:
    """A backend that reads a transformers model and leaves it as it is.

    "auto" takes "lean" where the model allows it and there is memory for copies of its linear weights, else what shares
    them. With `check`, the backend is compared with the model's own forward pass now (a few short passes).

    Raises:
        UserError: an unknown backend, or one that does not support the model; a model in training mode.
    """
    if backend not in LEGAL:
        raise UserError(f"backend: expected one of {', '.join(LEGAL)} for a model in memory, got {backend!r}")
    refuse_training(model)
    twin = _twin(model)  # backends exchange layers, and the model stays as it is
    kind = suitable(twin) if backend == "auto" else backend
    modules = kind == LeanModulesBackend.kind and reads_modules(twin)
    if modules or kind == LeanSnapshotBackend.kind:
        cls = LeanModulesBackend if modules else LeanSnapshotBackend
        try:
            return cls(twin, name=name, check=check)
        except UserError as cause:
            if backend != "auto" or not modules:
                raise
            _log.warning("read by transformers' own forward pass: %s", cause)
            twin, kind = _twin(model), "hf"  # what failed may have exchanged layers of the first
    if backend == "auto" and kind in LEAN_KINDS and not _fits(model):
        kind = "hf"
    if kind in LEAN_KINDS:
        try:
            return _lean(twin, name, LeanForward if kind == backend else forward_of, check=check)
        except UserError as cause:
            if backend != "auto":
                raise
            _log.warning("read by transformers' own forward pass: %s", cause)
            kind = "hf"
    return HFBackend(twin, name=name, check=check)


def _twin(model: Any) -> Any:
    """A shallow copy of a model, without what torch.compile hung onto it: that is bound to the model itself."""
    twin = shallow(model)
    twin._compiled_call_impl = None  # noqa: SLF001 - set by Module.compile, which has no way back
    original = getattr(vars(twin).get("forward"), "_torchdynamo_orig_callable", None)
    if original is not None and getattr(original, "__func__", None) is type(model).forward:
        del twin.forward
    return twin


def refuse_training(model: Any) -> None:
    """Refuse a model in training mode."""
    live = (name or "the model itself" for name, each in model.named_modules() if each.training and not _same(each))
    place = next(live, None)
    if place is not None:
        raise UserError(
            f"the model is in training mode ({place}), in which dropout makes each pass another one: call model.eval() "
            "before generating, and model.train() after it"
        )


def _same(module: nn.Module) -> bool:
    """Whether a module computes the same in training: transformers leaves resized embeddings in that mode."""
    return isinstance(module, nn.Linear | nn.Embedding)


def _lean(model: Any, name: str | None, form: Callable[[ModelInfo, Lean], LeanForward], *, check: bool) -> LeanForward:
    facts = ModelInfo.of(model, name)
    traits = readable_traits(model, facts.name)
    probe = Probe(model, facts.name) if check else None
    windows = windows_of(model) if probe is None else probe.windows
    lean = Lean(_parts_of(model), windows, traits, getattr(model.config, "layer_types", None))
    made = form(facts, lean)
    if probe is not None:
        probe.check(made, beyond=False)
    return made


def _parts_of(model: Any) -> SimpleNamespace:
    """Copies of a model's modules that share its tensors, for `Lean` to take apart in the model's place."""
    shared = {id(each): each.detach() for each in model.parameters()}
    decoder, head = copy.deepcopy((model.model, model.lm_head), shared)
    return SimpleNamespace(model=decoder, lm_head=head)


def _fits(model: Any) -> bool:
    """Whether there is memory for copies of the weights; assumed where the system does not say."""
    weights = list(model.parameters())
    needed = _SPARE * sum(each.numel() * each.element_size() for each in weights)
    free = available(weights[0].device)
    return free is None or free > needed


def model_version(model: Any) -> Version:
    """What changes when the weights of a model do, or what it computes with them: compare two of them.

    It holds each tensor's identity, place, dtype, torch's count of its changes in place, and a sum over some of its
    bytes. So a change by an optimizer, by `load_state_dict`, by another dtype or device is seen for certain, and a
    change past torch's count (through `.data`, or by another library) where it touches many weights. Of each module it
    holds the hooks, a replaced forward pass, and the settings that are plain values, such as those of adapters: which
    one is active, whether it is disabled, and its scale. `pass_counters` finds those that only count passes.
    """
    return (*_weights(model), *(_module_facts(each) for each in model.modules()))


def grown_numbers(before: Version, after: Version) -> frozenset[Counter]:
    """The whole numbers in modules that are larger in the second version."""
    known = _whole_numbers(before)
    return frozenset(place for place, value in _whole_numbers(after).items() if value > known.get(place, value))


@torch.no_grad()
def pass_counters(model: Any) -> frozenset[Counter]:
    """Whole numbers in modules that a pass of one token makes larger: they count passes, and are no settings."""
    before = model_version(model)
    model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device))
    return grown_numbers(before, model_version(model))


def without(version: Version, left_out: AbstractSet[Counter]) -> Version:
    """A version without some of its settings."""
    if not left_out:
        return version
    return tuple(
        (*facts[:-1], tuple(each for each in facts[-1] if (facts[0], each[0]) not in left_out))
        if _is_of_module(facts)
        else facts
        for facts in version
    )


def _whole_numbers(version: Version) -> dict[Counter, int]:
    settings = ((facts[0], name, value) for facts in version if _is_of_module(facts) for name, value in facts[-1])
    return {(module, name): value for module, name, value in settings if type(value) is int}


def _is_of_module(facts: tuple[Any, ...]) -> bool:
    return isinstance(facts[1], type)


def _module_facts(module: nn.Module) -> tuple[Any, ...]:
    own = vars(module)
    hooks = [(key, hook) for kind in _HOOKS for key, hook in own[kind].items()]  # torch never gives a key again
    kept = ((name, value) for name, value in own.items() if name not in _NO_SETTINGS and not _is_ours(value))
    settings = tuple((name, _setting(value)) for name, value in kept)
    return id(module), type(module), tuple(key for key, hook in hooks if not _is_ours(hook)), settings


def _setting(value: Any) -> Any:
    """A value that can be compared later; of an object that is no plain value, only a function's identity."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_setting, value))
    if isinstance(value, set | frozenset):
        return frozenset(map(_setting, value))
    if isinstance(value, dict):
        return tuple((_setting(key), _setting(each)) for key, each in value.items())
    return id(value) if callable(value) else None


def _is_ours(value: Any) -> bool:
    """Whether this is there for a pass of ours, or is what transformers collects hidden states with."""
    return str(getattr(value, "__module__", "")).startswith(("draftproof.", "transformers.utils.output_capturing"))


@torch.no_grad()
def _weights(model: Any) -> Version:
    tensors = [*model.parameters(), *model.buffers()]
    sums = [_sampled(each) for each in tensors]
    facts = [
        (
            id(each),
            each.data_ptr() if each.device.type != "meta" else 0,
            str(each.dtype),
            tuple(each.shape),
            _count(each),
        )
        for each in tensors
    ]
    return tuple((*fact, value) for fact, value in zip(facts, _values(sums), strict=True))


def _count(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - has no public name


def _sampled(tensor: torch.Tensor) -> torch.Tensor | None:
    """The sum of some of a tensor's bytes, read as whole numbers; None where it has none to read."""
    if tensor.device.type == "meta" or not tensor.numel() or not tensor.is_contiguous() or tensor.is_quantized:
        return None
    flat = tensor.detach().view(-1)
    step = max(flat.numel() // _SAMPLED, 1)
    return flat[::step].contiguous().view(torch.uint8).sum(dtype=torch.int64)


def _values(sums: list[torch.Tensor | None]) -> list[int]:
    """The numbers of some tensors, with one copy from each device; 0 for None."""
    found = [0] * len(sums)
    by_device: dict[torch.device, list[int]] = {}
    for place, each in enumerate(sums):
        if each is not None:
            by_device.setdefault(each.device, []).append(place)
    for places in by_device.values():
        chosen = [each for place in places if (each := sums[place]) is not None]
        for place, value in zip(places, torch.stack(chosen).tolist(), strict=True):
            found[place] = value
    return found
