"""The options that say which engine a command loads: models and parts, with the names of `Engine.load`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from draftproof.cli._launch import divide
from draftproof.cli._options import Options, with_options
from draftproof.cli._parts import BACKEND_HELP, DRAFTER_HELP, STOPPER_HELP, VERIFIER_HELP, default_draft
from draftproof.cli._pulling import obtain
from draftproof.engine.engine import Engine

TARGET_VARIABLE = "DRAFTPROOF_TARGET"
_NAMES = "a registered name, hub id, directory or .gguf file"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Arguments of `Engine.load`.

    Attributes:
        target: the target.
        draft: the draft model.
        dtype: number format of both models: auto, float32, bfloat16 or float16.
        draft_dtype: another number format for the draft; int8 or int4 quantize the draft model or feature head.
        device: where both models are: cpu, cuda, cuda:1, or auto (several, and the disk); without it an accelerator.
        backend: implementation of the forward pass.
        adapter: a PEFT adapter (LoRA) for the target: a directory or hub id.
        attn_implementation: attention of backend hf: eager or sdpa; without it transformers' choice.
        quantization_config: quantizes the target by transformers: JSON of one of its configs, or a .json file.
        max_model_len: longest sequence, prompt and text together; without it the target's own context.
        max_batch: sequences decoded together.
        kv_memory: memory for keys and values, in bytes or like 2GiB; requests wait for it. Without it no limit.
        prefix_reuse: take over what was read of other requests that begin alike.
        trust_remote_code: run code that comes with a model.
        generation_config: where sampling defaults come from: auto reads the target's generation config, none does not.
        drafter: where drafts come from.
        stopper: when a draft ends.
        verifier: the verification rule.
        draft_temperature: temperature of the draft alone; the output distribution stays the target's.
        draft_top_k: top-k of the draft alone; the output distribution stays the target's.
        tensor_parallel: processes among which the target is divided, each with a device or a share of the cores.
    """

    target: str | None = None
    draft: str | None = None
    dtype: str = "auto"
    draft_dtype: str = "auto"
    device: str | None = None
    backend: str = "auto"
    adapter: str | None = None
    attn_implementation: str | None = None
    quantization_config: str | None = None
    max_model_len: int | None = None
    max_batch: int = 8
    kv_memory: str | None = None
    prefix_reuse: bool = True
    trust_remote_code: bool = False
    generation_config: str = "auto"
    drafter: str | None = None
    stopper: str | None = None
    verifier: str | None = None
    draft_temperature: float | None = None
    draft_top_k: int | None = None
    tensor_parallel: int = 1


_SPECULATION = ("drafter", "stopper", "verifier", "draft_temperature", "draft_top_k")
_HELP = {
    "target": f"The target: {_NAMES}; without it what the variable {TARGET_VARIABLE} names.",
    "draft": f"The draft model: {_NAMES}; without it an embedded target's, or none for others.",
    "backend": BACKEND_HELP,
    "drafter": DRAFTER_HELP,
    "stopper": f"{STOPPER_HELP}; without it auto.",
    "verifier": f"{VERIFIER_HELP}; without it the drafter's default.",
}
_MODELS = tuple(name for name in EngineOptions.__dataclass_fields__ if name not in _SPECULATION)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the parameter `engine` of a typer command by an option for each field of EngineOptions.

    The command gets a dictionary by field. Where a target is divided among processes, it runs in the first of them.
    """
    groups = [
        Options(EngineOptions, panel, only=only, help={name: _HELP[name] for name in only if name in _HELP})
        for panel, only in (("Models", _MODELS), ("Speculation", _SPECULATION))
    ]

    @functools.wraps(command)
    def divided(**values: Any) -> Any:
        if (processes := values["engine"]["tensor_parallel"]) != 1:
            divide(processes)
        return command(**values)

    return with_options(engine=groups)(divided)


def named_target(options: Mapping[str, Any]) -> str | None:
    """The target that the options or else the environment names; None without one."""
    return options["target"] or os.environ.get(TARGET_VARIABLE) or None


def load_engine(target: str, options: Mapping[str, Any], *, quiet: bool) -> Engine:
    """The engine of these options; models are downloaded where they are not on this machine.

    Args:
        target: name of the target.
        options: all other arguments of `Engine.load`.
        quiet: show no progress.

    Raises:
        UserError: see `Engine.load`.
    """
    names = target, options["draft"] or default_draft(target, options["drafter"])
    obtain(*names, quiet=quiet)
    others = {name: value for name, value in options.items() if name not in ("target", "draft")}
    return Engine.load(*names, **others)
