"""The options of a command's engine: models and parts, named as in `Engine.load`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from draftproof.cli._download import obtain
from draftproof.cli._launch import divide
from draftproof.cli._options import Options, with_options
from draftproof.cli._parts import BACKEND_HELP, DRAFTER_HELP, STOPPER_HELP, VERIFIER_HELP, default_draft
from draftproof.engine.engine import Engine
from draftproof.engine.options import EngineOptions

TARGET_VARIABLE = "DRAFTPROOF_TARGET"
_NAMES = "a registered name, hub id, directory or .gguf file"


@dataclass(frozen=True)
class _Target:
    target: str | None = None


_SPECULATION = ("drafter", "stopper", "verifier", "draft_temperature", "draft_top_k", "draft_budget")
_HELP = {
    "target": f"The target: {_NAMES}; without it the value of the variable {TARGET_VARIABLE}.",
    "draft": f"The draft model: {_NAMES}; without it that of an embedded target, and none for other targets.",
    "backend": BACKEND_HELP,
    "drafter": DRAFTER_HELP,
    "stopper": f"{STOPPER_HELP}; without it auto.",
    "verifier": f"{VERIFIER_HELP}; without it the drafter's default.",
}
_SHORT = {"threads": "-t"}
_MODELS = tuple(each.name for each in fields(EngineOptions) if each.name not in (*_SPECULATION, "check"))


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the parameter `engine` of a typer command by the target and an option for each field of EngineOptions.

    The command gets a dictionary by field. If the target is divided among processes, it runs in the first of them.
    """
    groups = [
        Options(of, panel, only=only, help={name: _HELP[name] for name in only if name in _HELP}, short=_SHORT)
        for of, panel, only in (
            (_Target, "Models", ("target",)),
            (EngineOptions, "Models", _MODELS),
            (EngineOptions, "Speculation", _SPECULATION),
        )
    ]

    @functools.wraps(command)
    def divided(**values: Any) -> Any:
        if (processes := values["engine"]["tensor_parallel"]) != 1:
            divide(processes)
        return command(**values)

    return with_options(engine=groups)(divided)


def named_target(options: Mapping[str, Any]) -> str | None:
    """The target named by the options, or else by the environment; None without one."""
    return options["target"] or os.environ.get(TARGET_VARIABLE) or None


def load_engine(target: str, options: Mapping[str, Any], *, quiet: bool) -> Engine:
    """Load the engine of a target, with all other arguments of `Engine.load`; missing models are downloaded."""
    names = target, options["draft"] or default_draft(target, options["drafter"])
    obtain(*names, quiet=quiet)
    others = {name: value for name, value in options.items() if name not in ("target", "draft")}
    return Engine.load(*names, **others)
