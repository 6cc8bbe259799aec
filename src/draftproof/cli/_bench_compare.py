"""`draftproof bench batches | engines | rules | stoppers`: comparisons of one kind, each printed as a page."""

from __future__ import annotations

from draftproof import models
from draftproof.bench.batches import BatchComparison, compare_batches
from draftproof.bench.engines import EngineComparison, compare_engines
from draftproof.bench.rules import RuleComparison, compare_rules
from draftproof.bench.stoppers import StopperComparison, compare_stoppers, draw
from draftproof.cli._measurement import measurement
from draftproof.cli._parts import DRAFTER_HELP, STOPPER_HELP, VERIFIER_HELP

_TARGET = {"target": models.DEFAULT_TARGET}
_NO_DRAFT = "A draft model; without it none."

batches = measurement(
    BatchComparison,
    compare_batches,
    "Compare a drafter with plain decoding for several numbers of requests at once, in turns on the same questions.",
    defaults=_TARGET,
    texts={"draft": _NO_DRAFT, "drafter": f"Measured beside plain decoding. {DRAFTER_HELP}"},
    leave=("queue", "fewest"),
)
engines = measurement(
    EngineComparison,
    compare_engines,
    """Compare tokens a second with another engine that runs in a process of its own, in turns on the same prompts.

    The other engine may be installed in an environment of its own: name its Python with --python.
    """,
    defaults=_TARGET,
    metavars={"python": "FILE", "model": "PATH"},
    texts={
        "draft": _NO_DRAFT,
        "drafter": f"A drafter, measured beside plain decoding; without it none. {DRAFTER_HELP}",
    },
)
rules = measurement(
    RuleComparison,
    compare_rules,
    "Compare verification rules by tokens per target call, for draft lengths and numbers of drafts.",
    names={"seeds": None},
    metavars={"synthetic": "SIZE"},
    texts={"rules": f"{VERIFIER_HELP}; without it all lossless rules that need a draft model"},
)
stoppers = measurement(
    StopperComparison,
    compare_stoppers,
    "Compare stoppers with fixed draft lengths: discarded tokens and target calls per token, and what they cost.",
    names={"seeds": None},
    texts={"stoppers": f"{STOPPER_HELP}; without it a range of all kinds"},
    draw=draw,
)
