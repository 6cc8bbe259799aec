"""`draftproof generate`: the options of the command, and what it does before anything is decoded."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from draftproof import models
from draftproof.cli import _terminal
from draftproof.cli._continue import GenerateRun, as_inputs
from draftproof.cli._libraries import logged_lines, quiet_libraries
from draftproof.cli._parts import BACKEND_HELP, DRAFTER_HELP, STOPPER_HELP, VERIFIER_HELP, default_draft
from draftproof.cli._prompts import gather
from draftproof.cli._pulling import first_target, obtain
from draftproof.cli._sampling import merged_params, sampling_options
from draftproof.engine.engine import Engine

app = typer.Typer(add_completion=False)
_model = partial(typer.Option, rich_help_panel="Models")
_speculation = partial(typer.Option, rich_help_panel="Speculation")
_NAMES = "a registered name, hub id, directory or .gguf file"
_FIRST = f"without it {models.FIRST_TARGET}, or {models.DEFAULT_TARGET} where that cannot be downloaded"


@app.command()
@sampling_options
def generate(
    prompt: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]", help="Text to continue; - or nothing reads stdin.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Many prompts: one a line, or in .jsonl one object a line.")
    ] = None,
    target: Annotated[str | None, _model(envvar="DRAFTPROOF_TARGET", help=f"The target: {_NAMES}; {_FIRST}.")] = None,
    draft: Annotated[
        str | None, _model(help=f"The draft model: {_NAMES}; without it an embedded target's, or none for others.")
    ] = None,
    dtype: Annotated[str, _model(help="Number format of both models: auto, float32, bfloat16 or float16.")] = "auto",
    draft_dtype: Annotated[
        str,
        _model(help="Another number format for the draft; int8 or int4 quantize the draft model or feature head."),
    ] = "auto",
    device: Annotated[
        str | None,
        _model(help="cpu, cuda:1, or auto (several, and the disk); without it an accelerator."),
    ] = None,
    backend: Annotated[str, _model(help=BACKEND_HELP)] = "auto",
    adapter: Annotated[
        str | None, _model(metavar="DIR_OR_HUB_ID", help="A PEFT adapter (LoRA) for the target.")
    ] = None,
    attn_implementation: Annotated[
        str | None, _model(help="Attention of backend hf: eager or sdpa; without it transformers' choice.")
    ] = None,
    max_model_len: Annotated[
        int | None, _model(help="Longest sequence, prompt and text together; without it the target's own context.")
    ] = None,
    max_batch: Annotated[int, _model(help="Sequences decoded together.")] = 8,
    trust_remote_code: Annotated[bool, _model("--trust-remote-code", help="Run code that comes with a model.")] = False,
    generation_config: Annotated[
        str,
        _model(help="auto takes sampling defaults from the target's generation config; none leaves the file aside."),
    ] = "auto",
    drafter: Annotated[str | None, _speculation(help=DRAFTER_HELP)] = None,
    stopper: Annotated[str | None, _speculation(help=f"{STOPPER_HELP}; without it auto.")] = None,
    verifier: Annotated[str | None, _speculation(help=f"{VERIFIER_HELP}; without it the drafter's default.")] = None,
    draft_temperature: Annotated[
        float | None,
        _speculation(help="Temperature of the draft alone; the output distribution stays the target's."),
    ] = None,
    draft_top_k: Annotated[
        int | None, _speculation(help="Top-k of the draft alone; the output distribution stays the target's.")
    ] = None,
    chat: Annotated[
        bool | None, typer.Option(help="Apply the chat template; without this option it is applied if there is one.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message of the chat.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line for each continuation.")
    ] = False,
    with_plain: Annotated[
        bool, typer.Option("--compare", help="Also time plain decoding, in turns, and print the speed-up.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Leave out the summary and notes on stderr.")] = False,
    *,
    sampling: dict[str, Any],
) -> None:
    """Continue a prompt, fast, and say what speculation gained.

    The text goes to stdout as it is made, one summary line to stderr.
    Without a target, a small model is downloaded at the first use.
    """
    if prompt and len(prompt) > 1:  # typer would refuse them too, and show them
        raise typer.BadParameter(f"PROMPT is {len(prompt)} words: put it in quotes")
    if chat is False and system is not None:
        raise typer.BadParameter("--system needs the chat template: leave out --no-chat")
    sources = gather(prompt[0] if prompt else None, prompts)
    sequences = max(len(sources) * sampling["n"], 1)  # a larger batch would not be used
    with quiet_libraries(), logged_lines(quiet=quiet):
        target = target or first_target(quiet=quiet)
        draft = draft or default_draft(target, drafter)
        obtain(target, draft, quiet=quiet)
        engine = Engine.load(
            target,
            draft,
            drafter=drafter,
            stopper=stopper,
            verifier=verifier,
            dtype=dtype,
            device=device,
            backend=backend,
            draft_dtype=draft_dtype,
            draft_temperature=draft_temperature,
            draft_top_k=draft_top_k,
            adapter=adapter,
            attn_implementation=attn_implementation,
            max_model_len=max_model_len,
            max_batch=min(max_batch, sequences),
            trust_remote_code=trust_remote_code,
            generation_config=generation_config,
        )
        if with_plain and engine.drafter.name == "none":
            raise typer.BadParameter("--compare needs a drafter, and none is in effect: name one with --draft")
        params = merged_params(sampling, engine.default_params)
        inputs, notice = as_inputs(engine, sources, chat=chat, system=system)
        if notice and not quiet and not as_json:
            _terminal.note(f"draftproof: {notice}")
        GenerateRun(engine, inputs, params, set(sampling), as_json=as_json, with_plain=with_plain, quiet=quiet)()
