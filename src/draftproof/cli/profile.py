"""`draftproof profile`: what a composition costs on this machine, measured by running it."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from draftproof import models
from draftproof.cli._libraries import quiet_libraries
from draftproof.cli._measurement import measurement
from draftproof.cli._output import Json, Out, show
from draftproof.cli._parts import BACKEND_HELP, DRAFTER_HELP, VERIFIER_HELP, default_draft
from draftproof.cli._pulling import obtain
from draftproof.engine.engine import Engine
from draftproof.engine.registry import find_drafter
from draftproof.profiling.divergence import DivergenceOptions, measure_divergence
from draftproof.profiling.forward import ForwardOptions, measure_forward
from draftproof.profiling.round import RoundOptions, measure_round
from draftproof.profiling.rules import RuleSizes, measure_rules

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Measure what a composition costs on this machine: memory, and the time of rounds, forward passes and rules.",
)
_model = partial(typer.Option, rich_help_panel="Models")
_speculation = partial(typer.Option, rich_help_panel="Speculation")
_workload = partial(typer.Option, rich_help_panel="Workload")


@app.command()
def memory(
    *,
    target: Annotated[str, _model(help="Registered name, hub id, directory or .gguf file.")] = models.DEFAULT_TARGET,
    draft: Annotated[
        str | None, _model(help="The draft model; without it an embedded target's, or none for others.")
    ] = None,
    dtype: Annotated[str, _model(help="Number format of both models: auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, _model(help="cpu, cuda, cuda:1; without it an accelerator if there is one.")] = None,
    backend: Annotated[str, _model(help=BACKEND_HELP)] = "auto",
    trust_remote_code: Annotated[bool, _model("--trust-remote-code", help="Run code that comes with a model.")] = False,
    drafter: Annotated[str | None, _speculation(help=DRAFTER_HELP)] = None,
    draft_length: Annotated[int, _speculation("--draft-length", "-n", help="Tokens of a draft.")] = 4,
    verifier: Annotated[str | None, _speculation(help=f"{VERIFIER_HELP}; without it the drafter's default.")] = None,
    batch: Annotated[int, _workload(help="Requests decoded together.")] = 1,
    prompt_tokens: Annotated[int, _workload(help="Length of each prompt.")] = 128,
    new_tokens: Annotated[int, _workload(help="Tokens to generate for each.")] = 32,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure the memory of weights, caches and the temporaries of a round, and the peak of running a batch."""
    from draftproof.backends.loading.options import parse_device
    from draftproof.profiling.memory import Workload, measure, memory_report, warm_up
    from draftproof.provenance import run_facts, without_directory

    workload, where = Workload(batch, prompt_tokens, new_tokens), parse_device(device)
    facts = run_facts(where)
    options: dict[str, Any] = {"dtype": dtype, "device": str(where), "backend": backend}
    small = draft or default_draft(target, drafter)
    part, argument = find_drafter(drafter) if drafter else (None, "")
    own_length = part is not None and part.takes_length and not argument

    def make() -> Engine:
        return Engine.load(
            target,
            small,
            drafter=f"{drafter}:{draft_length}" if own_length else drafter,
            stopper=f"fixed:{draft_length}",
            verifier=verifier,
            max_batch=batch,
            prefix_reuse=False,  # all prompts are the same
            trust_remote_code=trust_remote_code,
            **options,
        )

    with quiet_libraries():
        obtain(target, small)
        warm_up(**options)
        found = measure(make, workload, where)
    named = {"target": without_directory(target), "draft": small and without_directory(small)}
    show(memory_report(found, named | options, facts), out, as_json=as_json)


def _with_own_draft(options: dict[str, Any]) -> dict[str, Any]:
    return {**options, "draft": options["draft"] or default_draft(options["target"], options["drafter"])}


app.command("round")(
    measurement(
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
        "Measure how far a model with rounded weights or inputs is from the model itself, or two models are apart.",
        texts={"against": "What it is compared with; without it the same model as it is, with inputs in floats."},
    )
)
