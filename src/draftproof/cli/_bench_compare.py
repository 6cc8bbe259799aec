"""`draftproof bench batches | engines | rules | stoppers`: comparisons of one kind, each printed as a page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from draftproof import models
from draftproof.cli._libraries import quiet_libraries
from draftproof.cli._parts import DRAFTER_HELP, STOPPER_HELP, VERIFIER_HELP
from draftproof.cli._pulling import obtain
from draftproof.cli._results import Json, Out, Plots, Quiet, drawing, show, watch_for

_models = partial(typer.Option, rich_help_panel="Models")
_compared = partial(typer.Option, rich_help_panel="What is compared (options of this panel can be repeated)")
_prompts = partial(typer.Option, rich_help_panel="Prompts")
Target = Annotated[str, _models(help="The target: registered name, hub id, directory or .gguf file.")]
DraftModel = Annotated[str, _models(help="The draft model: registered name, hub id, directory or .gguf file.")]
Dtype = Annotated[str, _models(help="Number format of all models: auto, float32, bfloat16 or float16.")]
Dataset = Annotated[str, _prompts(help="A shipped data set, a file, FORM:FILE or hub:OWNER/NAME[:SPLIT[:COLUMN]].")]
Questions = Annotated[int, _prompts(help="How many of the data set, as plain text.")]
Seeds = Annotated[int, _prompts(help="Runs of each prompt with other draws.")]
MaxTokens = Annotated[int, _prompts(help="Tokens of every answer; stop tokens are ignored.")]


def batches(
    *,
    target: Target = models.DEFAULT_TARGET,
    draft: Annotated[str | None, _models(help="A draft model; without it none.")] = None,
    drafter: Annotated[str, _models(help=f"Measured beside plain decoding. {DRAFTER_HELP}")] = "auto",
    dtype: Dtype = "auto",
    batch: Annotated[
        list[int] | None, _compared(help="Requests at once; can be repeated; without it 1, 2, 4, 8 and 16.")
    ] = None,
    temperature: Annotated[
        list[float] | None, _compared(help="Sampling temperature; 0 is greedy; can be repeated; without it 0.")
    ] = None,
    dataset: Annotated[
        list[str] | None, _prompts(help="Data sets, which take turns; see bench run; without it tinystories.")
    ] = None,
    repeats: Annotated[int, _prompts(help="Turns of each data set that count, each with other questions.")] = 2,
    max_tokens: Annotated[int, _prompts(help="Most tokens of an answer.")] = 96,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare a drafter with plain decoding for several numbers of requests at once, in turns on the same questions."""
    from draftproof.bench.batches import BatchComparison, compare_batches

    with quiet_libraries():
        options = BatchComparison(
            target=target,
            draft=draft,
            drafter=drafter,
            dtype=dtype,
            batch=batch or (1, 2, 4, 8, 16),
            temperature=temperature or (0.0,),
            dataset=dataset or ("tinystories",),
            tokens=max_tokens,
            repeats=repeats,
        )
        obtain(target, draft, quiet=quiet)
        found = compare_batches(options, watch=watch_for(quiet=quiet))
    show(found, out, as_json=as_json)


