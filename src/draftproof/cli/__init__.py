"""The command `draftproof`: one module for each command, loaded when it is called; errors are one line and a code.

Nothing here imports torch, so that help and version are printed at once.

A new command is a module `draftproof/cli/NAME.py` with a typer `app`, and a line in COMMANDS. Modules with a leading
underscore are shared by commands.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from draftproof._version import __version__
from draftproof.errors import UserError, printable

COMMANDS = {
    "generate": "Continue a prompt, fast, and report what speculation gained.",
    "chat": "Chat with a model in the terminal.",
    "batch": "Answer a file of prompts, or an OpenAI batch file, into a folder.",
    "serve": "Serve a model with OpenAI's and Anthropic's APIs.",
    "bench": "Measure compositions and other engines on the same questions.",
    "reproduce": "Reproduce tables and figures of the papers, and show their numbers beside ours.",
    "profile": "Measure what a composition costs on this machine: memory, rounds, forward passes, rules.",
    "audit": "Check verification rules: our own, yours, and those of other packages and servers.",
    "models": "List and fetch models, print their directories, and cut shallower copies.",
    "train": "Train and evaluate draft models, feature heads, stopper heads and SPRINTER's verifier.",
}
_DEBUG = "draftproof.debug"
_COMPLETION = {"install_completion", "show_completion"}
_EVERYWHERE = {"debug", "offline"}  # options that every command has


class Commands(TyperGroup):
    """A group that knows the names of its commands, and loads only the one that is called."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, line in COMMANDS.items():
            self.add_command(TyperCommand(name, help=line))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Replace the stand-in of a command by the real one."""
        name, stand_in, rest = super().resolve_command(ctx, args)
        return name, None if stand_in is None or name is None else self._load(name), rest

    def _load(self, name: str) -> Any:
        """The command of a module, with the common options, and without typer's completion options."""
        from draftproof.cli._quiet import set_quiet_variables

        set_quiet_variables()  # before the module imports torch
        command = typer.main.get_command(importlib.import_module(f"{__name__}.{name}").app)
        shared = [option for option in self.params if option.name in _EVERYWHERE]
        command.params = [option for option in command.params if option.name not in _COMPLETION]
        for each in (command, *getattr(command, "commands", {}).values()):
            each.params = [*each.params, *shared]
        return command

    def invoke(self, ctx: Any) -> Any:
        """Run the command; with --debug, print the traceback of an error before it is re-raised."""
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):
            raise
        except Exception:
            if ctx.meta.get(_DEBUG):
                traceback.print_exc()
            raise

    def main(self, *args: Any, **options: Any) -> Any:
        """Run, print an error as one line on stderr, and exit: 0, 1 (error), 2 (usage) or 130 (Ctrl-C)."""
        try:
            code = super().main(*args, **options | {"standalone_mode": False})
        except Exception as error:  # noqa: BLE001 - the user gets one line for any error
            code = _show(error)
        sys.exit(code or 0)


def _show(error: Exception) -> int:
    """Print an error as one line; returns the exit code."""
    message = printable(" ".join(_sentence(error).split()))
    if message:  # empty if help was printed because there were no arguments
        typer.echo(f"draftproof: error: {message}", err=True)
    return error.exit_code if isinstance(error, typer.TyperException) else 1


def _sentence(error: Exception) -> str:
    """The message of a user's mistake; for any other error its type, its message, and the option that shows more."""
    if isinstance(error, typer.Abort):
        return "aborted"
    if isinstance(error, typer.TyperException):
        context = getattr(error, "ctx", None)
        message = error.format_message().removeprefix("Invalid value: ").rstrip(".")
        return f"{message} (see {context.command_path} --help)" if message and context else message
    # The engine's parts raise plain ValueErrors for invalid values; their messages are written for users.
    if isinstance(error, UserError | ValueError | OSError) and str(error):
        return str(error)
    return f"unexpected {type(error).__name__}: {error} (--debug shows where)"


def _set_debug(ctx: Any, value: bool) -> None:
    if value:
        ctx.meta[_DEBUG] = True


def _go_offline(value: bool) -> None:
    """Set the variable that draftproof and huggingface_hub read; huggingface_hub is not imported yet."""
    if value:
        os.environ["HF_HUB_OFFLINE"] = "1"


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"draftproof {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


_flag = partial(typer.Option, expose_value=False)
_HELP = {
    "version": "Show the version and exit.",
    "debug": "Show the traceback of an error.",
    "offline": "Download nothing; a model that is not on this machine is an error. The same as HF_HUB_OFFLINE=1.",
}


@app.callback()
def _root(
    version: Annotated[bool, _flag("--version", callback=_show_version, is_eager=True, help=_HELP["version"])] = False,
    debug: Annotated[
        bool, _flag("--debug", callback=_set_debug, envvar="DRAFTPROOF_DEBUG", help=_HELP["debug"])
    ] = False,
    offline: Annotated[bool, _flag("--offline", callback=_go_offline, help=_HELP["offline"])] = False,
) -> None:
    """Speculative decoding for any Hugging Face causal language model: faster, with the same output distribution."""


def _prepare_streams() -> None:
    """Make any text printable: discarded if the stream is closed, escaped if its encoding lacks a character."""
    sys.stdout = sys.stdout or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - as long as the process
    sys.stderr = sys.stderr or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as Python has it for stderr


def main() -> None:
    """Entry point of the console script."""
    _prepare_streams()
    app(prog_name="draftproof")
