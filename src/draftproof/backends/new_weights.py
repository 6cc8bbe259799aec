"""New weights for a model that is loaded: found under the names of its state dict, and checked before any is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from draftproof.errors import UserError, listed

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SHOWN = 4  # names in an error


def state_of(weights: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a module or of a state dict by name.

    Raises:
        UserError: something else, or a model with an adapter beside its weights.
    """
    state: Any = weights.state_dict() if isinstance(weights, nn.Module) else weights
    if not isinstance(state, Mapping) or not all(isinstance(each, Tensor) for each in state.values()):
        raise UserError(
            f"weights: expected a transformers model, or its state dict with tensors by name, got "
            f"{type(weights).__name__}"
        )
    adapted = next((name for name in state if ".lora_" in name or ".base_layer." in name), None)
    if adapted is not None:
        raise UserError(
            f"the weights hold an adapter beside the model's own ({adapted}): merge it first (merge_and_unload() on a "
            "copy, or merge_adapter() and unmerge_adapter() around the update), and give the base model's state dict"
        )
    return dict(state)


def refuse_other_shapes(state: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], name: str) -> None:
    """Refuse a state dict that lacks a tensor, has one more, or one of another shape, and NaN."""
    problem = mismatch({key: tuple(tensor.shape) for key, tensor in state.items()}, shapes)
    if problem is not None:
        raise UserError(f"the new weights {problem}; expected a whole state dict of {name}, under transformers' names")
    broken = [key for key in shapes if state[key].is_floating_point() and not bool(state[key].isfinite().all())]
    if broken:
        raise UserError(f"the new weights hold NaN or infinite numbers in {broken[0]}: the old ones stay in use")


def mismatch(found: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """What is wrong with the shapes of a model's tensors: some are missing, too much or others; None where all fit."""
    missing = sorted(shapes.keys() - found.keys())
    strange = sorted(found.keys() - shapes.keys())
    wrong = sorted(
        f"{key} is {list(found[key])}, not {list(shape)}"
        for key, shape in shapes.items()
        if key in found and found[key] != shape
    )
    for problem, names in (("lack", missing), ("have too much:", strange), ("do not fit:", wrong)):
        if names:
            return f"{problem} {listed(names, _SHOWN)}"
    return None


@torch.no_grad()
def copy_into(model: nn.Module, state: Mapping[str, Tensor], name: str) -> None:
    """Write new weights into a model, in place; none is written unless all fit."""
    own = model.state_dict(keep_vars=True)
    if any(each.is_meta for each in own.values()):
        raise UserError(f"some weights of {name} are on the disk and cannot be updated: load it whole")
    groups: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for key, each in own.items():
        groups.setdefault((each.data_ptr(), tuple(each.shape)), []).append(key)
    tied = {key: names for names in groups.values() for key in names}  # names of one tensor: one of them is enough
    whole = dict(state)
    for key, names in tied.items():
        known = next((other for other in names if other in state), None)
        if key not in state and known is not None:
            whole[key] = state[known]
    refuse_other_shapes(whole, {key: tuple(each.shape) for key, each in own.items()}, name)
    for key, each in own.items():
        each.copy_(whole[key].to(each.device))
