"""A transformers model whose products are native, as a second model beside it: every parameter is shared.

The second model is a shallow copy. Its linear layers and its experts are those of the first with another forward, which
multiplies few rows with the weights where they are and leaves many rows, and passes with gradients, to their own.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from draftproof import native
from draftproof.backends.hf.truncate import put, shallow
from draftproof.backends.model_info import PACKED, quantization_method, relative_error
from draftproof.backends.products.linear_layers import linear_layers, matrix_of
from draftproof.backends.products.packed_linear import GROUP, LinearSlice
from draftproof.native.operations import Operations
from draftproof.native.tensors import Interleaved, Quantized

MOST_ROWS = 16  # more are left to torch, unless native products are as fast for many
_SAID = ("has_gate", "has_bias", "is_transposed", "down_proj", "num_experts")  # of how experts keep their weights
_CHECKED = 5  # rows on which experts are compared
_SAME = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # relative differences that rounding explains
_CLASSES: dict[tuple[type, type], type] = {}


def natively(model: Any) -> Any:
    """A copy of a model that multiplies natively; the model itself where that is not possible or not asked for.

    Left as they are: models with hooks of accelerate's, adapters or quantized weights, or with a part that is not on
    the CPU; layers with hooks before them; and experts whose outputs differ from those of their own forward.
    """
    if not _may_be_copied(model):
        return model
    linear = {path: each for path, each in linear_layers(model).items() if _is_free(each) and not _is_native(each)}
    chosen = {path: each for path, each in linear.items() if native.operations_for(each.weight) is not None}
    made: dict[nn.Module, nn.Module] = {each: _with(each, _NativeLinear) for each in chosen.values()}
    for path, each in model.named_modules():
        twin = None if _is_native(each) else native_experts(each)
        if twin is not None:
            chosen[path], made[each] = each, twin
    if not chosen:
        return model
    _install_recorders(model)
    copied: dict[str, Any] = {"": shallow(model)}
    for path, each in chosen.items():
        put(copied, path, made[each])
    return copied[""]


def multiplies_natively(model: Any) -> bool:
    """Whether products of a model are native: those of a copy by `natively`, or of packed weights."""
    return any(_is_native(each) or isinstance(each, LinearSlice) for each in model.modules())


def _may_be_copied(model: Any) -> bool:
    if quantization_method(model) not in (None, PACKED) or hasattr(model, "peft_config"):
        return False
    modules = list(model.modules())
    if any(hasattr(each, "_hf_hook") or type(each).__module__.startswith("peft.") for each in modules):
        return False
    return all(each.device.type == "cpu" for each in model.parameters())


def _is_free(module: Any) -> bool:
    """Whether nothing is hung onto a module that looks at what it is given."""
    return not module._forward_pre_hooks and "forward" not in vars(module)  # noqa: SLF001 - has no public name


def _is_native(module: nn.Module) -> bool:
    return isinstance(module, _NativeLinear | _NativeExperts)


def _install_recorders(model: Any) -> None:
    """Let transformers hang its recorders of hidden states onto the modules before they are copied.

    Twins share hooks, but not the note that recorders are there: each would hang on its own, and record layers twice.
    """
    recording: Any = sys.modules.get("transformers.utils.output_capturing")
    if not hasattr(recording, "maybe_install_capturing_hooks"):
        return
    for each in model.modules():
        if hasattr(each, "config") and hasattr(each, "get_input_embeddings"):
            recording.maybe_install_capturing_hooks(each)


def _class(own: type, kind: type) -> type:
    """A class with the forward of `kind`, and all else of a module's own class; always the same one."""
    if (own, kind) not in _CLASSES:
        _CLASSES[own, kind] = type(own.__name__, (kind, own), {"__module__": own.__module__, "__doc__": own.__doc__})
    return _CLASSES[own, kind]


def _with(module: Any, kind: type) -> Any:
    """A shallow copy of a module, with the forward of `kind`."""
    twin = shallow(module)
    twin.__class__ = _class(type(module), kind)
    return twin


def _few(x: Tensor, weight: Tensor, most: int) -> Operations | None:
    """The operations for a product of rows with a weight; None where torch's own is to be taken."""
    if torch.is_grad_enabled() or x.dtype != weight.dtype or not x.numel() or weight.device != x.device:
        return None
    operations = native.operations_for(x)
    if operations is None or x.numel() <= most * x.shape[-1]:
        return operations
    return operations if operations.in_place and weight.stride(-1) == 1 else None


class _NativeLinear(nn.Module):
    """A linear layer that multiplies few rows natively."""

    weight: Any
    bias: Any

    def forward(self, x: Float[Tensor, "*rows in"]) -> Float[Tensor, "*rows out"]:
        operations = _few(x, self.weight, MOST_ROWS)
        if operations is None:
            made: Tensor = super().forward(x)
            return made
        matrix = matrix_of(self)
        assert matrix is not None, "the layer was linear when it was replaced"
        return operations.rows_product(x, matrix, self.bias)


# --- mixtures of experts ----------------------------------------------------------------------------------------------


def native_experts(module: Any) -> Any | None:
    """A copy of a module of experts that multiplies natively; None where it is none, or its outputs would differ.

    Modules of experts say how they keep their weights, in the attributes by which transformers' own implementations
    read them (`use_experts_implementation`).
    """
    if isinstance(module, _NativeExperts):
        return module
    if not says_experts(module) or not _is_free(module):
        return None
    if native.operations_for(module.down_proj) is None or getattr(module, "_is_expert_parallel", False):
        return None
    twin = _with(module, _NativeExperts)
    return twin if _agree(module, twin) else None


