"""`draftproof train evaluate-pair | -drafter | -heads | -text`: what trained parts are worth on held-out text."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from draftproof.cli._libraries import quiet_libraries
from draftproof.cli._parts import HEADED
from draftproof.cli._pulling import obtain
from draftproof.cli._results import Json, Out, Quiet, show, watch_for

_models = partial(typer.Option, rich_help_panel="Models")
_data = partial(typer.Option, rich_help_panel="Data")
Texts = Annotated[
    list[Path],
    _data(metavar="FILE", help="Text, split as in training; the tenth for tests is used; can be repeated."),
]
Form = Annotated[str, _data(help="How texts stand in .txt files: lines, paragraphs, stories or documents.")]
Seed = Annotated[
    list[int] | None, _data(help="Seed of the data and the draws; can be repeated; without it 0, 1 and 2.")
]
Trials = Annotated[int, _data(help="Held-out prompts that the engine continues.")]
Target = Annotated[str, _models(help="The target: registered name, hub id, directory or .gguf file.")]
DraftModel = Annotated[
    str, _models(help="The draft model: registered name, hub id, directory or .gguf file, or feature_head:DIR.")
]
_SEEDS = (0, 1, 2)


def evaluate_pair(
    *,
    target: Target = "embedded:stories",
    draft: DraftModel = "embedded:stories-draft",
    data: Texts,
    form: Form = "stories",
    tokens: Annotated[int, _data(help="Tokens of held-out text.")] = 20_000,
    seed: Seed = None,
    trials: Trials = 16,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Evaluate a target and its draft model on held-out text: bits per byte, acceptance, tokens per target call."""
    from draftproof.training.evaluation import pair

    options = pair.PairOptions(target, draft, data, form=form, tokens=tokens, seeds=seed or _SEEDS, trials=trials)
    with quiet_libraries():
        obtain(target, draft, quiet=quiet)
        found = pair.evaluate_pair(options, watch=watch_for(quiet=quiet))
    show(found, out, as_json=as_json)


def evaluate_drafter(
    *,
    head: Annotated[Path, _models(metavar="DIR", help="Directory of the feature head.")],
    target: Target,
    layers: Annotated[int, _models(help="Layers of the early exit that it is compared with.")],
    dtype: Annotated[str, _models(help="Number format of the target: auto, float32, bfloat16 or float16.")] = "auto",
    data: Annotated[list[Path], _data(metavar="FILE", help="Held-out text, read whole; can be repeated.")],
    prompts: Annotated[
        list[Path], _data(metavar="FILE", help="Instructions; the tenth for tests is used; can be repeated.")
    ],
    form: Form = "paragraphs",
    seed: Seed = None,
    trials: Trials = 6,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Evaluate a feature head beside its untrained self, an early exit of the target, and lookup."""
    from draftproof.training.evaluation import drafter

    options = drafter.DrafterOptions(
        head, target, data, prompts, layers, form=form, dtype=dtype, seeds=seed or _SEEDS, trials=trials
    )
    with quiet_libraries():
        obtain(target, quiet=quiet)
        found = drafter.evaluate_drafter(options, watch=watch_for(quiet=quiet))
    show(found, out, as_json=as_json)


def evaluate_heads(
    *,
    target: Target = "embedded:stories",
    draft: DraftModel = "embedded:stories-draft",
    heads: Annotated[
        Path | None, _models(metavar="DIR", help="Directory of the heads; without it those that ship.")
    ] = None,
    kind: Annotated[
        list[str] | None,
        _models(
            help=f"Stopper of the head: {', '.join(HEADED)}; can be repeated; without it all heads in the directory."
        ),
    ] = None,
    dtype: Annotated[
        str, _models(help="Number format of both models: auto, float32, bfloat16 or float16.")
    ] = "float32",
    data: Texts,
    form: Form = "stories",
    limit: Annotated[int | None, _data(help="How many texts to use; without it all.")] = None,
    max_tokens: Annotated[int, _data(help="Most tokens of a response.")] = 128,
    seed: Seed = None,
    trials: Trials = 16,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Evaluate trained heads on held-out prompts: predictions, stopping beside fixed lengths, SPRINTER's quality."""
    from draftproof.training.evaluation.heads import HeadOptions
    from draftproof.training.evaluation.heads import evaluate_heads as evaluate

    options = HeadOptions(
        target,
        draft,
        data,
        heads=heads,
        kinds=kind or HEADED,
        form=form,
        limit=limit,
        dtype=dtype,
        seeds=seed or _SEEDS,
        trials=trials,
        tokens=max_tokens,
    )
    with quiet_libraries():
        obtain(target, draft, quiet=quiet)
        found = evaluate(options, watch=watch_for(quiet=quiet))
    show(found, out, as_json=as_json)


def evaluate_text(
    *,
    model: Annotated[list[str] | None, _models(help="A model that writes; can be repeated.")] = None,
    judge: Annotated[str, _models(help="A larger model that judges.")] = ("smollm2-135m"),
    data: Texts,
    form: Form = "stories",
    known: Annotated[
        list[Path] | None, _data(metavar="FILE", help="More text whose words count as known; can be repeated.")
    ] = None,
    temperature: Annotated[
        list[float] | None, _data(help="Temperature of the text; can be repeated; without it 1 and 0.7.")
    ] = None,
    count: Annotated[int, _data(help="How many openings are continued.")] = 48,
    size: Annotated[int, _data(help="Characters of each continuation that count.")] = 400,
    max_tokens: Annotated[int, _data(help="Most tokens of each continuation.")] = 200,
    shown: Annotated[int, _data(help="Continuations to print in full.")] = 6,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Evaluate the text that small models write: bits per byte under a larger model, and coined words."""
    from draftproof.training.evaluation import text

    options = text.TextOptions(
        model or ("embedded:stories", "embedded:target"),
        judge,
        data,
        form=form,
        known=known or (),
        temperature=temperature or (1.0, 0.7),
        count=count,
        size=size,
        tokens=max_tokens,
        shown=shown,
    )
    with quiet_libraries():
        obtain(judge, *options.models, quiet=quiet)
        found = text.evaluate_text(options, watch=watch_for(quiet=quiet))
    show(found, out, as_json=as_json)
