"""`draftproof profile round | forward | rules | divergence`: times of a round, and how far models are apart."""

from __future__ import annotations

from typing import Any

from draftproof import models
from draftproof.cli._measurement import measurement
from draftproof.cli._parts import VERIFIER_HELP, default_draft
from draftproof.profiling.divergence import DivergenceOptions, measure_divergence
from draftproof.profiling.forward import ForwardOptions, measure_forward
from draftproof.profiling.round import RoundOptions, measure_round
from draftproof.profiling.rules import RuleSizes, measure_rules


def _with_own_draft(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "draft": options["draft"] or default_draft(options["target"], options["drafter"])}


round_ = measurement(
    RoundOptions,
    measure_round,
    "Measure where the time of a round goes (drafting, target, verifying), beside the least that it could take.",
    defaults={"target": models.DEFAULT_TARGET, "draft": None},
    texts={
        "draft": "The draft model; without it an embedded target's, or none for others.",
        "verifier": f"{VERIFIER_HELP}; without it the drafter's default.",
    },
    short={"draft_length": "-n"},
    complete=_with_own_draft,
)
forward = measurement(
    ForwardOptions,
    measure_forward,
    "Measure the time of a forward pass over chains of new tokens, tries and prompts, on several backends.",
    defaults={"target": models.DEFAULT_TARGET},
    texts={"draft": "A draft model that draws the tries.", "temperature": "Temperature of the draws of the tries."},
)
rules = measurement(
    RuleSizes,
    measure_rules,
    "Measure the time and memory of each verification rule, beside one softmax over the target's rows.",
    names={"length": "n"},
)
divergence = measurement(
    DivergenceOptions,
    measure_divergence,
    "Measure how far a model with rounded weights or inputs is from the model itself, or two models are apart.",
    texts={"against": "What it is compared with; without it the same model as it is, with inputs in floats."},
)