def says_experts(module: Any) -> bool:
    """Whether a module says how it keeps the weights of experts."""
    if not all(hasattr(module, name) for name in _SAID):
        return False
    return isinstance(module.down_proj, Tensor) and module.down_proj.dim() == 3


@torch.inference_mode()
def _agree(module: Any, twin: Any) -> bool:
    """Whether two modules of experts compute the same for some rows, as rounding allows."""
    weight = module.down_proj
    size = weight.shape[2 if module.is_transposed else 1]
    count, source = int(module.num_experts), torch.Generator().manual_seed(0)
    x = torch.randn((_CHECKED, size), generator=source).to(weight.dtype)
    scores = torch.rand((_CHECKED, count), generator=source)
    shares, chosen = scores.topk(min(2, count), -1)
    try:
        expected, found = (each(x, chosen, shares.to(weight.dtype)) for each in (module, twin))
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    return relative_error(found, expected) <= _SAME[weight.dtype]


Group = tuple[int, int, int]


class _NativeExperts(nn.Module):
    """Experts that multiply few rows natively: those that a token is sent to, and no others."""

    gate_up_proj: Any
    gate_up_proj_bias: Any
    up_proj: Any
    up_proj_bias: Any
    down_proj: Any
    down_proj_bias: Any
    act_fn: Any
    post_expert_norm: Any
    _apply_gate: Any
    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_transposed: bool

    def forward(
        self, x: Float[Tensor, "tokens dim"], chosen: Int[Tensor, "tokens k"], shares: Float[Tensor, "tokens k"]
    ) -> Float[Tensor, "tokens dim"]:
        """What the chosen experts of each token make of it, by their shares."""
        operations = self._operations(x)
        if operations is None:
            made: Tensor = super().forward(x, chosen, shares)
            return made
        order, groups = sorted_pairs(chosen)
        rows, by = torch.tensor(order), chosen.shape[-1]
        inner = self._product(operations, x[rows // by], self.name_of_first, groups)
        inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
        outer = self._product(operations, inner, "down_proj", groups)
        if getattr(self, "has_post_expert_norm", False):
            outer = self.post_expert_norm(outer)
        weighted = outer * shares.reshape(-1)[rows].unsqueeze(-1)
        sorted_back = torch.empty_like(weighted)
        sorted_back[rows] = weighted
        return sorted_back.view(len(x), by, -1).sum(1).to(x.dtype)

    @property
    def name_of_first(self) -> str:
        return "gate_up_proj" if self.has_gate else "up_proj"

    def matrices(self, name: str) -> Float[Tensor, "experts out in"]:
        weight: Tensor = getattr(self, name).detach()
        return weight.transpose(1, 2) if self.is_transposed else weight

    def _operations(self, x: Tensor) -> Operations | None:
        return _few(x, self.down_proj, MOST_ROWS)

    def _bias(self, name: str) -> Tensor | None:
        return getattr(self, f"{name}_bias") if self.has_bias else None

    def _product(self, operations: Operations, x: Tensor, name: str, groups: Sequence[Group]) -> Tensor:
        return operations.rows_product(x, self.matrices(name), self._bias(name), groups)


def quantizing_experts(module: Any, bits: int) -> Generator[None, None, Any]:
    """A copy of a module of experts with quantized weights, made in steps: None after each step; returns the copy."""
    quantized = {}
    for name in (module.name_of_first, "down_proj"):
        weight = module.matrices(name)
        operations = native.operations_for(weight)
        assert operations is not None, "the experts are native"
        blocks: Tensor | None = None
        for number, each in enumerate(weight):
            part = operations.quantize(Interleaved.of(each.contiguous()), bits, GROUP)
            if blocks is None:
                blocks = part.blocks.new_empty((len(weight), *part.blocks.shape))
                quantized[name] = replace(part, blocks=blocks)
            blocks[number] = part.blocks
            yield None
    twin = _with(module, QuantizedExperts)
    twin.quantized = quantized
    return twin


class QuantizedExperts(_NativeExperts):
    """Experts whose weights are quantized."""

    quantized: dict[str, Quantized]

    def _operations(self, x: Tensor) -> Operations | None:
        return native.operations_for(x)

    def _product(self, operations: Operations, x: Tensor, name: str, groups: Sequence[Group]) -> Tensor:
        return operations.quantized_rows_product(x, self.quantized[name], self._bias(name), groups)


def sorted_pairs(chosen: Int[Tensor, "tokens k"]) -> tuple[list[int], list[Group]]:
    """Sort (token, expert) pairs by expert.

    Returns:
        the sorted indices of the pairs (token * k + choice), and (expert, first, count) of each chosen expert: its
        slice of them.
    """
    experts = chosen.reshape(-1).tolist()
    order = sorted(range(len(experts)), key=experts.__getitem__)
    groups: list[Group] = []
    for place, pair in enumerate(order):
        if groups and groups[-1][0] == experts[pair]:
            expert, first, count = groups[-1]
            groups[-1] = expert, first, count + 1
        else:
            groups.append((experts[pair], place, 1))
    return order, groups
