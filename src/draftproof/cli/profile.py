"""`draftproof profile`: measures what a composition costs on this machine by running it."""

from __future__ import annotations

from typing import Any

import typer

from draftproof import models
from draftproof.cli._measurement import DTYPES, measurement
from draftproof.cli._parts import BACKEND_HELP, VERIFIER_HELP, default_draft
from draftproof.profiling.divergence import DivergenceOptions, measure_divergence
from draftproof.profiling.forward import ForwardOptions, measure_forward
from draftproof.profiling.memory import MemoryOptions, measure_memory
from draftproof.profiling.round import RoundOptions, measure_round
from draftproof.profiling.rules import RuleSizes, measure_rules

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Measure what a composition costs on this machine: memory, and the time of rounds, forward passes and rules.",
)


_OWN_DRAFT = "The draft model; without it that of an embedded target, and none for other targets."
_OWN_RULE = f"{VERIFIER_HELP}; without it the drafter's default."


def _with_own_draft(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "draft": options["draft"] or default_draft(options["target"], options["drafter"])}


app.command("memory")(
    measurement(
        MemoryOptions,
        measure_memory,
        "Measure the memory of weights, caches and the temporaries of a round, and the peak of running a batch.",
        defaults={"target": models.DEFAULT_TARGET},
        texts={
            "draft": _OWN_DRAFT,
            "dtype": f"Number format of both models: {DTYPES}.",
            "device": "cpu, cuda, cuda:1; without it an accelerator if there is one.",
            "backend": BACKEND_HELP,
            "verifier": _OWN_RULE,
        },
        short={"draft_length": "-n"},
        complete=_with_own_draft,
    )
)
app.command("round")(
    measurement(
        RoundOptions,
        measure_round,
        "Measure where the time of a round goes (drafting, target, verifying), beside the limits of the hardware.",
        defaults={"target": models.DEFAULT_TARGET, "draft": None},
        texts={
            "draft": _OWN_DRAFT,
            "verifier": _OWN_RULE,
        },
        short={"draft_length": "-n"},
        complete=_with_own_draft,
    )
)
app.command("forward")(
    measurement(
        ForwardOptions,
        measure_forward,
        "Measure the time of a forward pass over chains of new tokens, tries and prompts, on several backends.",
        defaults={"target": models.DEFAULT_TARGET},
        texts={"draft": "A draft model that draws the tries.", "temperature": "Temperature of the draws of the tries."},
    )
)
app.command("rules")(
    measurement(
        RuleSizes,
        measure_rules,
        "Measure the time and memory of each verification rule, beside one softmax over the target's rows.",
        names={"length": "n"},
    )
)
app.command("divergence")(
    measurement(
        DivergenceOptions,
        measure_divergence,
        "Measure the divergence between a model with rounded weights or inputs and the model itself, or of two models.",
        texts={"against": "The model to compare with; default the same model with its own weights and float inputs."},
    )
)
