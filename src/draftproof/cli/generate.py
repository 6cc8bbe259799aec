"""`draftproof generate`: the options of the command, and what it does before anything is decoded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from draftproof.cli import _output
from draftproof.cli._continue import GenerateRun, as_inputs
from draftproof.cli._engine import engine_options, load_engine, named_target
from draftproof.cli._libraries import logged_lines, quiet_libraries
from draftproof.cli._prompts import gather, one_argument, read_text
from draftproof.cli._pulling import first_target
from draftproof.cli._sampling import merged_params, sampling_options

app = typer.Typer(add_completion=False)


@app.command()
@sampling_options
@engine_options
def generate(
    prompt: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]", help="Text to continue; - or nothing reads stdin.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Many prompts: one a line, or in .jsonl one object a line.")
    ] = None,
    chat: Annotated[
        bool | None, typer.Option(help="Apply the chat template; without this option it is applied if there is one.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message of the chat.")] = None,
    prediction: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A text that much of the answer may repeat: it is drafted from.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line for each continuation.")
    ] = False,
    with_plain: Annotated[
        bool, typer.Option("--compare", help="Also time plain decoding, in turns, and print the speed-up.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Leave out the summary and notes on stderr.")] = False,
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Continue a prompt, fast, and say what speculation gained.

    The text goes to stdout as it is made, one summary line to stderr.
    Without a target, smollm2-135m is downloaded at the first use, or a tiny model of the package takes its place.
    """
    given = one_argument(prompt, "PROMPT")
    if chat is False and system is not None:
        raise typer.BadParameter("--system needs the chat template: leave out --no-chat")
    predicted = read_text(prediction)
    sources = gather(given, prompts)
    sequences = max(len(sources) * sampling["n"], 1)  # a larger batch would not be used
    with quiet_libraries(), logged_lines(quiet=quiet):
        target = named_target(engine) or first_target(quiet=quiet)
        loaded = load_engine(target, engine | {"max_batch": min(engine["max_batch"], sequences)}, quiet=quiet)
        if with_plain and loaded.drafter.name == "none":
            raise typer.BadParameter("--compare needs a drafter, and none is in effect: name one with --draft")
        params = merged_params(sampling, loaded.default_params)
        inputs, notice = as_inputs(loaded, sources, chat=chat, system=system)
        if notice and not quiet and not as_json:
            _output.note(f"draftproof: {notice}")
        GenerateRun(
            loaded,
            inputs,
            params,
            set(sampling),
            as_json=as_json,
            with_plain=with_plain,
            quiet=quiet,
            prediction=predicted,
        )()
