"""The first layers of a model as a model of its own, on the same weights and in the same cache.

Knows: where a transformers model keeps its layers, how sessions share a slot. Does not know: drafting.

A truncated model's keys and values are those that the whole model computes for its first layers, so what the target has
read the draft need not read again; and what the draft writes ahead the target overwrites with the same numbers.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from draftproof.backends.base import Capabilities, Session
from draftproof.backends.hf import HFBackend, HFSession, Layout
from draftproof.backends.lean import LeanBackend
from draftproof.errors import UserError


class EarlyExitBackend(HFBackend):
    """The first `layers` layers of a backend's model, followed by its own final norm and output layer.

    Args:
        whole: the backend of the whole model; weights and cache are shared with it.
        layers: how many of its layers, 1 to one less than all.

    Raises:
        UserError: a number out of range, or a model whose layers are not found.
    """

    def __init__(self, whole: HFBackend, layers: int) -> None:
        model = first_layers(whole.model, layers, whole.name)
        super().__init__(model, name=f"{whole.name}, first {layers} layers", check=False)
        self._cache = whole._cache  # noqa: SLF001 - the shared cache is the point of this class
        self._lean = whole.lean.first(layers) if isinstance(whole, LeanBackend) else None
        self.capabilities = Capabilities(trees=whole.capabilities.trees, hidden=whole.capabilities.hidden)

    def _compute(self, layout: Layout, *, hidden: bool) -> tuple[Tensor, Tensor | None]:
        if self._lean is not None:
            return self._lean(layout, self._cache, hidden=hidden)
        return super()._compute(layout, hidden=hidden)

    def borrow(self, owner: Session) -> BorrowedSession:
        """A session in the slot of the whole model's session, which has read what that one has."""
        assert isinstance(owner, HFSession), "the owner is a session of the whole model's backend"
        return BorrowedSession(owner)


class BorrowedSession(HFSession):
    """A session that starts where another one stands, in its slot; valid until that one reads or rolls back.

    Args:
        owner: without a tail; call `unread` on it first.
    """

    def __init__(self, owner: HFSession) -> None:
        Session.__init__(self)
        assert owner.stem == owner.length, "a borrowed session continues a chain"
        self.cache = owner.cache
        self.slot = owner.slot
        self._tokens = list(owner.tokens)
        self._length = owner.length

    def close(self) -> None:
        """The slot stays with its owner."""
        self.slot = -1


def first_layers(model: Any, layers: int, name: str) -> Any:
    """A model with the first decoder layers of another one, sharing every weight.

    Args:
        model: a transformers causal LM.
        layers: how many to keep, 1 to one less than all.
        name: how errors call the model.

    Raises:
        UserError: a number out of range, or a model whose layers are not found.
    """
    total = int(model.config.get_text_config().num_hidden_layers)
    if not 1 <= layers < total:
        raise UserError(f"early exit after {layers} layers of {name}: legal are 1 to {total - 1}")
    path = _layers_path(model, total)
    if path is None:
        raise UserError(f"early exit: the layers of {name} ({type(model).__name__}) are not one list of modules")
    twin = _shallow(model)
    inner: Any = twin
    for part in path[:-1]:
        setattr(inner, part, _shallow(getattr(inner, part)))
        inner = getattr(inner, part)
        if hasattr(inner, "config"):
            inner.config = _shortened(inner.config, layers)
    setattr(inner, path[-1], nn.ModuleList(list(getattr(inner, path[-1]))[:layers]))
    twin.config = _shortened(model.config, layers)
    return twin


def _layers_path(model: nn.Module, total: int) -> list[str] | None:
    """Where the list of all decoder layers hangs; the first of them, if nested lists have the same length."""
    found = [
        name.split(".")
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == total
    ]
    return found[0] if found else None


def _shallow(module: Any) -> Any:
    """A module with its own dictionary of children and everything else shared."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)  # noqa: SLF001
    return twin


def _shortened(config: Any, layers: int) -> Any:
    """A copy of a config that declares fewer layers, kinds of layers included."""
    made = copy.deepcopy(config)
    text = made.get_text_config() if hasattr(made, "get_text_config") else made
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = list(text.layer_types)[:layers]
    return made
