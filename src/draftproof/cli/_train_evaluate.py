"""`draftproof train evaluate-pair | -drafter | -heads | -text`: what trained parts are worth on held-out text."""

from __future__ import annotations

from draftproof.cli._measurement import NAMES, measurement
from draftproof.cli._parts import HEADED
from draftproof.training.evaluation.drafter import DrafterOptions
from draftproof.training.evaluation.drafter import evaluate_drafter as measure_drafter
from draftproof.training.evaluation.heads import HeadOptions
from draftproof.training.evaluation.heads import evaluate_heads as measure_heads
from draftproof.training.evaluation.pair import PairOptions
from draftproof.training.evaluation.pair import evaluate_pair as measure_pair
from draftproof.training.evaluation.text import TextOptions
from draftproof.training.evaluation.text import evaluate_text as measure_text

_STORIES = {"target": "embedded:stories", "draft": "embedded:stories-draft"}
_DRAFT = {"draft": f"The draft model: {NAMES}, or feature_head:DIR."}

evaluate_pair = measurement(
    PairOptions,
    measure_pair,
    "Evaluate a target and its draft model on held-out text: bits per byte, acceptance, tokens per target call.",
    names={"tokens": None},
    defaults=_STORIES,
    texts=_DRAFT,
)
evaluate_drafter = measurement(
    DrafterOptions,
    measure_drafter,
    "Evaluate a feature head beside its untrained self, an early exit of the target, and lookup.",
    names={"prompts": None},
)
evaluate_heads = measurement(
    HeadOptions,
    measure_heads,
    "Evaluate trained heads on held-out prompts: predictions, stopping beside fixed lengths, SPRINTER's quality.",
    defaults=_STORIES,
    texts=_DRAFT | {"kinds": f"Stopper of the head: {', '.join(HEADED)}."},
)
evaluate_text = measurement(
    TextOptions,
    measure_text,
    "Evaluate the text that small models write: bits per byte under a larger model, and coined words.",
    defaults={"models": ("embedded:stories", "embedded:target"), "judge": "smollm2-135m"},
    texts={"temperature": "Temperature of the text."},
)
