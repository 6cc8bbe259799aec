"""`draftproof profile round | forward | rules`: the time of a round, of a forward pass and of verification rules."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from draftproof import models
from draftproof.cli._libraries import quiet_libraries
from draftproof.cli._parts import DRAFTER_HELP, VERIFIER_HELP, default_draft
from draftproof.cli._pulling import obtain
from draftproof.cli._results import Json, Out, Quiet, show, watch_for

_model = partial(typer.Option, rich_help_panel="Models")
_work = partial(typer.Option, rich_help_panel="What is measured")
_BACKENDS = "Implementation of the forward pass; can be repeated; without it hf and lean."


def round_(
    *,
    target: Annotated[
        str, _model(help="The target: registered name, hub id, directory or .gguf file.")
    ] = models.DEFAULT_TARGET,
    draft: Annotated[
        str | None, _model(help="The draft model; without it an embedded target's, or none for others.")
    ] = None,
    drafter: Annotated[str | None, _model(help=f"{DRAFTER_HELP} Without it model.")] = None,
    draft_length: Annotated[int, _model("--draft-length", "-n", help="Drafted tokens of a round.")] = 4,
    verifier: Annotated[str | None, _model(help=f"{VERIFIER_HELP}; without it the drafter's default.")] = None,
    dtype: Annotated[str, _model(help="Number format of both models: auto, float32, bfloat16 or float16.")] = "auto",
    backend: Annotated[list[str] | None, _model(help=_BACKENDS)] = None,
    dataset: Annotated[str, _work(help="A shipped data set, a file, FORM:FILE or hub:OWNER/NAME.")] = "tinystories",
    questions: Annotated[int, _work(help="How many of the data set.")] = 8,
    max_tokens: Annotated[int, _work(help="Tokens of every answer; stop tokens are ignored.")] = 64,
    temperature: Annotated[float, _work(help="Sampling temperature; 0 is greedy.")] = 1.0,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure where the time of a round goes (drafting, target, verifying), beside the least that it could take."""
    from draftproof.profiling.round import RoundOptions, measure_round

    options = RoundOptions(
        target=target,
        draft=draft or default_draft(target, drafter),
        drafter=drafter or "model",
        verifier=verifier or "",
        dtype=dtype,
        draft_length=draft_length,
        backends=backend or ("hf", "lean"),
        dataset=dataset,
        questions=questions,
        tokens=max_tokens,
        temperature=temperature,
    )
    with quiet_libraries():
        obtain(target, options.draft, quiet=quiet)
        found = measure_round(options, watch=watch_for(quiet=quiet))
    show(found, out, as_json=as_json)


def forward(
    *,
    target: Annotated[
        str, _model(help="The model: registered name, hub id, directory or .gguf file.")
    ] = models.DEFAULT_TARGET,
    draft: Annotated[str | None, _model(help="A draft model that draws the tries.")] = None,
    dtype: Annotated[
        list[str] | None, _model(help="auto, float32, bfloat16 or float16; can be repeated; without it auto.")
    ] = None,
    backend: Annotated[
        list[str] | None,
        _model(
            help=f"{_BACKENDS} lean:0 is lean without native kernels, lean:LEVEL with those of one level of processors."
        ),
    ] = None,
    new_tokens: Annotated[
        list[int] | None, _work("--new-tokens", help="Tokens that a pass reads; can be repeated; without it 1 to 65.")
    ] = None,
    trie: Annotated[
        list[str] | None, _work(metavar="KxL", help="Also read a trie of K chains of L tokens; can be repeated.")
    ] = None,
    temperature: Annotated[
        list[float] | None, _work(help="Temperature of the draws of the tries; without it 1.")
    ] = None,
    prompt: Annotated[
        list[int] | None, _work(help="Also read a prompt of this many tokens, without a context; can be repeated.")
    ] = None,
    context: Annotated[int, _work(help="Tokens that were read before.")] = 200,
    repeats: Annotated[int, _work(help="Passes of each kind that count.")] = 40,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure the time of a forward pass over chains of new tokens, tries and prompts, on several backends."""
    from draftproof.profiling.forward import ForwardOptions, measure_forward

    options = ForwardOptions(
        target=target,
        dtypes=dtype or ("auto",),
        backends=backend or ("hf", "lean"),
        new_tokens=new_tokens or (1, 2, 4, 9, 33, 65),
        tries=[_trie(text) for text in trie or ()],
        draft=draft,
        temperature=temperature or (1.0,),
        prompts=prompt or (),
        context=context,
        repeats=repeats,
    )
    with quiet_libraries():
        obtain(target, draft, quiet=quiet)
        found = measure_forward(options, watch=watch_for(quiet=quiet))
    show(found, out, as_json=as_json)


def _trie(text: str) -> tuple[int, int]:
    chains, _, length = text.partition("x")
    try:
        return int(chains), int(length)
    except ValueError:
        raise typer.BadParameter(f"--trie is {text!r}: legal is KxL, for example 8x4") from None


def rules(
    *,
    vocab: Annotated[
        list[int] | None, _work(help="Size of the vocabulary; can be repeated; without it 32000, 151936 and 262144.")
    ] = None,
    batch: Annotated[list[int] | None, _work(help="Requests together; can be repeated; without it 1 and 8.")] = None,
    drafts: Annotated[list[int] | None, _work(help="Number of drafts; can be repeated; without it 1 and 4.")] = None,
    n: Annotated[int, _work("--n", help="Draft length.")] = 8,
    repeats: Annotated[int, _work(help="Calls of each rule that count.")] = 7,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure the time and memory of each verification rule, beside one softmax over the target's rows."""
    from draftproof.profiling.rules import RuleSizes, measure_rules

    sizes = RuleSizes(vocab or (32000, 151936, 262144), batch or (1, 8), drafts or (1, 4), n, repeats)
    show(measure_rules(sizes, watch=watch_for(quiet=quiet)), out, as_json=as_json)
