"""How a model is loaded: its number format, its device, and the forward pass that shall read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from draftproof.errors import UserError, reason, refuse_unknown
from draftproof.native.tensors import BITS

DTYPES: dict[str, torch.dtype | str] = {
    "auto": "auto",
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
ACTIVATIONS = ("int8", "float")  # inputs of products with weights that a GGUF file holds in few bits
KV_DTYPES: dict[str, torch.dtype | None] = {
    "auto": None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}
"""Of stored keys and values."""
WEIGHTS: dict[str, int | None] = {"auto": None, **{f"int{bits}": bits for bits in BITS}}


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a model is loaded; `engine.options.EngineOptions` says what the values of most fields mean."""

    dtype: str = "auto"
    device: str | Mapping[str, Any] | None = None
    trust_remote_code: bool = False
    check: bool = True
    backend: str = "auto"  # one of `by_name.BACKENDS`
    adapter: str | None = None
    attn_implementation: str | None = None  # one of `by_name.ATTENTION`
    quantization_config: Any = None  # also the packed layers of a quantized checkpoint
    plainly: bool = False  # take backend `generate` in place of `auto` for a model whose drafts cannot be taken back
    tensor_parallel: int = 1
    activations: str = ACTIVATIONS[0]
    weights: str = "auto"  # one of WEIGHTS
    kv_dtype: str = "auto"  # one of KV_DTYPES

    def __post_init__(self) -> None:
        """Read the names that only draftproof knows."""
        for name, value, legal in (
            ("activations", self.activations, ACTIVATIONS),
            ("weights", self.weights, WEIGHTS),
            ("kv_dtype", self.kv_dtype, KV_DTYPES),
        ):
            refuse_unknown(name, value, legal)

    def own_dtype(self, default: torch.dtype, backends: tuple[str, ...] = ("lean",)) -> torch.dtype | None:
        """The dtype of hidden states where weights of few bits are read natively by `backends`; None elsewhere."""
        dtypes = {"auto": default, "float32": torch.float32, "bfloat16": torch.bfloat16}
        altered = self.adapter or self.attn_implementation or self.quantization_config is not None
        if altered or self.tensor_parallel != 1 or self.backend not in ("auto", *backends):
            return None
        on_cpu = isinstance(self.device, str | None) and parse_device(self.device).type == "cpu"
        return dtypes.get(self.dtype) if on_cpu else None


def draft_dtype(name: str, dtype: str) -> tuple[str, int | None]:
    """The dtype in which a draft model is loaded, and the bits to which its weights are quantized then.

    `dtype` is the target's, which the name "auto" stands for.
    """
    quantized = {f"int{bits}": bits for bits in BITS}
    if name in quantized:
        return dtype, quantized[name]
    refuse_unknown("draft_dtype", name, (*DTYPES, *quantized))
    return (dtype if name == "auto" else name), None


def parse_dtype(name: str) -> torch.dtype | str:
    """The torch dtype of a name; "auto" stays."""
    refuse_unknown("dtype", name, DTYPES)
    return DTYPES[name]


def parse_device(name: str | None) -> torch.device:
    """The torch device of a name; None picks an accelerator when there is one."""
    if name is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as cause:
        raise UserError(f"device {name!r} is not available here: {reason(cause)}") from cause
    return device
