"""A model that the lean forward reads from its safetensors files alone, without transformers.

What the weights do not say (scales, angles, windows) is taken from a transformers model that was read by the lean
forward before (`Architecture.of`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from draftproof.backends.cache.windows import Windows
from draftproof.backends.lean.layers import Lean
from draftproof.backends.lean.traits import Traits
from draftproof.models.found import weight_files


class TensorsByName(ABC):
    """Where the weights of a model come from."""

    @abstractmethod
    def __contains__(self, name: str) -> bool: ...

    @abstractmethod
    def __getitem__(self, name: str) -> Any:
        """The tensor, in the dtype and on the device where it is used."""

    def optional(self, name: str) -> Any:
        """The tensor, if it is there."""
        found = name in self
        return self[name] if found else None


@dataclass(frozen=True)
class Architecture:
    """What the lean forward needs of a model besides its weights."""

    layers: int
    heads: int
    key_heads: int
    head_dim: int
    scaling: float
    eps: float
    traits: Traits
    kinds: tuple[str, ...]
    window: int | None
    layer_kinds: tuple[str, ...] | None

    @classmethod
    def of(cls, lean: Lean) -> Architecture | None:
        """Of a model that is read by the lean forward; None where its layers differ from one another."""
        heads = {replace(layer.heads, angles=0) for layer in lean.layers}
        eps = {norm.eps for layer in lean.layers for norm in layer.norms}
        if len(heads) != 1 or eps != {lean.norm.eps}:
            return None
        (head,), windows = heads, lean.windows
        several = len(windows.kinds) > 1
        return cls(
            layers=len(lean.layers),
            heads=head.queries,
            key_heads=head.keys,
            head_dim=head.dim,
            scaling=head.scale,
            eps=lean.norm.eps,
            traits=lean.traits,
            kinds=tuple(sorted(windows.kinds)),
            window=next((window for window in windows.now().values() if window is not None), None),
            layer_kinds=tuple(layer.kind for layer in lean.layers) if several else None,
        )

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> Architecture:
        """From its fields as JSON has them."""
        made: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
        return cls(**{**made, "traits": Traits.read(row["traits"])})

    def lean(self, folder: Path, dtype: torch.dtype, device: torch.device) -> Lean:
        """The lean forward over the weights in a directory."""
        return self.lean_from(Weights(folder, dtype, device))

    def lean_from(self, weights: TensorsByName) -> Lean:
        """The lean forward over tensors from elsewhere."""
        windows = Windows(frozenset(self.kinds), SimpleNamespace(sliding_window=self.window))
        return Lean(self._parts(weights), windows, self.traits, self.layer_kinds)

    def shapes(self, weights: Mapping[str, Any], hidden: int, vocab: int) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor that these weights must hold.

        Which layers have biases and norms, and how wide they are in between, is read off the weights.
        """
        traits = self.traits
        queries, keys = self.heads * self.head_dim, self.key_heads * self.head_dim
        widths = (queries, keys, keys) if len(traits.qkv) > 1 else (queries + 2 * keys,)
        linear: dict[str, tuple[int, ...]] = {"self_attn.o_proj": (hidden, queries)}
        linear |= {f"self_attn.{name}": (out, hidden) for name, out in zip(traits.qkv, widths, strict=True)}
        if traits.experts is not None:
            linear["mlp.gate"] = (traits.experts.count, hidden)
            if traits.experts.weighed:
                linear["mlp.shared_expert_gate"] = (hidden,)
        for part in traits.gated:
            # One tensor that holds gates and outputs is twice as long as what `down_proj` reads.
            first = weights.get(f"model.layers.0.{part}.{traits.gate_up[0]}.weight")
            gates = 0 if first is None else int(first.shape[-2])
            count = (traits.experts.count,) if traits.experts is not None and part == traits.gated[0] else ()
            linear |= {f"{part}.{name}": (*count, gates, hidden) for name in traits.gate_up}
            linear[f"{part}.down_proj"] = (*count, hidden, gates if len(traits.gate_up) > 1 else gates // 2)
        # Norms of queries and keys are over all heads, or one for each head.
        turned = (queries, keys) if traits.whole else (self.head_dim, self.head_dim)
        norms = {name: (hidden,) for name in traits.norms if name}
        norms |= {f"self_attn.{name}": (size,) for name, size in zip(traits.turned, turned, strict=False)}
        norms |= {"self_attn.sinks": (self.heads,)} if traits.sinks else {}
        made: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (vocab, hidden),
            "model.norm.weight": (hidden,),
        }
        if "lm_head.weight" in weights:
            made["lm_head.weight"] = (vocab, hidden)
        for number in range(self.layers):
            at = f"model.layers.{number}."
            made |= {f"{at}{name}.weight": shape for name, shape in norms.items()}
            for name, shape in linear.items():
                made[f"{at}{name}.weight"] = shape
                if f"{at}{name}.bias" in weights:
                    made[f"{at}{name}.bias"] = shape[:-1]
        return made

    def _parts(self, weights: TensorsByName) -> SimpleNamespace:
        """The weights under the names that transformers' modules have."""
        embedding = weights["model.embed_tokens.weight"]
        tied = "lm_head.weight" not in weights
        inner = SimpleNamespace(
            embed_tokens=SimpleNamespace(weight=embedding),
            layers=_Layers(self.layers, lambda number: self._layer(weights, f"model.layers.{number}.")),
            norm=self._norm(weights, "model.norm"),
        )
        return SimpleNamespace(
            model=inner, lm_head=SimpleNamespace(weight=embedding, bias=None) if tied else _linear(weights, "lm_head")
        )

    def _layer(self, weights: TensorsByName, at: str) -> SimpleNamespace:
        traits = self.traits
        parts = {
            part: {name: _linear(weights, f"{at}{part}.{name}") for name in names}
            for part, names in traits.linear.items()
        }
        attention = SimpleNamespace(
            head_dim=self.head_dim,
            scaling=self.scaling,
            config=SimpleNamespace(num_attention_heads=self.heads, num_key_value_heads=self.key_heads),
            **parts["self_attn"],
            **{name: self._norm(weights, f"{at}self_attn.{name}") for name in traits.turned},
            sinks=weights[f"{at}self_attn.sinks.weight"] if traits.sinks else None,
        )
        norms = {name: self._norm(weights, f"{at}{name}") for name in traits.norms if name}
        mlp = SimpleNamespace(**parts["mlp"])
        for part in traits.gated:
            if part != "mlp":
                setattr(mlp, part.removeprefix("mlp."), SimpleNamespace(**parts[part]))
        return SimpleNamespace(**norms, self_attn=attention, mlp=mlp)

    def _norm(self, weights: TensorsByName, name: str) -> SimpleNamespace:
        return SimpleNamespace(weight=weights[f"{name}.weight"], variance_epsilon=self.eps)


