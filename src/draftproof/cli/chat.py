"""`draftproof chat`: a conversation in the terminal; without one, a message on stdin is answered."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from draftproof import models
from draftproof.cli import _output
from draftproof.cli._chat_session import Screen, converse
from draftproof.cli._compare import inherited
from draftproof.cli._conversation import Conversation
from draftproof.cli._engine import engine_options, load_engine, named_target
from draftproof.cli._libraries import logged_lines, quiet_libraries
from draftproof.cli._prompts import gather, one_argument, read_text
from draftproof.cli._sampling import CHAT_SAMPLING, sampling_options

app = typer.Typer(add_completion=False)


@app.command()
@partial(sampling_options, options=CHAT_SAMPLING)
@engine_options
def chat(
    message: Annotated[
        list[str] | None, typer.Argument(metavar="[MESSAGE]", help="The first message; - or no terminal reads stdin.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with a chat template, in place of the model's.")
    ] = None,
    show_drafts: Annotated[
        bool, typer.Option("--show-drafts", help="Colour tokens that were drafted, by where they came from.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Leave out the line after each answer.")] = False,
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Talk with a model.

    Ctrl-C stops an answer, /help lists the commands. Where stdin is no terminal, one message is answered.
    """
    first, here = one_argument(message, "MESSAGE"), sys.stdin is not None and sys.stdin.isatty()
    if first is not None or not here:
        first = gather(first, None)[0].text
    template = read_text(chat_template)
    with quiet_libraries(), logged_lines(quiet=quiet):
        loaded = load_engine(named_target(engine) or models.FIRST_TARGET, engine | {"max_batch": 1}, quiet=quiet)
        if template is not None:
            loaded.prompts.use_template(template)
        conversation = Conversation(loaded, sampling, system=system)
        screen = Screen(conversation, show_drafts=show_drafts, quiet=quiet)
        if (line := inherited(conversation.params, sampling)) and not quiet:
            _output.note(line, dim=True)
        if here:
            converse(conversation, screen, first, quiet=quiet)
        else:
            assert first is not None, "read from stdin"
            screen.show(conversation.say(first))
