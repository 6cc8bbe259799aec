"""Prompts decoded and printed: text as it is made or JSON, failures of single requests, the summary, the comparison."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import typer

from draftproof.cli import _output
from draftproof.cli._compare import compare, comparison, inherited, summary
from draftproof.cli._prompts import PromptText
from draftproof.engine.engine import Engine
from draftproof.engine.prompts import Prompt
from draftproof.engine.request import Output, Request
from draftproof.errors import RequestError, UserError
from draftproof.sampling import SamplingParams


@dataclass(frozen=True)
class PromptInput:
    """A prompt as the engine takes it, and where it stood."""

    prompt: Prompt
    where: str


@dataclass(frozen=True)
class Failure:
    """A continuation of a prompt that could not be finished; token ids have no text."""

    prompt: str | None
    index: int
    error: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"prompt": self.prompt, "index": self.index, "error": self.error}


def as_inputs(
    engine: Engine, sources: Sequence[PromptText], *, chat: bool | None, system: str | None
) -> tuple[list[PromptInput], str]:
    """The prompts for the engine, and a notice where the chat template is applied although no option says so."""
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
    """One call of the command, after everything is loaded: decode, print, compare."""

    engine: Engine
    inputs: Sequence[PromptInput]
    params: SamplingParams
    given: Collection[str]
    as_json: bool
    with_plain: bool
    quiet: bool
    prediction: str | None = None

    def __call__(self) -> None:
        """Print results on stdout, then summary and comparison on stderr; exit code 1 where a request failed."""
        start = time.perf_counter()
        single = len(self.inputs) == 1 and self.params.n == 1
        results = [self.stream()] if single and not self.as_json else self.collect()
        outputs = [result for result in results if isinstance(result, Output)]
        seconds = outputs[0].stats.seconds.total if single and outputs else time.perf_counter() - start
        if outputs and not self.quiet and not self.as_json:
            _output.note(summary(outputs, seconds), dim=True)
            if line := inherited(self.params, self.given):
                _output.note(line, dim=True)
        if self.with_plain:
            self.show_comparison(results)
        if len(outputs) < len(results):
            raise typer.Exit(1)

    def stream(self) -> Output:
        """Print the text of the one continuation as it is made; what the model reasons before it goes to stderr."""
        output, reasons = None, False
        for chunk in self.engine.stream(self.inputs[0].prompt, self.params, prediction=self.prediction):
            if chunk.reasoning and not self.quiet:
                _output.write_aside(chunk.reasoning)
                reasons = True
            if chunk.text and reasons:
                _output.write_aside("\n\n")
                reasons = False
            _output.write(chunk.text)
            output = chunk.output
        _output.write("\n")
        assert output is not None, "the last chunk carries the output"
        return output

    def collect(self) -> list[Output | Failure]:
        """Decode everything and print what is finished, in order; with --compare JSON waits for the comparison."""
        results = []
        with _output.progress(len(self.inputs) * self.params.n) as (write, advance):
            for result in self.decode():
                results.append(result)
                advance()
                place = len(results) - 1
                if self.as_json and self.with_plain:
                    continue
                if isinstance(result, Output) or self.as_json:
                    write(self.shown(result, place))
                if isinstance(result, Failure):
                    where = self.inputs[place // self.params.n].where or self.title(result, place)
                    _output.note(f"draftproof: error: {where}: {result.error}")
        return results

    def decode(self) -> Iterator[Output | Failure]:
        """Every continuation, in order, as soon as it is finished; nothing is decoded when a prompt cannot be."""
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

    def shown(self, result: Output | Failure, place: int, comparison: Mapping[str, Any] | None = None) -> str:
        """A result as it is printed on stdout: a line of JSON, or the text under a line that numbers it."""
        if isinstance(result, Output) and not self.as_json:
            return f"=== {self.title(result, place)} ===\n{result.text}\n"
        made = result.to_dict() | ({} if comparison is None else {"compare": comparison})
        if self.engine.plain_because:
            made["plain_because"] = self.engine.plain_because
        if self.engine.rounding:
            made["rounding"] = self.engine.rounding
        return json.dumps(made) + "\n"  # in ASCII: some readers also end lines at U+2028, and some pipes are not UTF-8

    def title(self, result: Output | Failure, place: int) -> str:
        """The number of a result's prompt, and which of its continuations it is."""
        number = place // self.params.n + 1
        return f"prompt {number}" if self.params.n == 1 else f"prompt {number}, continuation {result.index + 1}"

    def show_comparison(self, results: Sequence[Output | Failure]) -> None:
        """Measure against plain decoding with the same seeds, and print it; prompts that failed are left out."""
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
                _output.write(self.shown(result, place, values if place // n in whole else None))
        elif found is not None:
            for line in comparison(found):
                _output.note(line)
