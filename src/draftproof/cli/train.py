"""`draftproof train`: drafters, and heads that judge drafted tokens, from any text or prompts.

Knows: which options there are and what is printed. Does not know: how anything is trained.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from draftproof.cli._figures import show
from draftproof.cli._train_drafter import drafter
from draftproof.cli._train_evaluate import evaluate_drafter, evaluate_heads, evaluate_pair, evaluate_text
from draftproof.cli._train_feature_head import feature_head

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Train drafters and heads that judge drafts. A run that was killed goes on where it was: repeat the command.",
)
app.command()(drafter)
app.command("feature-head")(feature_head)
for _evaluate in (evaluate_pair, evaluate_drafter, evaluate_heads, evaluate_text):
    app.command(_evaluate.__name__.replace("_", "-"))(_evaluate)
_data = partial(typer.Option, rich_help_panel="Data")
_training = partial(typer.Option, rich_help_panel="Training")
_sampling = partial(typer.Option, rich_help_panel="Sampling of the responses")
_trials = partial(typer.Option, rich_help_panel="Trials in the engine")

Target = Annotated[str, typer.Option(help="The target: registered name, hub id, directory or .gguf file.")]
DraftModel = Annotated[str, typer.Option(help="The draft model whose states the head reads, or feature_head:DIR.")]
Out = Annotated[Path, typer.Option(metavar="DIR", help="Directory to write; it must not exist.")]
Data = Annotated[
    list[Path], _data(metavar="FILE", help="Prompts or texts: .txt or .jsonl, also .gz and .xz; can be repeated.")
]
Form = Annotated[str, _data(help="How texts stand in .txt files: lines, paragraphs or stories.")]
Opening = Annotated[
    int | None,
    _data(help="Sentences of a text that are its prompt, 0 for all; without it 1 in .txt and 0 in .jsonl."),
]
Prompts = Annotated[int | None, _data(help="How many texts to use; without it all.")]
Starts = Annotated[int, _data(help="Places in each response that the draft model continues.")]
Cache = Annotated[Path | None, _data(metavar="DIR", help="Where responses and features are kept for other runs.")]
Temperature = Annotated[float, _sampling(help="Of both models: heads fit the temperature they saw.")]
TopK = Annotated[int, _sampling(help="Keep the k most likely tokens; 0 is off.")]
TopP = Annotated[float, _sampling(help="Keep the fewest tokens whose mass reaches this.")]
MaxTokens = Annotated[int, _sampling(help="Most tokens a response.")]
Steps = Annotated[int, _training(help="Optimiser steps.")]
Rate = Annotated[float, _training("--learning-rate", help="AdamW's, at the top of a cosine schedule.")]
BatchSize = Annotated[int, _training("--batch", help="Tokens a step.")]
Seed = Annotated[int, _training(help="Of everything.")]
Dtype = Annotated[str, _training(help="Of both models: auto, float32, bfloat16 or float16.")]
Device = Annotated[str | None, _training(help="cpu, cuda, cuda:1; without it an accelerator if there is one.")]
TrialPrompts = Annotated[int, _trials(help="Held-out prompts of a trial.")]
Json = Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]


@app.command()
def head(
    *,
    target: Target,
    draft: DraftModel,
    data: Data,
    out: Out,
    kind: Annotated[
        str, _training(help="acceptance: P(accepted), for stopper acceptance; log_ratio: log(p/q), for stopper ratio.")
    ] = "acceptance",
    depth: Annotated[int, _training(help="Residual SiLU blocks before the output; 0 is linear.")] = 3,
    shared_blocks: Annotated[
        bool,
        _training("--shared-blocks", help="One set of weights for all blocks, as in SpecDec++'s published code."),
    ] = False,
    w_rej: Annotated[float, _training(help="Weight of rejections in the cross-entropy; acceptance only.")] = 6.0,
    mix: Annotated[
        float | None,
        _training(
            metavar="R",
            help="Token mixing as in SpecDec++, with this share of the target's tokens (there 0.15); "
            "without it on the draft's own continuations, which fit a run better.",
        ),
    ] = None,
    steps: Steps = 4000,
    learning_rate: Rate = 3e-3,
    batch: BatchSize = 512,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = None,
    form: Form = "lines",
    opening: Opening = None,
    prompts: Prompts = None,
    starts: Starts = 4,
    cache: Cache = None,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    max_tokens: MaxTokens = 128,
    threshold: Annotated[
        float | None, _trials(help="h of the stopper; without it the cheapest in trials, by the cost model.")
    ] = None,
    sweep: Annotated[
        bool, _trials("--sweep", help="Try every depth and weight at every threshold, and take the cheapest.")
    ] = False,
    cost_ratio: Annotated[
        float | None, _trials(metavar="R", help="Time of a draft pass over that of a target pass; else measured.")
    ] = None,
    trial_prompts: TrialPrompts = 32,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a head that predicts acceptance or log(p/q), for stoppers that end a draft in time."""
    from draftproof.training.heads import Labels
    from draftproof.training.recipes import HeadJob, make_head

    if kind not in ("acceptance", "log_ratio"):
        raise typer.BadParameter(f"--kind is {kind!r}: legal are acceptance and log_ratio")
    if sweep and threshold is not None:
        raise typer.BadParameter("--sweep chooses the threshold: leave out --threshold")
    job = partial(
        HeadJob,
        kind=kind,
        depth=depth,
        shared_blocks=shared_blocks,
        labels=Labels(w_rej=w_rej),
        mix=mix,
        threshold=threshold,
        sweep=sweep,
        cost_ratio=cost_ratio,
    )
    _run(make_head, job, locals())


