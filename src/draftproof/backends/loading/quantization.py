"""Weights quantized by other libraries: what `quantization_config` asks for, and what a checkpoint says of its own."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from draftproof.errors import UserError, reason

LEGAL = "a transformers quantization config, its fields as a mapping, or JSON text or a .json file with them"
_EXAMPLE = '{"quant_method": "bitsandbytes", "load_in_4bit": true}'
_PACKAGES = {  # by method: what its error does not always name
    "gptq": ("optimum", "gptqmodel"),
    "awq": ("gptqmodel",),
    "bitsandbytes": ("bitsandbytes",),
    "torchao": ("torchao",),
    "hqq": ("hqq",),
    "quanto": ("optimum-quanto",),
}


def read_quantization(given: Any) -> Any:
    """The transformers quantization config that an option stands for, new at each call: loading changes it.

    Raises:
        UserError: none of these, an unknown method or field, or a package that is missing.
    """
    if hasattr(given, "quant_method") and hasattr(given, "to_dict"):
        if _method(given) == "bitsandbytes" and not (given.load_in_4bit or given.load_in_8bit):
            raise _refused(given, "it has no load_in_4bit or load_in_8bit")
        return copy.deepcopy(given)
    # transformers leaves out fields that it does not know: of a misspelt one its default would hold without a word.
    fields = quantization_fields(given)
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoQuantizationConfig

    method = fields.get("quant_method")
    of_bitsandbytes = [name for name in ("load_in_4bit", "load_in_8bit") if fields.get(name)]
    if method in (None, "bitsandbytes") and not of_bitsandbytes:
        wanted = "load_in_4bit or load_in_8bit" if method else "quant_method"
        raise _refused(given, f"it has no {wanted}")
    known = sorted({*(each.split("_4bit")[0].split("_8bit")[0] for each in AUTO_QUANTIZATION_CONFIG_MAPPING)})
    if method is not None and method not in known:
        raise UserError(f"quantization_config: expected one of the methods {', '.join(known)}, got {method!r}")
    try:
        made: Any = AutoQuantizationConfig.from_dict(fields)
    except Exception as cause:
        missing = missing_packages(method or "bitsandbytes")
        raise _refused(given, f"{reason(cause)}{_install(missing)}") from cause
    legal = {*inspect.signature(type(made).__init__).parameters, *made.to_dict()} - {"self", "kwargs"}
    if unknown := sorted(fields.keys() - legal):
        raise UserError(
            f"quantization_config has the unknown field {unknown[0]!r}: expected for {_method(made)} "
            f"{', '.join(sorted(name for name in legal if not name.startswith('_')))}"
        )
    return made


def quantization_fields(given: Any) -> dict[str, Any]:
    """The fields that an option names, as plain values; what is no config is refused as in `read_quantization`."""
    if isinstance(given, Mapping):
        return dict(given)
    if hasattr(given, "to_dict"):
        return dict(given.to_dict())
    if not isinstance(given, str):
        raise _refused(given, f"it is a {type(given).__name__}")
    text = given.strip()
    if not text.startswith("{"):
        try:
            text = Path(given).read_text(encoding="utf-8")
        except (OSError, ValueError) as cause:
            raise _refused(given, f"no JSON object, and no file that can be read: {reason(cause)}") from cause
    try:
        fields = json.loads(text)
    except ValueError as cause:
        raise _refused(given, f"no JSON: {reason(cause)}") from cause
    if not isinstance(fields, dict):
        raise _refused(given, "the JSON is no object")
    return fields


def _refused(given: Any, why: str) -> UserError:
    shown = given if isinstance(given, str) else repr(given)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return UserError(f"quantization_config: expected {LEGAL}, for example {_EXAMPLE}, got {shown!r}: {why}")


def quantization_for(source: str, given: Any) -> Any:
    """The transformers quantization config with which a checkpoint is loaded (see `read_quantization`).

    A checkpoint that is quantized already is refused, since transformers leaves it as it is, with a warning. Legal
    there is a config of the same method that says how its weights are read (dequantized, by which kernels).
    """
    asked = read_quantization(given)
    own = _of_checkpoint(source).get("quant_method")
    if own and (own != _method(asked) or not hasattr(asked, "get_loading_attributes")):
        raise UserError(
            f"quantization_config asks for {_method(asked)}, and the weights in {source!r} are quantized already "
            f"({own}): leave it out, or name the checkpoint before it was quantized"
        )
    return asked


def refuse_unknown_quantization(source: str, model: Any) -> None:
    """Refuse weights quantized by a method that transformers does not know: it loads them as they are, and warns."""
    given = getattr(model.config, "quantization_config", None)
    if isinstance(given, dict):  # transformers makes an object of what it knows
        method = given.get("quant_method")
        raise UserError(
            f"the weights in {source!r} are quantized by the method {method!r}, which this version of transformers "
            "does not know: install one that does, or take the model's weights before they were quantized"
        )


def _method(asked: Any) -> str:
    return str(getattr(asked.quant_method, "value", asked.quant_method))


def missing_packages(method: str) -> list[str]:
    """Packages that a method of quantization needs and that are not installed."""
    installed = {each.name for each in metadata.distributions()}
    return [each for each in _PACKAGES.get(method, ()) if each not in installed]


def packages_hint(source: str, asked: Any) -> str:
    """What to install for the quantization of a checkpoint, or that asked for; empty where nothing is missing."""
    method = _of_checkpoint(source).get("quant_method") if asked is None else _method(asked)
    return _install(missing_packages(str(method)))


def _install(missing: list[str]) -> str:
    if not missing:
        return ""
    return f"; its kind of quantized weights needs {' and '.join(missing)}: pip install {' '.join(missing)}"


def _of_checkpoint(source: str) -> dict[str, Any]:
    """What a checkpoint says of its quantization; empty where it says nothing, or cannot be read."""
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(source)[0].get("quantization_config") or {}
    except OSError:
        return {}
