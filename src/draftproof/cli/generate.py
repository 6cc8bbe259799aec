"""`draftproof generate`: continue prompts, as text on stdout or as one JSON object a line.

Knows: which options there are and what is printed where. Does not know: how anything is decoded, timed or worded.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from draftproof.backends.loading import BACKENDS
from draftproof.cli import _report
from draftproof.cli._compare import compare
from draftproof.cli._prompts import PromptText, gather
from draftproof.cli._sampling import sampling_options
from draftproof.engine.engine import Engine
from draftproof.engine.prompts import Prompt
from draftproof.engine.registry import DRAFTERS, STOPPERS, VERIFIERS
from draftproof.engine.request import Output, Request
from draftproof.errors import UserError
from draftproof.sampling import SamplingParams

TARGET, DRAFT = "embedded:stories", "embedded:stories-draft"

app = typer.Typer(add_completion=False)
_model = partial(typer.Option, rich_help_panel="Models")
_speculation = partial(typer.Option, rich_help_panel="Speculation")


@app.command()
@sampling_options
def generate(
    prompt: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]", help="Text to continue; - or nothing reads stdin.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Many prompts: one a line, or in .jsonl one object a line.")
    ] = None,
    target: Annotated[
        str | None, _model(help=f"Registered name, hub id, directory or .gguf file; without it {TARGET}.")
    ] = None,
    draft: Annotated[
        str | None, _model(help=f"Named likewise; without it {DRAFT}, or none if --target is given.")
    ] = None,
    dtype: Annotated[str, _model(help="Of both models: auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, _model(help="cpu, cuda, cuda:1; without it an accelerator if there is one.")] = None,
    backend: Annotated[str, _model(help=f"Who computes them: {', '.join(BACKENDS)}.")] = "auto",
    max_batch: Annotated[int, _model(help="Sequences decoded together.")] = 8,
    trust_remote_code: Annotated[bool, _model("--trust-remote-code", help="Run code that comes with a model.")] = False,
    drafter: Annotated[str | None, _speculation(help=f"Where drafts come from: {', '.join(DRAFTERS)}.")] = None,
    stopper: Annotated[
        str | None,
        _speculation(help=f"When a draft ends: {', '.join(STOPPERS)} (as NAME:ARGUMENT); without it as it pays: auto."),
    ] = None,
    verifier: Annotated[
        str | None, _speculation(help=f"The verification rule: {', '.join(VERIFIERS)}; without it the drafter's best.")
    ] = None,
    draft_temperature: Annotated[
        float | None, _speculation(help="The draft's own temperature; the output law stays the target's.")
    ] = None,
    draft_top_k: Annotated[
        int | None, _speculation(help="The draft's own top-k; the output law stays the target's.")
    ] = None,
    chat: Annotated[bool | None, typer.Option(help="Apply the chat template; without either if there is one.")] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message of the chat.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line for each continuation.")
    ] = False,
    with_plain: Annotated[
        bool, typer.Option("--compare", help="Also time plain decoding, in turns, and print the speed-up.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Leave out the summary.")] = False,
    *,
    sampling: SamplingParams,
) -> None:
    """Continue a prompt, fast, and say what speculation gained.

    The text goes to stdout as it is made, one summary line to stderr.
    A tiny pair of models ships with draftproof, for trying it.
    """
    if prompt and len(prompt) > 1:  # typer would refuse them too, and show them
        raise typer.BadParameter(f"PROMPT is {len(prompt)} words: put it in quotes")
    if chat is False and system is not None:
        raise typer.BadParameter("--system needs the chat template: leave out --no-chat")
    sources = gather(prompt[0] if prompt else None, prompts)
    asked_for = max(len(sources) * sampling.n, 1)  # stopper auto measures a full batch: no larger than there is use for
    with quiet_libraries(), _notes(quiet=quiet):
        engine = Engine.load(
            target or TARGET,
            draft or default_draft(target, drafter),
            drafter=drafter,
            stopper=stopper,
            verifier=verifier,
            dtype=dtype,
            device=device,
            backend=backend,
            draft_temperature=draft_temperature,
            draft_top_k=draft_top_k,
            max_batch=min(max_batch, asked_for),
            trust_remote_code=trust_remote_code,
        )
        if with_plain and engine.drafter.name == "none":
            raise typer.BadParameter("--compare needs a drafter, and none is in effect: name one with --draft")
        asked = [Asked(as_prompt(engine, source, chat=chat, system=system), source.where) for source in sources]
        GenerateRun(engine, asked, sampling, as_json=as_json, with_plain=with_plain, quiet=quiet)()


def default_draft(target: str | None, drafter: str | None) -> str | None:
    """The embedded draft, for the embedded target only, and only where a drafter may read it."""
    reads = (drafter or "model").partition(":")[0] in {"model", "chains", "tree"}
    return DRAFT if target is None and reads else None


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep the loading bars and warnings of libraries off the screen; ours are one line each. -W brings all back."""
    from transformers.utils import logging as library_logging

    library: Any = library_logging  # transformers is typed, but not these two
    library.set_verbosity_error()
    library.disable_progress_bar()
    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
            warnings.filterwarnings("default", module="draftproof")
        warnings.showwarning = _show_warning
        yield