@app.command()
def verifier(
    *,
    target: Target,
    draft: DraftModel,
    data: Data,
    out: Out,
    lam: Annotated[float, _training("--lambda", help="A token is acceptable if q <= lambda p.")] = 1.2,
    depth: Annotated[int, _training(help="Residual SiLU blocks before the output; 0 is linear, as published.")] = 0,
    shared_blocks: Annotated[bool, _training("--shared-blocks", help="One set of weights for all blocks.")] = False,
    reads_draw: Annotated[
        bool, _training("--reads-draw", help="Also read log q of the drawn token, which the state does not know.")
    ] = False,
    steps: Steps = 2000,
    learning_rate: Rate = 3e-3,
    batch: BatchSize = 512,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = None,
    form: Form = "lines",
    opening: Opening = None,
    prompts: Prompts = None,
    starts: Starts = 4,
    cache: Cache = None,
    temperature: Temperature = 1.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    max_tokens: MaxTokens = 128,
    threshold: Annotated[float, _training(help="tau: tokens above it are accepted unseen by the target.")] = 0.5,
    trial_prompts: TrialPrompts = 32,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train SPRINTER's small verifier. With the rule last_token it is LOSSY: the output law is not the target's."""
    from draftproof.training.heads import Labels
    from draftproof.training.recipes import HeadJob, make_verifier_head

    job = partial(
        HeadJob,
        kind="verifier",
        depth=depth,
        shared_blocks=shared_blocks,
        reads_draw=reads_draw,
        labels=Labels(lam=lam),
        threshold=threshold,
    )
    _run(make_verifier_head, job, locals())


def _run(make: Callable[..., dict[str, Any]], job: Callable[..., Any], given: dict[str, Any]) -> None:
    """Do a job with the options that both commands have, and print what came of it."""
    from draftproof.cli.generate import quiet_libraries
    from draftproof.progress import bar, silent
    from draftproof.sampling import SamplingParams
    from draftproof.training.loop import TrainingPlan
    from draftproof.training.pair_data import Material

    same = ("target", "draft", "form", "opening", "prompts", "starts", "seed", "dtype", "device", "cache")
    sampling = {name: given[name] for name in ("temperature", "top_k", "top_p", "max_tokens")}
    material = Material(
        data=tuple(given["data"]), params=SamplingParams(**sampling), **{name: given[name] for name in same}
    )
    wanted = job(
        material=material,
        out=given["out"],
        plan=TrainingPlan(
            steps=given["steps"], learning_rate=given["learning_rate"], warmup=min(50, given["steps"] // 10)
        ),
        batch=given["batch"],
        trial_prompts=given["trial_prompts"],
    )
    with quiet_libraries():
        summary = make(wanted, silent if given["quiet"] else bar)
    show(summary, given["out"], as_json=given["as_json"])
