"""`draftproof train`: drafters, and heads that end drafts, from any texts or prompts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import typer

from draftproof.cli._options import Options, with_options
from draftproof.cli._results import Quiet
from draftproof.cli._train_drafters import drafter, feature_head
from draftproof.cli._train_evaluate import evaluate_drafter, evaluate_heads, evaluate_pair, evaluate_text
from draftproof.cli._training import Json, run
from draftproof.sampling import SamplingParams
from draftproof.training.head_artefact import make_head, make_verifier_head
from draftproof.training.head_options import HeadJob, Material
from draftproof.training.heads import Labels
from draftproof.training.loop import TrainingPlan

_log = logging.getLogger(__name__)
app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Train drafters, and heads that end drafts. To continue an interrupted run, repeat its command.",
)
app.command()(drafter)
app.command("feature-head")(feature_head)
app.command("evaluate-pair")(evaluate_pair)
app.command("evaluate-drafter")(evaluate_drafter)
app.command("evaluate-heads")(evaluate_heads)
app.command("evaluate-text")(evaluate_text)

MATERIAL = (
    Options(Material, only=("target", "draft")),
    Options(Material, "Data", only=("data", "form", "opening", "prompts", "starts", "cache")),
    Options(Material, "Training", only=("seed", "dtype", "device")),
)
SAMPLING = Options(
    SamplingParams,
    "Sampling of the responses",
    only=("temperature", "top_k", "top_p", "max_tokens"),
    help={
        "temperature": "Temperature of both models; a head fits the temperature it was trained at.",
        "max_tokens": "Largest number of tokens in a response.",
    },
)
PLAN = Options(
    TrainingPlan,
    "Training",
    only=("steps", "learning_rate"),
    defaults={"steps": None, "learning_rate": 3e-3},
    help={"steps": "Number of optimiser steps; by default 4000, and 2000 for kind sprinter."},
    partial=True,
)
LABELS = Options(
    Labels,
    "Training",
    only=("w_rej", "lam"),
    names={"lam": "lambda"},
    help={
        "w_rej": "Weight of rejections in the cross-entropy; kind acceptance only.",
        "lam": "Factor lambda: a token is acceptable if q <= lambda p; kind sprinter only.",
    },
)
OUT = Options(HeadJob, only=("out",))
HEAD = Options(
    HeadJob,
    "Training",
    only=("depth", "shared_blocks", "reads_draw", "mix", "batch"),
    defaults={"depth": None},
    help={
        "depth": "Number of residual SiLU blocks before the output; by default 3, and 0 (a linear head) for kind "
        "sprinter.",
        "reads_draw": "Also read log q of the drawn token, which the hidden state lacks; kind sprinter only.",
    },
    metavars={"mix": "R"},
    partial=True,
)
KIND = Options(
    HeadJob,
    "Training",
    only=("kind",),
    help={
        "kind": "What the head predicts: acceptance is Pr(accepted), for the stopper acceptance; log_ratio is "
        "log(p/q), for the stopper ratio; sprinter is SPRINTER's small verifier, for the stopper approximate. With the "
        "rule last_token it is LOSSY: it changes the output distribution."
    },
)
TRIALS = Options(
    HeadJob,
    "Trials in the engine",
    only=("threshold", "sweep", "cost_ratio", "trial_prompts"),
    help={
        "threshold": "Threshold of the stopper; by default the one with the least time per token in the trials, by the "
        "cost model, and 0.5 for kind sprinter."
    },
    metavars={"cost_ratio": "R"},
)
KINDS = ("acceptance", "log_ratio", "sprinter")
_SPRINTER = "verifier"  # what files of heads call kind sprinter
_NOT_OF_SPRINTER = {"mix": None, "sweep": False, "cost_ratio": None}  # options of the other kinds, where not given
_OPTIONS = (*MATERIAL, SAMPLING, PLAN, LABELS, OUT)


@app.command()
@with_options(given=(*_OPTIONS, KIND, HEAD, TRIALS))
def head(*, given: dict[str, Any], as_json: Json = False, quiet: Quiet = False) -> None:
    """Train a head that reads the draft model's hidden state, for a stopper that ends drafts."""
    kind = given["kind"]
    if kind not in KINDS:
        raise typer.BadParameter(f"--kind: expected {', '.join(KINDS[:-1])} or {KINDS[-1]}, got {kind!r}")
    if given["sweep"] and given["threshold"] is not None:
        raise typer.BadParameter("--sweep chooses the threshold: leave out --threshold")
    if kind == "sprinter":
        _train_sprinter(given, as_json=as_json, quiet=quiet)
        return
    if given["reads_draw"]:
        raise typer.BadParameter("--reads-draw needs --kind sprinter")
    _run(make_head, {"steps": 4000, **given}, as_json=as_json, quiet=quiet)


@app.command(hidden=True)
@with_options(given=(*_OPTIONS, HEAD, TRIALS))
def verifier(*, given: dict[str, Any], as_json: Json = False, quiet: Quiet = False) -> None:
    """Train SPRINTER's small verifier: the old name of `head --kind sprinter`."""
    _log.warning("train verifier is now train head --kind sprinter: the old name will be removed in the next version")
    _train_sprinter(given, as_json=as_json, quiet=quiet)


def _train_sprinter(given: dict[str, Any], *, as_json: bool, quiet: bool) -> None:
    for name, default in _NOT_OF_SPRINTER.items():
        if given.get(name) != default:
            raise typer.BadParameter(f"--{name.replace('_', '-')} does not go with --kind sprinter: leave it out")
    threshold = 0.5 if given["threshold"] is None else given["threshold"]
    given = {"depth": 0, "steps": 2000, **given, "kind": _SPRINTER, "threshold": threshold}
    _run(make_verifier_head, given, as_json=as_json, quiet=quiet)


def _run(make: Callable[[HeadJob, Any], dict[str, Any]], given: dict[str, Any], *, as_json: bool, quiet: bool) -> None:
    rest = dict(given)

    def taken(*groups: Options) -> dict[str, Any]:
        return {name: rest.pop(name) for group in groups for name in group.only if name in rest}

    material = Material(**taken(*MATERIAL), params=SamplingParams(**taken(SAMPLING)))
    plan = TrainingPlan(**taken(PLAN), warmup=min(50, given["steps"] // 10))
    job = HeadJob(material=material, labels=Labels(**taken(LABELS)), plan=plan, **rest)
    run(make, job, (given["target"], given["draft"]), as_json=as_json, quiet=quiet)
