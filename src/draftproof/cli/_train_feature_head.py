"""`draftproof train feature-head`: a drafter of one layer on the target's own states.

Knows: which options there are. Does not know: how anything is trained or printed.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

_data = partial(typer.Option, rich_help_panel="Data")
_shape = partial(typer.Option, rich_help_panel="Shape")
_training = partial(typer.Option, rich_help_panel="Training")


def feature_head(
    *,
    target: Annotated[str, typer.Option(help="The target: registered name, hub id, directory or .gguf file.")],
    data: Annotated[
        list[Path], _data(metavar="FILE", help="Texts: .txt or .jsonl, also .gz and .xz; can be repeated.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory to write; it must not exist.")],
    held_out: Annotated[
        list[Path] | None,
        _data(metavar="FILE", help="Texts that are only measured on; without it a tenth of the data."),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        _data(metavar="FILE", help="Instructions: the target's own answers to them are learnt from, too."),
    ] = None,
    answers: Annotated[int | None, _data(help="How many instructions to use; without it all.")] = None,
    answer_tokens: Annotated[int, _data(help="Most tokens an answer.")] = 192,
    answers_each: Annotated[int, _data(help="Answers to every instruction that is taught, all drawn anew.")] = 1,
    form: Annotated[str, _data(help="How texts stand in .txt files: lines, paragraphs or stories.")] = "paragraphs",
    windows: Annotated[int, _data(help="Windows of text to use; their states are kept in the cache.")] = 4000,
    length: Annotated[int, _data(help="Tokens of a window, and how far back the head looks.")] = 256,
    cache: Annotated[
        Path | None, _data(metavar="DIR", help="Where answers and states are kept for other runs.")
    ] = None,
    ids: Annotated[
        int, _shape(help="Most frequent tokens it speaks of; others get probability 0, still exact.")
    ] = 8192,
    inner_size: Annotated[int | None, _shape(help="Width of its feed-forward part; without it the target's.")] = None,
    own_output: Annotated[
        bool, _shape("--own-output", help="An output layer of its own; without it rows of the target's are used.")
    ] = False,
    start: Annotated[
        Path | None, _shape(metavar="DIR", help="A feature head to go on from; its shape is taken over.")
    ] = None,
    steps: Annotated[int, _training(help="Optimiser steps.")] = 4000,
    learning_rate: Annotated[float, _training(help="AdamW's, at the top of a cosine schedule.")] = 1e-3,
    batch: Annotated[int, _training(help="Windows a step: 1, 2, 4, 8, 16 or 32.")] = 4,
    unroll: Annotated[int, _training(help="Steps on its own states that it is taught, 1 to 8.")] = 3,
    tv: Annotated[float, _training("--tv", help="Weight of the total variation beside the cross-entropy.")] = 0.0,
    states: Annotated[float, _training(help="Weight of the smooth L1 distance to the target's states.")] = 0.0,
    evaluate_every: Annotated[int, _training(help="Steps between looks at held-out rows; 0 is at the end only.")] = 200,
    seed: Annotated[int, _training(help="Of everything.")] = 0,
    dtype: Annotated[str, _training(help="Of the target: auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[
        str | None, _training(help="cpu, cuda, cuda:1; without it an accelerator if there is one.")
    ] = None,
    trial_prompts: Annotated[int, _training(help="Held-out prompts of each kind for runs of the engine.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Train a drafter of one layer on the target's last hidden states (EAGLE's idea): feature_head:DIR."""
    from draftproof.cli._figures import show
    from draftproof.cli.generate import quiet_libraries
    from draftproof.progress import bar, silent
    from draftproof.training.feature_head import FeatureJob, make_feature_head
    from draftproof.training.loop import TrainingPlan

    plan = TrainingPlan(
        steps=steps,
        learning_rate=learning_rate,
        warmup=min(50, steps // 10),
        floor=0.02,
        betas=(0.9, 0.95),
        seed=seed,
        log_every=min(50, steps),
        evaluate_every=evaluate_every,
    )
    job = FeatureJob(
        target=target,
        out=out,
        plan=plan,
        data=tuple(data),
        held_out=tuple(held_out or ()),
        prompts=tuple(prompts or ()),
        answers=answers,
        answer_tokens=answer_tokens,
        answers_each=answers_each,
        form=form,
        windows=windows,
        length=length,
        batch=batch,
        ids=ids,
        inner_size=inner_size,
        own_output=own_output,
        start=start,
        unroll=unroll,
        tv=tv,
        states=states,
        trial_prompts=trial_prompts,
        dtype=dtype,
        device=device,
        cache=cache,
    )
    with quiet_libraries():
        metrics = make_feature_head(job, silent if quiet else bar)
    show(metrics, out, as_json=as_json)
