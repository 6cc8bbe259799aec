"""The first layers of a transformers model as a model of its own, on the same weights."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from draftproof.errors import UserError, refuse_outside


def first_layers(model: Any, layers: int, name: str) -> Any:
    """A model with the first decoder layers of another one, sharing every weight."""
    total = int(model.config.get_text_config().num_hidden_layers)
    refuse_outside(f"early exit of {name}", layers, 1, total - 1, " layers")
    path = _layers_path(model, total)
    if path is None:
        raise UserError(f"early exit: the layers of {name} ({type(model).__name__}) are not one list of modules")
    twin = shallow(model)
    inner: Any = twin
    for part in path[:-1]:
        setattr(inner, part, shallow(getattr(inner, part)))
        inner = getattr(inner, part)
        if hasattr(inner, "config"):
            inner.config = _shortened(inner.config, layers)
    setattr(inner, path[-1], nn.ModuleList(list(getattr(inner, path[-1]))[:layers]))
    twin.config = _shortened(model.config, layers)
    return twin


def layers_of(model: nn.Module, total: int) -> nn.ModuleList | None:
    """The list of all decoder layers of a model; None where they are not one list."""
    path = _layers_path(model, total)
    found = None if path is None else model.get_submodule(".".join(path))
    return found if isinstance(found, nn.ModuleList) else None


def _layers_path(model: nn.Module, total: int) -> list[str] | None:
    """Path to the list of all decoder layers; the first one if nested lists have the same length."""
    found = [
        name.split(".")
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == total
    ]
    return found[0] if found else None


def shallow(module: Any) -> Any:
    """A module with its own dictionary of children and everything else shared."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)  # noqa: SLF001
    return twin


def put(copied: dict[str, Any], path: str, layer: nn.Module) -> None:
    """Replace the module at a path of a shallow copy by a layer, and every module above it by a copy of its own.

    `copied` are the modules of the copy by path that are its own already, with the copy itself under "".
    """
    *above, last = path.split(".")
    owner, here = copied[""], ""
    for part in above:
        here = f"{here}.{part}" if here else part
        if here not in copied:
            copied[here] = shallow(owner.get_submodule(part))
            owner.add_module(part, copied[here])
        owner = copied[here]
    owner.add_module(last, layer)


def _shortened(config: Any, layers: int) -> Any:
    """A copy of a config with fewer layers and layer types."""
    made = copy.deepcopy(config)
    text = made.get_text_config() if hasattr(made, "get_text_config") else made
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = list(text.layer_types)[:layers]
    return made