@contextmanager
def _notes(*, quiet: bool) -> Iterator[None]:
    """Show what the library notes on long work, a line each."""
    logger, handler = logging.getLogger("draftproof"), _Notes()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class _Notes(logging.Handler):
    """Tells of each record on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        """A line."""
        _report.tell(f"draftproof: {record.getMessage()}")


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    _report.tell(f"draftproof: warning: {message}")


@dataclass(frozen=True)
class Asked:
    """A prompt as the engine takes it, and where it stood."""

    prompt: Prompt
    where: str


def as_prompt(engine: Engine, source: PromptText, *, chat: bool | None, system: str | None) -> Prompt:
    """The text as it stands, or as a user's message where a chat is asked for or the target has a template."""
    wanted = bool(getattr(engine.tokenizer, "chat_template", None)) if chat is None else chat
    if not wanted and system is None:
        return source.text
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": source.text}]


@dataclass(frozen=True)
class GenerateRun:
    """One call of the command, after everything is loaded: decode, print, compare."""

    engine: Engine
    asked: Sequence[Asked]
    sampling: SamplingParams
    as_json: bool
    with_plain: bool
    quiet: bool

    def __call__(self) -> None:
        """Results to stdout, then what a person wants to know of them to stderr."""
        start = time.perf_counter()
        single = len(self.asked) == 1 and self.sampling.n == 1
        outputs = [self.stream()] if single and not self.as_json else self.collect()
        seconds = outputs[0].stats.seconds.total if single else time.perf_counter() - start
        if not self.quiet and not self.as_json:
            _report.tell(_report.summary(outputs, seconds), dim=True)
        if self.with_plain:
            self.tell_comparison(outputs)

    def stream(self) -> Output:
        """Print the text of the one continuation as it is made."""
        output = None
        for chunk in self.engine.stream(self.asked[0].prompt, self.sampling):
            _report.write(chunk.text)
            output = chunk.output
        _report.write("\n")
        assert output is not None, "the last chunk carries the output"
        return output

    def collect(self) -> list[Output]:
        """Decode everything and print each continuation as soon as it and all before it are finished.

        With --compare JSON waits: the comparison belongs into the objects.
        """
        outputs = []
        with _report.progress(len(self.asked) * self.sampling.n) as (write, advance):
            for output in self.decode():
                outputs.append(output)
                advance()
                if not (self.as_json and self.with_plain):
                    write(self.shown(output, len(outputs) - 1))
        return outputs

    def decode(self) -> Iterator[Output]:
        """Every continuation, in order, as soon as it is finished; nothing is decoded when a prompt cannot be.

        Raises:
            UserError: a prompt that cannot be decoded from, with the place where it stood.
        """
        requests: list[Request] = []
        try:
            for asked in self.asked:
                requests += self.add(asked)
            for request in requests:
                while not request.finished:
                    self.engine.step()
                yield self.engine.output(request)
        finally:
            for request in requests:
                self.engine.abort(request)

    def add(self, asked: Asked) -> list[Request]:
        """Queue a prompt."""
        try:
            return self.engine.add(asked.prompt, self.sampling)
        except ValueError as error:
            raise UserError(f"{asked.where}: {error}" if asked.where else str(error)) from error

    def shown(self, output: Output, place: int, comparison: Mapping[str, Any] | None = None) -> str:
        """A continuation as it is printed: a line of JSON, or the text under a line that numbers it."""
        if self.as_json:
            made = output.to_dict() | ({} if comparison is None else {"compare": comparison})
            return (
                json.dumps(made) + "\n"
            )  # in ASCII: some readers also end lines at U+2028, and some pipes are not UTF-8
        number = place // self.sampling.n + 1
        title = f"prompt {number}" if self.sampling.n == 1 else f"prompt {number}, continuation {output.index + 1}"
        return f"=== {title} ===\n{output.text}\n"

    def tell_comparison(self, outputs: Sequence[Output]) -> None:
        """Measure against plain decoding, with the seeds of `outputs`, and print what came out."""
        params = [replace(self.sampling, seed=output.seed) for output in outputs if output.index == 0]
        found = compare(self.engine, [asked.prompt for asked in self.asked], params, outputs)
        if self.as_json:
            for place, output in enumerate(outputs):
                _report.write(self.shown(output, place, found.to_dict()))
        else:
            for line in _report.comparison(found):
                _report.tell(line)
