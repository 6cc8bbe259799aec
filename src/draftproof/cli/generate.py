"""`draftproof generate`: decodes and prints prompts, reports failed ones, and prints a summary and a comparison."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from draftproof.cli import _output
from draftproof.cli._compare import compare, comparison, sampling_note, summary
from draftproof.cli._download import first_target
from draftproof.cli._engine import engine_options, load_engine, named_target
from draftproof.cli._prompts import PromptText, gather, one_argument, read_text
from draftproof.cli._quiet import logged_lines, quiet_libraries
from draftproof.cli._sampling import merged_params, sampling_options
from draftproof.engine.engine import Engine
from draftproof.engine.prompts import Prompt
from draftproof.engine.request import Output, Request
from draftproof.errors import RequestError, UserError
from draftproof.sampling import SamplingParams

app = typer.Typer(add_completion=False)


@app.command()
@sampling_options
@engine_options
def generate(
    prompt: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]", help="Text to continue; - or nothing reads stdin.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Many prompts: one per line, or in .jsonl one object per line.")
    ] = None,
    chat: Annotated[
        bool | None, typer.Option(help="Apply the chat template; without this option it is applied if there is one.")
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message of the chat.")] = None,
    prediction: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A text that the answer may repeat; drafts are taken from it.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line for each continuation.")
    ] = False,
    with_plain: Annotated[
        bool, typer.Option("--compare", help="Also time plain decoding, in turns, and print the speed-up.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Leave out the summary and notes on stderr.")] = False,
    *,
    engine: dict[str, Any],
    sampling: dict[str, Any],
) -> None:
    """Continue a prompt, fast, and report what speculation gained.

    The text goes to stdout as it is generated, and one summary line to stderr.
    Without a target, smollm2-135m is downloaded at the first use; if that fails, a tiny model of the package is used.
    """
    given = one_argument(prompt, "PROMPT")
    if chat is False and system is not None:
        raise typer.BadParameter("--system needs the chat template: leave out --no-chat")
    predicted = read_text(prediction)
    sources = gather(given, prompts)
    sequences = max(len(sources) * sampling["n"], 1)  # a larger batch would stay empty
    with quiet_libraries(), logged_lines(quiet=quiet):
        target = named_target(engine) or first_target(quiet=quiet)
        loaded = load_engine(target, engine | {"max_batch": min(engine["max_batch"], sequences)}, quiet=quiet)
        if with_plain and loaded.drafter.name == "none":
            raise typer.BadParameter("--compare needs a drafter, but none is in effect: name one with --drafter")
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


@dataclass(frozen=True)
class PromptInput:
    """A prompt for the engine, and its place in the input."""

    prompt: Prompt
    where: str


@dataclass(frozen=True)
class Failure:
    """A failed continuation; `prompt` is None for token ids."""

    prompt: str | None
    index: int
    error: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"prompt": self.prompt, "index": self.index, "error": self.error}


def as_inputs(
    engine: Engine, sources: Sequence[PromptText], *, chat: bool | None, system: str | None
) -> tuple[list[PromptInput], str]:
    """The prompts for the engine, and a notice if the chat template is applied by default."""
    applied = system is not None or (engine.prompts.has_template if chat is None else chat)
    if not applied:
        return [PromptInput(source.text, source.where) for source in sources], ""
    first = [] if system is None else [{"role": "system", "content": system}]
    inputs = [PromptInput([*first, {"role": "user", "content": each.text}], each.where) for each in sources]
    if chat is not None or system is not None:
        return inputs, ""
    sent = "the prompt is sent as a chat message" if len(inputs) == 1 else "the prompts are sent as chat messages"
    return inputs, f"{sent}, in the model's chat template; --no-chat sends the text as it is"


@dataclass(frozen=True)
class GenerateRun:
    """A run of the command after everything is loaded: decode, print, compare."""

    engine: Engine
    inputs: Sequence[PromptInput]
    params: SamplingParams
    given: Collection[str]
    as_json: bool
    with_plain: bool
    quiet: bool
    prediction: str | None = None

    def __call__(self) -> None:
        """Print results to stdout, then summary and comparison to stderr; exit code 1 if a request failed."""
        start = time.perf_counter()
        single = len(self.inputs) == 1 and self.params.n == 1
        results = [self.stream()] if single and not self.as_json else self.collect()
        outputs = [result for result in results if isinstance(result, Output)]
        seconds = outputs[0].stats.seconds.total if single and outputs else time.perf_counter() - start
        if outputs and not self.quiet and not self.as_json:
            _output.note(summary(outputs, seconds), dim=True)
            if line := sampling_note(self.params, self.given):
                _output.note(line, dim=True)
        if self.with_plain:
            self.show_comparison(results)
        if len(outputs) < len(results):
            raise typer.Exit(1)

    def stream(self) -> Output:
        """Print the text of the only continuation as it is generated; reasoning goes to stderr."""
        output, reasons = None, False
        for chunk in self.engine.stream(self.inputs[0].prompt, self.params, prediction=self.prediction):
            if chunk.reasoning and not self.quiet:
                _output.write_dim(chunk.reasoning)
                reasons = True
            if chunk.text and reasons:
                _output.write_dim("\n\n")
                reasons = False
            _output.write(chunk.text)
            output = chunk.output
        _output.write("\n")
        assert output is not None, "the last chunk carries the output"
        return output

    def collect(self) -> list[Output | Failure]:
        """Decode everything, and print finished results in order; with --compare, JSON waits for the comparison."""
        results = []
        with _output.progress(len(self.inputs) * self.params.n) as (write, advance):
            for result in self.decode():
                results.append(result)
                advance()
                place = len(results) - 1
                if self.as_json and self.with_plain:
                    continue
                if isinstance(result, Output) or self.as_json:
                    write(self.render(result, place))
                if isinstance(result, Failure):
                    where = self.inputs[place // self.params.n].where or self.title(result, place)
                    _output.note(f"draftproof: error: {where}: {result.error}")
        return results

    def decode(self) -> Iterator[Output | Failure]:
        """Yield every continuation in order when it is finished; if a prompt is invalid, nothing is decoded."""
        requests: list[Request] = []
        try:
            for each in self.inputs:
                requests += self.add(each)
            for request in requests:
                while not request.finished:
                    self.engine.step()
                try:
                    yield self.engine.output(request)
                except RequestError as error:
                    yield Failure(request.prompt, request.index, str(error))
        finally:
            for request in requests:
                self.engine.abort(request)

    def add(self, each: PromptInput) -> list[Request]:
        """Queue a prompt."""
        try:
            return self.engine.add(each.prompt, self.params, prediction=self.prediction, offline=True)
        except ValueError as error:
            raise UserError(f"{each.where}: {error}" if each.where else str(error)) from error

    def render(self, result: Output | Failure, place: int, comparison: Mapping[str, Any] | None = None) -> str:
        """A result for stdout: a line of JSON, or the text under a numbered title."""
        if isinstance(result, Output) and not self.as_json:
            return f"=== {self.title(result, place)} ===\n{result.text}\n"
        values = result.to_dict() | ({} if comparison is None else {"compare": comparison})
        if self.engine.plain_because:
            values["plain_because"] = self.engine.plain_because
        if self.engine.rounding:
            values["rounding"] = self.engine.rounding
        return json.dumps(values) + "\n"  # in ASCII: some readers split lines at U+2028, and some pipes are not UTF-8

    def title(self, result: Output | Failure, place: int) -> str:
        """The title of a result: the number of its prompt, and of its continuation."""
        number = place // self.params.n + 1
        return f"prompt {number}" if self.params.n == 1 else f"prompt {number}, continuation {result.index + 1}"

    def show_comparison(self, results: Sequence[Output | Failure]) -> None:
        """Measure against plain decoding with the same seeds, and print the result; failed prompts are left out."""
        n = self.params.n
        groups = [results[place : place + n] for place in range(0, len(results), n)]
        whole = [place for place, group in enumerate(groups) if all(isinstance(each, Output) for each in group)]
        outputs = [each for place in whole for each in groups[place] if isinstance(each, Output)]
        params = [replace(self.params, seed=output.seed) for output in outputs if output.index == 0]
        prompts = [self.inputs[place].prompt for place in whole]
        found = compare(self.engine, prompts, params, outputs, self.prediction) if outputs else None
        if self.as_json:
            values = None if found is None else found.to_dict()
            for place, result in enumerate(results):
                _output.write(self.render(result, place, values if place // n in whole else None))
        elif found is not None:
            for line in comparison(found):
                _output.note(line)
