"""PEFT adapters: which model an adapter was made for, and both as one model, merged where that is the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof import models
from draftproof.backends.hf.probe import TOLERANCE
from draftproof.backends.model_info import relative_error, sample_logits
from draftproof.errors import UserError, listed, reason
from draftproof.files import read_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
INSTALL = "pip install peft"
_log = logging.getLogger(__name__)


def base_of(source: str) -> str | None:
    """The model that an adapter was made for; None where `source` (a directory or a hub id) is no adapter alone.

    Raises:
        UserError: an adapter whose base model is not named, or not to be had.
    """
    folder = Path(source)
    if folder.is_dir():
        if not (folder / CONFIG).exists() or (folder / "config.json").exists():
            return None
        config = folder / CONFIG
    elif folder.exists():  # a file: transformers, which takes a second to import, is not asked
        return None
    else:
        models.refuse_unreachable(source)
        from transformers.utils.peft_utils import find_adapter_config_file

        found = find_adapter_config_file(source)
        if found is None:
            return None
        config = Path(found)
    named = read_object(config, "an adapter that save_pretrained wrote").get("base_model_name_or_path")
    try:
        return models.resolve(named if isinstance(named, str) else "")
    except UserError as cause:
        raise UserError(
            f"the adapter {source!r} was made for {named!r}, which cannot be had here ({reason(cause)}): name its base "
            "model as target, and it as adapter"
        ) from cause


def tokenizer_of(source: str) -> str:
    """Where the tokenizer of a model is: an adapter without one has its base model's."""
    folder = Path(source)
    if (folder / "tokenizer_config.json").exists() or (folder / "tokenizer.json").exists():
        return source
    return base_of(source) or source


def with_adapter(load: Callable[[], Any], adapter: str) -> Any:
    """A transformers model with an adapter: merged into its weights, or beside them where merging changes its logits.

    Args:
        load: loads the base model; called again where merging failed.
        adapter: a directory or a hub id.

    Raises:
        UserError: no peft, no adapter there, not one of this model, or one that does more than change its layers.
    """
    if find_spec("peft") is None:
        raise UserError(f"the adapter {adapter!r} needs the package peft, which is not installed: {INSTALL}")
    folder = _folder(adapter)
    wrapped = _wrapped(load(), folder, adapter)
    expected = sample_logits(wrapped)
    try:
        made = _compared(wrapped.merge_and_unload(safe_merge=True), expected, adapter)
    except Exception as cause:  # noqa: BLE001 - adapters that cannot be merged say so in many ways
        _log.info("the adapter %s is not merged: %s; backend hf computes it beside the weights", adapter, reason(cause))
        made = _compared(_wrapped(load(), folder, adapter).get_base_model(), expected, adapter)
    return made.eval().requires_grad_(requires_grad=False)


def _compared(made: Any, expected: Float[Tensor, "tokens vocab"], adapter: str) -> Any:
    """A model without peft's own wrapper, which computes the wrapper's logits."""
    error = relative_error(sample_logits(made), expected)
    if not error < TOLERANCE.get(made.dtype, TOLERANCE[torch.bfloat16]):
        raise UserError(
            f"the adapter {adapter!r} changes more than the layers of its model (its logits are off by {error:.2g} "
            "without peft's wrapper): expected LoRA or another adapter of single layers"
        )
    return made


def _folder(adapter: str) -> Path:
    """The directory of an adapter, from the hub if it is a hub id."""
    folder = Path(models.resolve(adapter))
    if not folder.exists():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(adapter, allow_patterns=[CONFIG, WEIGHTS]))
        except Exception as cause:
            raise UserError(f"cannot fetch the adapter {adapter!r}: {reason(cause)}") from cause
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            more = "; pickled weights are refused on purpose" if name == WEIGHTS else ""
            raise UserError(
                f"{adapter!r} is no adapter: there is no {name}{more} (expected a directory or hub id that "
                "peft's save_pretrained wrote)"
            )
    return folder


def _wrapped(model: Any, folder: Path, adapter: str) -> Any:
    """The model in peft's wrapper, with every tensor of the adapter in place."""
    import peft

    try:
        config: Any = peft.PeftConfig.from_pretrained(str(folder))
    except Exception as cause:
        raise UserError(f"the config of the adapter {adapter!r} cannot be read: {reason(cause)}") from cause
    if config.is_prompt_learning or getattr(config, "alora_invocation_tokens", None):
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        raise UserError(
            f"the adapter {adapter!r} ({kind}) depends on the tokens of a prompt or adds to them: expected LoRA or "
            "another adapter that changes weights alike for every token"
        )
    try:
        config.inference_mode = True
        wrapped: Any = peft.PeftModelForCausalLM(model, config)
        report = wrapped.load_adapter(str(folder), "default")
    except Exception as cause:
        raise UserError(f"the adapter {adapter!r} does not fit {type(model).__name__}: {reason(cause)}") from cause
    strange = sorted([*report.missing_keys, *report.unexpected_keys])
    if strange:
        raise UserError(
            f"the adapter {adapter!r} was made for another model than this {type(model).__name__}: "
            f"{listed(strange, 3)} are missing on one side"
        )
    return wrapped.eval()
