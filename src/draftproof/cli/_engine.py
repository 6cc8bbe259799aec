"""The options that say which engine a command loads: models and parts, with the names of `Engine.load`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from draftproof import models
from draftproof.cli._options import Options, with_options
from draftproof.cli._parts import BACKEND_HELP, DRAFTER_HELP, STOPPER_HELP, VERIFIER_HELP, default_draft
from draftproof.cli._pulling import obtain
from draftproof.engine.engine import Engine

_NAMES = "a registered name, hub id, directory or .gguf file"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Arguments of `Engine.load`.

    Attributes:
        target: the target.
        draft: the draft model.
        dtype: number format of both models: auto, float32, bfloat16 or float16.
        device: where both models are: cpu, cuda, cuda:1; without it an accelerator if there is one.
        backend: implementation of the forward pass.
        max_batch: sequences decoded together.
        trust_remote_code: run code that comes with a model.
        generation_config: where sampling defaults come from: auto reads the target's generation config, none does not.
        drafter: where drafts come from.
        stopper: when a draft ends.
        verifier: the verification rule.
        draft_temperature: temperature of the draft alone; the output distribution stays the target's.
        draft_top_k: top-k of the draft alone; the output distribution stays the target's.
    """

    target: str | None = None
    draft: str | None = None
    dtype: str = "auto"
    device: str | None = None
    backend: str = "auto"
    max_batch: int = 8
    trust_remote_code: bool = False
    generation_config: str = "auto"
    drafter: str | None = None
    stopper: str | None = None
    verifier: str | None = None
    draft_temperature: float | None = None
    draft_top_k: int | None = None


_SPECULATION = ("drafter", "stopper", "verifier", "draft_temperature", "draft_top_k")
_HELP = {
    "target": f"The target: {_NAMES}; without it {models.DEFAULT_TARGET}.",
    "draft": f"The draft model: {_NAMES}; without it {models.DEFAULT_DRAFT}, or none if --target is given.",
    "backend": BACKEND_HELP,
    "drafter": DRAFTER_HELP,
    "stopper": f"{STOPPER_HELP}; without it auto.",
    "verifier": f"{VERIFIER_HELP}; without it the drafter's default.",
}
_MODELS = tuple(name for name in EngineOptions.__dataclass_fields__ if name not in _SPECULATION)


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the parameter `engine` of a typer command by an option for each field of EngineOptions.

    The command gets a dictionary by field.
    """
    groups = [
        Options(EngineOptions, panel, only=only, help={name: _HELP[name] for name in only if name in _HELP})
        for panel, only in (("Models", _MODELS), ("Speculation", _SPECULATION))
    ]
    return with_options(engine=groups)(command)


def load_engine(options: Mapping[str, Any], *, quiet: bool) -> Engine:
    """The engine of these options; models are downloaded where they are not on this machine.

    Raises:
        UserError: see `Engine.load`.
    """
    named = options["target"]
    names = named or models.DEFAULT_TARGET, options["draft"] or default_draft(named, options["drafter"])
    obtain(*names, quiet=quiet)
    others = {name: value for name, value in options.items() if name not in ("target", "draft")}
    return Engine.load(*names, **others)
