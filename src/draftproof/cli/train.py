"""`draftproof train`: trains drafters, and heads that end drafts, on any texts or prompts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import typer

from draftproof.cli._download import obtain
from draftproof.cli._measurement import NAMES, measurement
from draftproof.cli._options import Options, with_options
from draftproof.cli._output import Json, Quiet, progress_bar
from draftproof.cli._parts import HEADED
from draftproof.cli._quiet import quiet_libraries
from draftproof.sampling import SamplingParams
from draftproof.training.drafter_artefact import make_drafter
from draftproof.training.drafter_options import DrafterJob, Imitation, Shape, Texts
from draftproof.training.evaluation.drafter import DrafterOptions
from draftproof.training.evaluation.drafter import evaluate_drafter as measure_drafter
from draftproof.training.evaluation.heads import HeadOptions
from draftproof.training.evaluation.heads import evaluate_heads as measure_heads
from draftproof.training.evaluation.pair import PairOptions
from draftproof.training.evaluation.pair import evaluate_pair as measure_pair
from draftproof.training.evaluation.text import TextEvaluationOptions
from draftproof.training.evaluation.text import evaluate_text as measure_text
from draftproof.training.feature_head import make_feature_head
from draftproof.training.feature_options import FeatureJob
from draftproof.training.head_artefact import METRICS, make_head, make_verifier_head
from draftproof.training.head_options import HeadJob, Material
from draftproof.training.heads import Labels
from draftproof.training.loop import TrainingPlan

_log = logging.getLogger(__name__)
app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Train drafters, and heads that end drafts. To continue an interrupted run, repeat its command.",
)
_Job = TypeVar("_Job", DrafterJob, FeatureJob, HeadJob)


def run(
    make: Callable[[_Job, Any], dict[str, Any]],
    job: _Job,
    models: Sequence[str | None],
    *,
    as_json: bool,
    quiet: bool,
    shown: Sequence[str] = (),
) -> None:
    """Run a job that reads these models, and print its figures and the path of its directory.

    Without `as_json` only the figures `shown` are printed (GROUP.NAME for one of a group), or all if it is empty.
    """
    with quiet_libraries():
        obtain(*models, quiet=quiet)
        summary = make(job, progress_bar(quiet=quiet))
    if as_json:
        typer.echo(json.dumps({"path": str(job.out), **summary}))
        return
    for line in _lines(_chosen(summary, shown) if shown else summary):
        typer.echo(line)
    typer.echo(f"written: {job.out}")
    if shown:
        typer.echo(f"all figures: {job.out / METRICS}")


def _chosen(summary: dict[str, Any], shown: Sequence[str]) -> dict[str, Any]:
    """The figures with these names, in groups as in the summary; those that are missing are left out."""
    made: dict[str, Any] = {}
    for group, _, name in (each.rpartition(".") for each in shown):
        found, place = (summary.get(group, {}), made.setdefault(group, {})) if group else (summary, made)
        if name in found:
            place[name] = found[name]
    return {name: value for name, value in made.items() if value != {}}


def _lines(summary: dict[str, Any], indent: str = "") -> list[str]:
    made = []
    for name, value in summary.items():
        words = name.replace("_", " ")
        if isinstance(value, dict):
            made += [f"{indent}{words}", *_lines(value, indent + "  ")]
        elif value is not None:
            made.append(f"{indent}{words}: {f'{value:.4g}' if isinstance(value, float) else value}")
    return made


# --- drafters --------------------------------------------------------------------------------------------------------

_TEXTS = Options(Texts, "Data", names={"limit": "prompts", "share": "background_share"})
_SHAPE = Options(Shape, "Shape", names={"vocabulary": "vocab"})
_IMITATION = Options(
    Imitation,
    "Imitation of a target",
    names={"target": "distil", "policy": "on_policy", "share": "on_policy_share"},
    defaults={"target": None},
    metavars={"target": "TARGET", "policy": "WHO"},
)
_PLAN = Options(
    TrainingPlan,
    "Training",
    only=("steps", "learning_rate", "warmup"),
    defaults={"steps": 2000, "learning_rate": 2e-3, "warmup": 100},
)
_JOB = (
    Options(DrafterJob, only=("out",)),
    Options(DrafterJob, "Shape", only=("config", "init"), metavars={"config": "FILE", "init": "MODEL"}),
    Options(
        DrafterJob,
        "Training",
        only=("rows", "length", "precision", "stored", "seed", "device"),
        names={"rows": "batch"},
    ),
    Options(DrafterJob, "Trials in the engine", only=("trial_prompts",)),
)


@app.command()
@with_options(texts=(_TEXTS,), shape=(_SHAPE,), imitation=(_IMITATION,), plan=(_PLAN,), job=_JOB)
def drafter(
    *,
    texts: dict[str, Any],
    shape: dict[str, Any],
    imitation: dict[str, Any],
    plan: dict[str, Any],
    job: dict[str, Any],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a Llama model from scratch on text, or with --distil as a draft model for a target."""
    if imitation["target"] is None and imitation["policy"] != "text":
        raise typer.BadParameter("--on-policy needs a target to imitate: name it with --distil")
    plan["warmup"] = min(plan["warmup"], plan["steps"] // 10)
    made = DrafterJob(
        texts=Texts(**texts),
        shape=Shape(**shape),
        imitation=None if imitation["target"] is None else Imitation(**imitation),
        plan=TrainingPlan(**plan, weight_decay=0.1, betas=(0.9, 0.95)),
        **job,
    )
    run(make_drafter, made, (imitation["target"], made.init), as_json=as_json, quiet=quiet)


_HEAD_PLAN = Options(
    TrainingPlan,
    "Training",
    only=("steps", "learning_rate", "evaluate_every", "seed"),
    defaults={"steps": 4000, "evaluate_every": 200},
)
_HEAD_JOB = (
    Options(FeatureJob, only=("target", "out")),
    Options(
        FeatureJob,
        "Data",
        only=(
            "data", "held_out", "prompts", "answers", "answer_tokens", "answers_each", "form", "windows", "length",
            "cache",
        ),
    ),
    Options(FeatureJob, "Shape", only=("format", "ids", "inner_size", "own_output", "start")),
    Options(FeatureJob, "Training", only=("batch", "unroll", "tv", "states", "dtype", "device", "trial_prompts")),
)  # fmt: skip


@app.command("feature-head")
@with_options(plan=(_HEAD_PLAN,), job=_HEAD_JOB)
def feature_head(*, plan: dict[str, Any], job: dict[str, Any], as_json: Json = False, quiet: Quiet = False) -> None:
    """Train a drafter of one layer on the target's hidden states, as EAGLE does: feature_head:DIR, or other formats."""
    steps = plan["steps"]
    made = TrainingPlan(**plan, warmup=min(50, steps // 10), floor=0.02, betas=(0.9, 0.95), log_every=min(50, steps))
    run(make_feature_head, FeatureJob(plan=made, **job), (job["target"],), as_json=as_json, quiet=quiet)


# --- evaluation ------------------------------------------------------------------------------------------------------

_STORIES = {"target": "embedded:stories", "draft": "embedded:stories-draft"}
_DRAFT = {"draft": f"The draft model: {NAMES}, or feature_head:DIR."}

app.command("evaluate-pair")(
    measurement(
        PairOptions,
        measure_pair,
        "Evaluate a target and its draft model on held-out text: bits per byte, acceptance, tokens per target call.",
        names={"tokens": None},
        defaults=_STORIES,
        texts=_DRAFT,
    )
)
app.command("evaluate-drafter")(
    measurement(
        DrafterOptions,
        measure_drafter,
        "Evaluate a feature head beside its untrained self, an early exit of the target, and lookup.",
        names={"prompts": None},
    )
)
app.command("evaluate-heads")(
    measurement(
        HeadOptions,
        measure_heads,
        "Evaluate trained heads on held-out prompts: predictions, stopping beside fixed lengths, SPRINTER's quality.",
        defaults=_STORIES,
        texts=_DRAFT | {"kinds": f"Stopper of the head: {', '.join(HEADED)}."},
    )
)
app.command("evaluate-text")(
    measurement(
        TextEvaluationOptions,
        measure_text,
        "Evaluate the text that small models write: bits per byte under a larger model, and coined words.",
        defaults={"models": ("embedded:stories", "embedded:target"), "judge": "smollm2-135m"},
        texts={"temperature": "Temperature of the text."},
    )
)

# --- heads -----------------------------------------------------------------------------------------------------------

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
# What tells a user whether a head has learned something and pays, in this order; `--json` prints the other figures too.
_SHOWN = (
    "auc", "auc_max_probability", "eta_tp", "eta_fp", "threshold",
    *(f"{group}.{name}" for group in ("chosen", "best_fixed") for name in ("length", "latency", "block_efficiency")),
)  # fmt: skip


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
    run(make, job, (given["target"], given["draft"]), as_json=as_json, quiet=quiet, shown=_SHOWN)
