"""The prediction layer of Qwen3-Next and Qwen3.5 checkpoints (`mtp.*`), for transformers' class of such layers.

transformers 5.23 reads this layout of tensors for another family (Mellum), but the configs here lack the fields that
it asks for. Whether there is a layer is told by the tensors: some configs name layers that the files do not have, and
others name none.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from typing_extensions import override

from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.heads.base import Flat, LayeredNet, Passes
from draftproof.backends.heads.published.files import HeadFiles
from draftproof.backends.heads.published.rounding import stays_whole
from draftproof.backends.hf.truncate import shallow
from draftproof.backends.lean.attention import Pass
from draftproof.backends.lean.hybrid import HybridLean
from draftproof.backends.lean.inputs import whole_product
from draftproof.backends.lean.layers import Norm
from draftproof.backends.lean.module_backend import pack_layers
from draftproof.backends.lean.native_layers import NativeLayers
from draftproof.backends.lean.snapshots import LeanSnapshotBackend
from draftproof.backends.lean.traits import UnreadError
from draftproof.errors import UserError, reason
from draftproof.models.found import weight_files

TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_FULL = "full_attention"
_PARTS = {  # of transformers' class: their names in heads of speculators
    "eh_proj": "input_proj",
    "post_norm": "final_layernorm",
    "hnorm": "hidden_layernorm",
    "enorm": "token_layernorm",
}
_OUTER = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}
FIRST = "mtp.fc.weight"  # every such layer has it
_log = logging.getLogger(__name__)
_EXPERTS = "mlp.experts.down_proj"
_SCALES = "_scale_inv"  # behind the name of a matrix in FP8: a scale for each of its blocks
_SHARED = ("mtp.embed_tokens.", "mtp.lm_head.", "mtp.shared_head.")


class HybridMtpNet(LayeredNet):
    """The network of such a layer by native code, where that reads the target."""

    def __init__(self, mtp: Any, lean: HybridLean) -> None:
        (outer,) = mtp.layers
        layer = lean.layer_like(outer.mtp_block, 0)
        self.width = layer.size
        self.embed = lean.embed
        self.logits = (lean if stays_whole() else lean.for_drafts()).logits
        self._embedded = Norm(outer.enorm, offset=lean.traits.offset)
        self._given = Norm(outer.hnorm, offset=lean.traits.offset)
        self._norm = Norm(outer.post_norm, offset=lean.traits.offset)
        self._project = whole_product(outer.eh_proj)
        self._layers = NativeLayers([layer])
        self._passes = Passes(lean.rope, layer.attention, {layer.kind: None})

    @override
    def _run(self, x: Flat, embedded: Flat, at: Pass, masks: dict[str, Any]) -> Flat:
        x = self._project(torch.cat([self._embedded(embedded), self._given(x)], -1))
        return self._norm(self._layers(x, at, masks))


def native_net(mtp: Any, target: SlotBackend) -> HybridMtpNet | None:
    """The network by native code, packed as the target is; None where transformers' own modules compute it."""
    if not isinstance(target, LeanSnapshotBackend) or target.lean is None:
        return None
    if target.packed:
        pack_layers(mtp.layers)
    try:
        return HybridMtpNet(mtp, target.lean)
    except UnreadError as cause:
        _log.info("the prediction layer of %s is read by transformers' own modules: %s", target.name, cause)
        return None


def is_here(model: Any) -> bool:
    """Whether a model was loaded from files that are still here."""
    try:
        _folder(model.config.name_or_path)
    except OSError:
        return False
    return True


def has_layer(model: Any) -> bool:
    """Whether the checkpoint of a model is here and has such a layer."""
    try:
        return FIRST in _tensors(model, "")
    except UserError:
        return False


def described(model: Any, name: str) -> Any:
    """The model with a config by which transformers finds its prediction layer, on the same weights.

    Raises:
        UserError: the checkpoint has no such layer, several, or one with an embedding or an output layer of its own.
    """
    config = model.config.get_text_config()
    if getattr(config, "mtp_use_dedicated_embeddings", False):
        raise UserError(
            f"drafter mtp: the prediction layer of {name} has an embedding of its own (mtp_use_dedicated_embeddings), "
            "which is not read here: use another drafter"
        )
    refuse_other(_tensors(model, name), name)
    return _twin(model)


def from_head(files: HeadFiles, model: Any) -> Any:
    """transformers' class of such a layer over a model, with the weights of a head in the layout of speculators."""
    made = empty_layer(model)
    own = {name: weight for name, weight in made.state_dict().items() if name.startswith("layers.")}
    for name, weight in own.items():
        part, _, rest = name.removeprefix("layers.0.").partition(".")
        there = f"{_PARTS[part]}.{rest}" if part in _PARTS else rest
        own[name] = files.take(f"mtp_layers.0.{there}", weight.shape).to(model.device, model.dtype)
    made.load_state_dict(own, strict=False, assign=True)
    return made.requires_grad_(requires_grad=False).train(mode=False)