def engines(
    *,
    other: Annotated[str, _models(help="The other engine: vllm, transformers or llama.cpp.")] = "vllm",
    python: Annotated[
        Path | None, _models(metavar="FILE", help="Python of the environment that has it; without it this one.")
    ] = None,
    model: Annotated[
        Path | None, _models(metavar="PATH", help="Model file for the other engine; without it the target's directory.")
    ] = None,
    target: Target = models.DEFAULT_TARGET,
    draft: Annotated[str | None, _models(help="A draft model for our engine; without it none.")] = None,
    drafter: Annotated[
        str | None, _models(help=f"A drafter for our engine, measured beside plain decoding. {DRAFTER_HELP}")
    ] = None,
    dtype: Dtype = "auto",
    batch: Annotated[
        list[int] | None, _compared(help="Prompts at a time; can be repeated; without it 1 and 8.")
    ] = None,
    temperature: Annotated[
        list[float] | None, _compared(help="Sampling temperature; 0 is greedy; can be repeated; without it 0 and 1.")
    ] = None,
    repeats: Annotated[int, _prompts(help="Turns that count, each with other prompts.")] = 6,
    dataset: Dataset = "tinystories",
    max_tokens: MaxTokens = 64,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare tokens a second with another engine that runs in a process of its own, in turns on the same prompts.

    The other engine may be installed in an environment of its own: name its Python with --python.
    """
    from draftproof.bench.engines import EngineComparison, compare_engines

    with quiet_libraries():
        options = EngineComparison(
            other=other,
            python=python,
            model=model,
            target=target,
            draft=draft,
            drafter=drafter,
            dtype=dtype,
            batch=batch or (1, 8),
            temperature=temperature or (0.0, 1.0),
            dataset=dataset,
            tokens=max_tokens,
            repeats=repeats,
        )
        obtain(target, draft, quiet=quiet)
        found = compare_engines(options, watch=watch_for(quiet=quiet))
    show(found, out, as_json=as_json)


def rules(
    *,
    target: Target = "embedded:target",
    draft: DraftModel = "embedded:draft",
    dtype: Dtype = "auto",
    synthetic: Annotated[
        list[int] | None,
        _models(
            metavar="SIZE", help="Measure a synthetic pair with a vocabulary of this size instead; can be repeated."
        ),
    ] = None,
    rule: Annotated[
        list[str] | None, _compared(help=f"{VERIFIER_HELP}; without it all lossless rules that need a draft model.")
    ] = None,
    n: Annotated[list[int] | None, _compared("--n", help="Draft length; without it 4 and 8.")] = None,
    drafts: Annotated[list[int] | None, _compared(help="Number of drafts; without it 1, 2, 4 and 8.")] = None,
    dataset: Dataset = "story-openings",
    questions: Questions = 4,
    seeds: Seeds = 8,
    max_tokens: MaxTokens = 48,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare verification rules by tokens per target call, for draft lengths and numbers of drafts."""
    from draftproof.bench.rules import SEVERAL, SINGLE, RuleComparison, compare_rules

    with quiet_libraries():
        options = RuleComparison(
            target=target,
            draft=draft,
            dtype=dtype,
            synthetic=tuple(synthetic or ()),
            rules=rule or (*SINGLE, *SEVERAL),
            lengths=n or (4, 8),
            drafts=drafts or (1, 2, 4, 8),
            dataset=dataset,
            questions=questions,
            seeds=seeds,
            tokens=max_tokens,
        )
        obtain(target, draft, quiet=quiet)
        found = compare_rules(options, watch=watch_for(quiet=quiet))
    show(found, out, as_json=as_json)


def stoppers(
    *,
    target: Target = "embedded:target",
    draft: DraftModel = "embedded:draft",
    dtype: Dtype = "auto",
    stopper: Annotated[
        list[str] | None,
        _compared(help=f"{STOPPER_HELP}; without it a range of all kinds."),
    ] = None,
    temperature: Annotated[
        list[float] | None, _compared(help="Sampling temperature; 0 is greedy; without it 1 and 0.")
    ] = None,
    cost: Annotated[
        list[float] | None,
        _compared(help="Time of a draft pass in target passes; without it 0.05, 0.1, 0.2 and 0.4."),
    ] = None,
    verifier: Annotated[str, _models(help=f"{VERIFIER_HELP}.")] = "block",
    dataset: Dataset = "story-openings",
    questions: Questions = 8,
    seeds: Seeds = 4,
    max_tokens: MaxTokens = 96,
    batch: Annotated[int, _prompts(help="Prompts at a time.")] = 8,
    plots: Plots = True,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compare stoppers with fixed draft lengths: discarded tokens and target calls per token, and what they cost."""
    from draftproof.bench.stoppers import StopperComparison, compare_stoppers, draw

    with quiet_libraries():
        options = StopperComparison(
            target=target,
            draft=draft,
            dtype=dtype,
            stoppers=stopper,
            verifier=verifier,
            temperature=temperature or (1.0, 0.0),
            costs=cost or (0.05, 0.1, 0.2, 0.4),
            dataset=dataset,
            questions=questions,
            seeds=seeds,
            tokens=max_tokens,
            batch=batch,
        )
        obtain(target, draft, quiet=quiet)
        found = compare_stoppers(options, watch=watch_for(quiet=quiet))
    if out is not None and drawing(plots=plots):
        draw(options, found, out.parent / f"{out.name}.png")
    show(found, out, as_json=as_json)
