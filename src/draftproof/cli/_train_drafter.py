"""`draftproof train drafter`: a language model from scratch, or a draft model that imitates a target."""

from __future__ import annotations

from typing import Any

import typer

from draftproof.cli._options import Options, with_options
from draftproof.cli._training import Json, Quiet, run
from draftproof.training.drafter_artefact import make_drafter
from draftproof.training.drafter_options import DrafterJob, Imitation, Shape, Texts
from draftproof.training.loop import TrainingPlan

TEXTS = Options(Texts, "Data", names={"limit": "prompts", "share": "background_share"})
SHAPE = Options(Shape, "Shape", names={"vocabulary": "vocab"})
IMITATION = Options(
    Imitation,
    "Imitation of a target",
    names={"target": "distil", "policy": "on_policy", "share": "on_policy_share"},
    defaults={"target": None},
    metavars={"target": "TARGET", "policy": "WHO"},
)
PLAN = Options(
    TrainingPlan,
    "Training",
    only=("steps", "learning_rate", "warmup"),
    defaults={"steps": 2000, "learning_rate": 2e-3, "warmup": 100},
)
JOB = (
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


@with_options(texts=(TEXTS,), shape=(SHAPE,), imitation=(IMITATION,), plan=(PLAN,), job=JOB)
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
