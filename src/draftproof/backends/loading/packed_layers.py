"""Packed matrices of a checkpoint as linear layers of transformers' own model, where it has no lean forward.

transformers reads all other tensors. A quantizer of ours, which it calls while it loads a model, puts the layers into
the empty model, so that the package of the method is not needed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from draftproof.backends.heads.published.mtp_qwen import TYPES, empty_layer, name_in_checkpoint, refuse_other
from draftproof.backends.hf.backend import StoredPrediction
from draftproof.backends.lean.traits import UnreadError
from draftproof.backends.loading.language_model import reading_classes
from draftproof.backends.loading.packed_weights import PackedWeights
from draftproof.backends.model_info import PACKED
from draftproof.backends.products.packed_linear import LinearSlice, product_of
from draftproof.errors import UserError, reason
from draftproof.native.ggml import StoredMatrix
from draftproof.native.tensors import Immutable


@dataclass(frozen=True)
class PackedLayers(Immutable):  # transformers copies its options
    """Linear layers of a checkpoint, made of its packed matrices."""

    config: Any  # transformers' own of the model, without a word of its quantization
    layers: Mapping[str, nn.Module]  # by the names of the modules that they replace
    weights: PackedWeights  # of the checkpoint

    @classmethod
    def of(cls, where: str, weights: PackedWeights) -> PackedLayers:
        """Make the layers."""
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(where)
            del config.quantization_config
            kind = reading_classes(where, gguf=None, trust_remote_code=False)[0]
            with torch.device("meta"):
                model = kind.from_config(config)
        except Exception as cause:
            raise UnreadError(f"transformers makes no empty model of it ({reason(cause)})") from cause
        layers: dict[str, nn.Module] = {}
        empty = dict(model.named_modules())
        unread = model._keys_to_ignore_on_load_unexpected or []  # noqa: SLF001
        for stem in sorted(weights.packed):
            if any(re.search(pattern, stem) for pattern in unread):  # layers that only predict further tokens
                continue
            given, name = weights[f"{stem}.weight"], f"{stem}.weight"
            place = empty.get(stem)
            if type(place) is not nn.Linear or place.weight.shape != given.shape:
                raise UnreadError(f"its {name} of shape {tuple(given.shape)} is no linear layer of the model")
            product = product_of(given, weights.optional(f"{stem}.bias"))
            layers[stem] = LinearSlice(product, 0, len(given))
        return cls(config, layers, weights)

    @property
    def prediction(self) -> StoredPrediction | None:
        """The prediction layer of the checkpoint, where its matrices are packed, too."""
        text = self.config.get_text_config()
        packed = text.model_type in TYPES and any(stem.startswith("mtp.") for stem in self.weights.packed)
        return StoredPrediction(found=True, read=self._prediction_layer) if packed else None

    def _prediction_layer(self, model: Any) -> Any:
        """transformers' class of it over the model; raises UserError where it cannot be read."""
        names = [each for each in self.weights.names if each.startswith("mtp.")]
        name = model.config.name_or_path
        refuse_other(names, name)
        made = empty_layer(model)
        try:
            stems = [self._filled(made, place, part) for place, part in list(made.layers[0].named_modules())]
        except UnreadError as cause:
            raise UserError(
                f"drafter mtp: the prediction layer of {name} cannot be read ({reason(cause)}): use another drafter"
            ) from cause
        left = [each for each in names if not each.startswith(tuple(f"{stem}." for stem in stems if stem))]
        if left:
            raise UserError(
                f"drafter mtp: the prediction layer of {name} has {left[0]} beside the known tensors, which is not "
                "read here: use another drafter"
            )
        return made.requires_grad_(requires_grad=False).train(mode=False)

    def _filled(self, made: Any, place: str, part: nn.Module) -> str:
        """Fill a module of the layer, and return its name in the checkpoint; nothing where it has no weights."""
        own = dict(part.named_parameters(recurse=False))
        if not own:
            return ""
        stem = name_in_checkpoint(place)
        for kind, weight in own.items():
            if f"{stem}.{kind}" not in self.weights:
                raise UnreadError(f"it lacks {stem}.{kind}")
            given, bias = self.weights[f"{stem}.{kind}"], self.weights.optional(f"{stem}.bias")
            if tuple(given.shape) != tuple(weight.shape):
                raise UnreadError(f"its {stem}.{kind} has the shape {tuple(given.shape)}, not {tuple(weight.shape)}")
            if isinstance(given, StoredMatrix):
                made.layers[0].set_submodule(place, LinearSlice(product_of(given, bias), 0, len(given)))
                break
            part.register_parameter(kind, nn.Parameter(given, requires_grad=False))
        return stem

    @property
    def options(self) -> dict[str, Any]:
        """How `from_pretrained` is called to put the layers in."""
        return {"config": self.config, "quantization_config": _config_class()(self)}


@functools.cache
def _config_class() -> Any:
    """The class of transformers' description of this method, which is made known to it."""
    from transformers.quantizers.auto import register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    class PackedConfig(QuantizationConfigMixin):
        def __init__(self, given: PackedLayers) -> None:
            self.quant_method: Any = PACKED
            self.given = given

        def to_dict(self) -> dict[str, Any]:
            return {"quant_method": PACKED}

    @register_quantizer(PACKED)
    class PackedQuantizer(HfQuantizer):
        quantization_config: PackedConfig
        is_trainable = False

        def is_serializable(self) -> bool:
            return False

        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
            for name, layer in self.quantization_config.given.layers.items():
                model.set_submodule(name, layer)
                model._keys_to_ignore_on_load_unexpected.add(rf"^{re.escape(name)}\.")  # noqa: SLF001

    return PackedConfig
