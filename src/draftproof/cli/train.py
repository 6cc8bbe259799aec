"""`draftproof train`: drafters, and heads that end drafts, from any texts or prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import typer

from draftproof.cli._options import Options, with_options
from draftproof.cli._train_drafter import drafter
from draftproof.cli._train_evaluate import evaluate_drafter, evaluate_heads, evaluate_pair, evaluate_text
from draftproof.cli._train_feature_head import feature_head
from draftproof.cli._training import Json, Quiet, run
from draftproof.sampling import SamplingParams
from draftproof.training.head_artefact import make_head, make_verifier_head
from draftproof.training.head_options import HeadJob, Material
from draftproof.training.heads import Labels
from draftproof.training.loop import TrainingPlan

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
    TrainingPlan, "Training", only=("steps", "learning_rate"), defaults={"steps": 4000, "learning_rate": 3e-3}
)
OUT = Options(HeadJob, only=("out",))
HEAD = Options(HeadJob, "Training", only=("kind", "depth", "shared_blocks", "mix", "batch"), metavars={"mix": "R"})
HEAD_TRIALS = Options(
    HeadJob,
    "Trials in the engine",
    only=("threshold", "sweep", "cost_ratio", "trial_prompts"),
    metavars={"cost_ratio": "R"},
)
VERIFIER = Options(
    HeadJob,
    "Training",
    only=("depth", "shared_blocks", "reads_draw", "threshold", "batch"),
    defaults={"depth": 0, "threshold": 0.5},
    help={"threshold": "Threshold tau: the verifier accepts a token if its probability is above it."},
)
VERIFIER_TRIALS = Options(HeadJob, "Trials in the engine", only=("trial_prompts",))


@app.command()
@with_options(
    material=MATERIAL,
    sampling=(SAMPLING,),
    plan=(PLAN,),
    labels=(Options(Labels, "Training", only=("w_rej",)),),
    job=(OUT, HEAD, HEAD_TRIALS),
)
def head(
    *,
    material: dict[str, Any],
    sampling: dict[str, Any],
    plan: dict[str, Any],
    labels: dict[str, Any],
    job: dict[str, Any],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a head that predicts acceptance or log(p/q), for a stopper that ends drafts."""
    if job["kind"] not in ("acceptance", "log_ratio"):
        raise typer.BadParameter(f"--kind: expected acceptance or log_ratio, got {job['kind']!r}")
    if job["sweep"] and job["threshold"] is not None:
        raise typer.BadParameter("--sweep chooses the threshold: leave out --threshold")
    run(make_head, _job(material, sampling, plan, labels, job), _models(material), as_json=as_json, quiet=quiet)


@app.command()
@with_options(
    material=MATERIAL,
    sampling=(SAMPLING,),
    plan=(replace(PLAN, defaults={"steps": 2000, "learning_rate": 3e-3}),),
    labels=(Options(Labels, "Training", only=("lam",), names={"lam": "lambda"}),),
    job=(OUT, VERIFIER, VERIFIER_TRIALS),
)
def verifier(
    *,
    material: dict[str, Any],
    sampling: dict[str, Any],
    plan: dict[str, Any],
    labels: dict[str, Any],
    job: dict[str, Any],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train SPRINTER's small verifier. With the rule last_token it is LOSSY: it changes the output distribution."""
    job["kind"] = "verifier"
    run(
        make_verifier_head, _job(material, sampling, plan, labels, job), _models(material), as_json=as_json, quiet=quiet
    )


def _models(material: dict[str, Any]) -> tuple[str, str]:
    return material["target"], material["draft"]


def _job(
    material: dict[str, Any],
    sampling: dict[str, Any],
    plan: dict[str, Any],
    labels: dict[str, Any],
    job: dict[str, Any],
) -> HeadJob:
    """The job of either command from the values of its options."""
    return HeadJob(
        material=Material(**material, params=SamplingParams(**sampling)),
        labels=Labels(**labels),
        plan=TrainingPlan(**plan, warmup=min(50, plan["steps"] // 10)),
        **job,
    )