@dataclass(frozen=True)
class _Layers(Sequence[SimpleNamespace]):
    """Layers that are read when they are asked for, so that few of them are in memory in two layouts."""

    length: int
    read: Callable[[int], SimpleNamespace]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: Any) -> Any:
        if number >= self.length:
            raise IndexError(number)
        return self.read(number)


def _linear(weights: TensorsByName, name: str) -> SimpleNamespace:
    return SimpleNamespace(weight=weights[f"{name}.weight"], bias=weights.optional(f"{name}.bias"))


class Weights(TensorsByName):
    """The tensors of a checkpoint by name, each read when it is asked for and converted to a dtype."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        files: list[Any] = [safe_open(path, "pt", device=str(device)) for path in weight_files(folder)]
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Any:
        """A copy of the tensor, so that it does not change with its file."""
        return self._files[name].get_tensor(name).to(self._dtype, copy=True)


class StateWeights(TensorsByName):
    """Tensors of a state dict, each converted to a dtype and moved to a device when it is asked for."""

    def __init__(self, state: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self._state = state
        self._dtype = dtype
        self._device = device

    def __contains__(self, name: str) -> bool:
        return name in self._state

    def __getitem__(self, name: str) -> Any:
        """A copy of the tensor, so that it does not change with the module it comes from."""
        return self._state[name].detach().to(self._device, self._dtype, copy=True)
