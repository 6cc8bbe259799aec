"""The prediction layer of Qwen3-Next and Qwen3.5 checkpoints (`mtp.*`), for transformers' class of such layers.

transformers 5.23 reads this layout of tensors for another family (Mellum), but the configs here lack the fields that
it asks for. Whether there is a layer is told by the tensors: some configs name layers that the files do not have, and
others name none.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import nn

from draftproof.backends.hf.truncate import shallow
from draftproof.errors import UserError, reason
from draftproof.models.found import weight_files

TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_FULL = "full_attention"
_SHARED = ("mtp.embed_tokens.", "mtp.lm_head.", "mtp.shared_head.")


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
    _checked(_tensors(model, name), name)
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
    """Refuse tensors that transformers left out of a prediction layer: its structure is another one then."""
    there = sum(math.prod(shape) for shape in _tensors(model, name).values())
    read = sum(weights.numel() for weights in mtp.layers.parameters())
    if there != read:
        raise UserError(
            f"drafter mtp: the tensors mtp.* of {name} hold {there} numbers, and its prediction layer has {read} here; "
            "so its structure or its form of weights is another one: use another drafter"
        )


def _tensors(model: Any, name: str) -> dict[str, list[int]]:
    """The shapes of the checkpoint's tensors `mtp.*` by name."""
    found: dict[str, list[int]] = {}
    try:
        for path in weight_files(_folder(model.config.name_or_path)):
            with safe_open(path, "pt") as file:
                own = [each for each in file.keys() if each.startswith("mtp.")]  # noqa: SIM118 - it is no dict
                found |= {each: file.get_slice(each).get_shape() for each in own}
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


def _checked(tensors: Mapping[str, Any], name: str) -> None:
    if "mtp.fc.weight" not in tensors:
        raise UserError(
            f"drafter mtp: the checkpoint of {name} has no prediction layer (no tensor mtp.fc.weight), whatever its "
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