def empty_layer(model: Any) -> Any:
    """transformers' class of such a layer over a model, whose own weights are to be filled in."""
    from transformers.modeling_layers import MtpModel

    with torch.device("meta"):
        return MtpModel(_twin(model), 1)


def name_in_checkpoint(part: str) -> str:
    """What a checkpoint calls a module of transformers' class of such a layer."""
    return f"mtp.{_OUTER[part]}" if part in _OUTER else part.replace("mtp_block.", "mtp.layers.0.", 1)


def _twin(model: Any) -> Any:
    """The model with a config that says that it has one such layer, on the same weights."""
    config = model.config.get_text_config()
    twin = shallow(model)
    twin.config = copy.deepcopy(model.config)
    text = twin.config.get_text_config()
    text.num_mtp_layers = 1
    text.mtp_layer_types = [_FULL]
    decoder = shallow(model.get_decoder())  # transformers takes the classes of the last layer
    decoder.layers = nn.ModuleList(
        layer for layer, kind in zip(decoder.layers, config.layer_types, strict=True) if kind == _FULL
    )
    setattr(twin, twin.base_model_prefix, decoder)
    return twin


def refuse_left(mtp: Any, model: Any, name: str) -> None:
    """Refuse a prediction layer that transformers read in part, or without the scales of its numbers of 8 bits."""
    tensors = _tensors(model, name)
    scaled = [each for each in tensors if each + _SCALES in tensors]
    scales_of = {each + _SCALES for each in scaled}
    there = sum(math.prod(part.get_shape()) for each, part in tensors.items() if each not in scales_of)
    read = sum(weights.numel() for weights in mtp.layers.parameters())
    if there != read:
        raise UserError(
            f"drafter mtp: the tensors mtp.* of {name} hold {there} numbers, and its prediction layer has {read} here; "
            "so its structure or its form of weights is another one: use another drafter"
        )
    own = mtp.layers[0].mtp_block.state_dict()
    if _EXPERTS in own:  # one stands for all, which are read in one operation
        own["mlp.experts.0.down_proj.weight"] = own[_EXPERTS][0]
    for each in scaled:
        found = own.get(each.removeprefix("mtp.layers.0."))
        if found is None:
            continue
        numbers, scales = (tensors[part][:].float() for part in (each, each + _SCALES))
        whole = _scaled(numbers, scales).to(found.device, found.dtype)
        if not torch.allclose(found, whole, rtol=2 * torch.finfo(found.dtype).eps, atol=0):
            raise UserError(
                f"drafter mtp: {each} of {name} was read without its scales, as where the model itself is computed in "
                "FP8: load it as bfloat16 on a CPU, or use another drafter"
            )


def _scaled(numbers: Float[Tensor, "out in"], scales: Float[Tensor, "..."]) -> Float[Tensor, "out in"]:
    """Numbers with a scale for each block, or one for all."""
    each = scales if scales.dim() > 1 else scales.reshape(1, 1)
    for dim, size in enumerate(numbers.shape):
        each = each.repeat_interleave(-(-size // each.shape[dim]), dim).narrow(dim, 0, size)
    return numbers * each


def _tensors(model: Any, name: str) -> dict[str, Any]:
    """The checkpoint's tensors `mtp.*` by name, as slices that are not read yet."""
    found: dict[str, Any] = {}
    try:
        for path in weight_files(_folder(model.config.name_or_path)):
            file: Any = safe_open(path, "pt")
            found |= {each: file.get_slice(each) for each in file.keys() if each.startswith("mtp.")}  # noqa: SIM118 - it is no dict
    except (OSError, ValueError, KeyError, SafetensorError) as cause:
        raise UserError(
            f"drafter mtp: the checkpoint of {name} cannot be read ({reason(cause)}): expected a directory or a hub id "
            "of safetensors with tensors mtp.*"
        ) from cause
    return found


def _folder(source: str) -> Path:
    """The directory of a checkpoint that was loaded; raises OSError where the model was made in memory."""
    if not source:
        raise FileNotFoundError("the model was not loaded from one")
    if Path(source).is_dir():
        return Path(source)
    from transformers.utils.hub import cached_file

    return Path(str(cached_file(source, "config.json", local_files_only=True))).parent


def refuse_other(tensors: Collection[str], name: str) -> None:
    """Refuse a checkpoint whose tensors `mtp.*` are no layer, several, or one with an embedding of its own."""
    if not any(each.startswith(FIRST.removesuffix("weight")) for each in tensors):
        raise UserError(
            f"drafter mtp: the checkpoint of {name} has no prediction layer (no tensor {FIRST}), whatever its "
            "config says, as many conversions are published: use another drafter"
        )
    if any(each.startswith("mtp.layers.1.") for each in tensors):
        raise UserError(f"drafter mtp: the checkpoint of {name} has several layers mtp.layers.*: expected one")
    own = next((each for each in tensors if each.startswith(_SHARED)), None)
    if own is not None:
        raise UserError(
            f"drafter mtp: the prediction layer of {name} has {own} beside the model's own, which is not read here: "
            "use another drafter"
        )
