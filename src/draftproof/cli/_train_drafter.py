"""`draftproof train drafter`: a language model from scratch, or a draft that imitates a target.

Knows: which options there are and what is printed. Does not know: how anything is trained.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from draftproof.cli._figures import show

_data = partial(typer.Option, rich_help_panel="Data")
_shape = partial(typer.Option, rich_help_panel="Shape")
_imitation = partial(typer.Option, rich_help_panel="Imitation of a target")
_training = partial(typer.Option, rich_help_panel="Training")
_trials = partial(typer.Option, rich_help_panel="Trials in the engine")
_File = Annotated[
    list[Path], _data(metavar="FILE", help="Text to learn: .txt or .jsonl, also .gz and .xz; can be repeated.")
]


def drafter(
    *,
    data: _File,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory to write; it must not exist.")],
    form: Annotated[
        str, _data(help="How texts stand in .txt files: lines, paragraphs, stories or documents.")
    ] = "lines",
    prompts: Annotated[int | None, _data(help="How many texts to use; without it all.")] = None,
    background: Annotated[
        list[Path] | None,
        _data(metavar="FILE", help="Further text in the same language, read mostly early in the run; can be repeated."),
    ] = None,
    background_form: Annotated[str, _data(help="How texts stand in those.")] = "documents",
    background_share: Annotated[
        float,
        _data(help="Share of the background over the run; falls linearly from twice that to nothing, or from all."),
    ] = 0.5,
    config: Annotated[
        Path | None,
        _shape(metavar="FILE", help="A config.json of a Llama-shaped model, in place of the numbers below."),
    ] = None,
    init: Annotated[
        str | None,
        _shape(metavar="MODEL", help="Go on from this model, with its shape and tokenizer: name or directory."),
    ] = None,
    layers: Annotated[int, _shape(help="Decoder layers.")] = 2,
    width: Annotated[int, _shape(help="Of the hidden states.")] = 128,
    heads: Annotated[int, _shape(help="Of attention.")] = 4,
    kv_heads: Annotated[int, _shape(help="Of keys and values; 0 is as many as heads.")] = 0,
    hidden: Annotated[int, _shape(help="Width of the feed-forward layers; 0 is 8/3 of the width.")] = 0,
    positions: Annotated[int, _shape(help="Longest sequence.")] = 512,
    vocab: Annotated[int, _shape(help="Tokens of the tokenizer that is trained first, unless a target brings one.")] = (
        2048
    ),
    distil: Annotated[
        str | None, _imitation(metavar="TARGET", help="The target to imitate: registered name, hub id or directory.")
    ] = None,
    loss: Annotated[
        str, _imitation(help="kl: KL(target || draft); reverse_kl: KL(draft || target); tv: the chance of a rejection.")
    ] = "kl",
    on_policy: Annotated[
        str | None,
        _imitation(metavar="WHO", help="Compare them also on what the draft or the target continues the text with."),
    ] = None,
    on_policy_share: Annotated[float, _imitation(help="Share of the steps that do.")] = 0.5,
    steps: Annotated[int, _training(help="Optimiser steps.")] = 2000,
    learning_rate: Annotated[float, _training(help="AdamW's, at the top of a cosine schedule.")] = 2e-3,
    warmup: Annotated[int, _training(help="Steps of linear rise before it.")] = 100,
    rows: Annotated[int, _training("--batch", help="Windows of text a step.")] = 8,
    length: Annotated[int, _training(help="Tokens a window.")] = 256,
    precision: Annotated[str, _training(help="Of the products in training: float32 or bfloat16.")] = "float32",
    stored: Annotated[str, _training(help="Of the weights in DIR: float32, float16 or bfloat16.")] = "float32",
    seed: Annotated[int, _training(help="Of everything.")] = 0,
    device: Annotated[
        str | None, _training(help="cpu, cuda, cuda:1; without it an accelerator if there is one.")
    ] = None,
    trial_prompts: Annotated[int, _trials(help="Held-out openings that the engine continues.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Train a Llama-shaped model: from scratch on text, or with --distil to draft for a target."""
    from draftproof.cli.generate import quiet_libraries
    from draftproof.progress import bar, silent
    from draftproof.training.drafter_artefact import make_drafter
    from draftproof.training.drafter_options import DrafterJob, Imitation, Shape, Texts
    from draftproof.training.loop import TrainingPlan

    if distil is None and on_policy is not None:
        raise typer.BadParameter("--on-policy needs a target to imitate: name one with --distil")
    shape = Shape(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        hidden=hidden,
        positions=positions,
        vocabulary=vocab,
    )
    texts = Texts(
        data=tuple(data),
        form=form,
        limit=prompts,
        background=tuple(background or ()),
        background_form=background_form,
        share=background_share,
    )
    job = DrafterJob(
        texts=texts,
        out=out,
        shape=shape,
        config=config,
        init=init,
        imitation=None if distil is None else Imitation(distil, loss, on_policy or "text", on_policy_share),
        plan=TrainingPlan(
            steps=steps,
            learning_rate=learning_rate,
            warmup=min(warmup, steps // 10),
            weight_decay=0.1,
            betas=(0.9, 0.95),
        ),
        rows=rows,
        length=length,
        precision=precision,
        stored=stored,
        device=device,
        seed=seed,
        trial_prompts=trial_prompts,
    )
    with quiet_libraries():
        summary = make_drafter(job, silent if quiet else bar)
    show(summary, out, as_json=as_json)
