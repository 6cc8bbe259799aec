"""`draftproof train feature-head`: a drafter of one layer that reads the target's own hidden states."""

from __future__ import annotations

from typing import Any

from draftproof.cli._options import Options, with_options
from draftproof.cli._training import Json, Quiet, run
from draftproof.training.feature_head import make_feature_head
from draftproof.training.feature_options import FeatureJob
from draftproof.training.loop import TrainingPlan

PLAN = Options(
    TrainingPlan,
    "Training",
    only=("steps", "learning_rate", "evaluate_every", "seed"),
    defaults={"steps": 4000, "evaluate_every": 200},
)
JOB = (
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


@with_options(plan=(PLAN,), job=JOB)
def feature_head(*, plan: dict[str, Any], job: dict[str, Any], as_json: Json = False, quiet: Quiet = False) -> None:
    """Train a drafter of one layer on the target's hidden states, as EAGLE does: feature_head:DIR, or other formats."""
    steps = plan["steps"]
    made = TrainingPlan(**plan, warmup=min(50, steps // 10), floor=0.02, betas=(0.9, 0.95), log_every=min(50, steps))
    run(make_feature_head, FeatureJob(plan=made, **job), (job["target"],), as_json=as_json, quiet=quiet)
