"""`draftproof train drafter | feature-head`: language models, and drafters of one layer on a target's hidden states."""

from __future__ import annotations

from typing import Any

import typer

from draftproof.cli._options import Options, with_options
from draftproof.cli._results import Quiet
from draftproof.cli._training import Json, run
from draftproof.training.drafter_artefact import make_drafter
from draftproof.training.drafter_options import DrafterJob, Imitation, Shape, Texts
from draftproof.training.feature_head import make_feature_head
from draftproof.training.feature_options import FeatureJob
from draftproof.training.loop import TrainingPlan

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
    """Train a Llama model: from scratch on text, or with --distil as a draft model for a target."""
    if imitation["target"] is None and imitation["policy"] != "text":
        raise typer.BadParameter("--on-policy needs a target to imitate: name one with --distil")
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


@with_options(plan=(_HEAD_PLAN,), job=_HEAD_JOB)
def feature_head(*, plan: dict[str, Any], job: dict[str, Any], as_json: Json = False, quiet: Quiet = False) -> None:
    """Train a drafter of one layer on the target's hidden states, as EAGLE does: feature_head:DIR, or other formats."""
    steps = plan["steps"]
    made = TrainingPlan(**plan, warmup=min(50, steps // 10), floor=0.02, betas=(0.9, 0.95), log_every=min(50, steps))
    run(make_feature_head, FeatureJob(plan=made, **job), (job["target"],), as_json=as_json, quiet=quiet)
