"""A batch from its input to its folder of answers, on this machine or wherever rows are answered."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any

from draftproof.backends.loading.quantization import quantization_fields
from draftproof.batch.answering import Result
from draftproof.batch.folder import AnswerFolder
from draftproof.batch.rows import RowOptions
from draftproof.batch.source import Row, RowSource
from draftproof.errors import UserError
from draftproof.progress import Watch, silent
from draftproof.provenance import fingerprint, model_name

_log = logging.getLogger(__name__)
# Arguments of Engine.load that answers do not depend on: where and how fast they are made.
_FREE = ("max_batch", "kv_memory", "prefix_reuse", "device", "trust_remote_code")
Answers = Callable[[Iterable[Row]], Generator[list[Result], None, None]]


@dataclass
class RunSummary:
    """What a run did: rows with an output before it, those that it has answered, and of these those with an error."""

    rows: int
    before: int
    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    target_calls: int = 0
    seconds: float = 0.0

    def add(self, result: Result) -> None:
        """Count a result."""
        self.answered += 1
        self.failed += result.failed
        self.prompt_tokens += result.prompt_tokens
        self.completion_tokens += result.completion_tokens
        self.target_calls += result.target_calls

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        rate = self.completion_tokens / self.seconds if self.seconds else None
        calls = self.completion_tokens / self.target_calls if self.target_calls else None
        return {**asdict(self), "tokens_per_second": rate, "block_efficiency": calls}


def settings_of(source: RowSource, engine: Mapping[str, Any], options: RowOptions) -> dict[str, Any]:
    """What the answers depend on: the input, the models with their content, and every option that changes an answer."""
    named = {name: engine.get(name) for name in ("target", "draft", "adapter")}
    quantized = engine.get("quantization_config")
    return {
        "input": source.digest,
        "models": {name: _content(each) for name, each in named.items() if each},
        **{name: value for name, value in engine.items() if name not in _FREE and name not in named},
        **({} if quantized is None else {"quantization_config": quantization_fields(quantized)}),
        **{name: model_name(each) if each else None for name, each in named.items()},
        **{name: value for name, value in asdict(options).items() if name != "sampling"},
        **{f"sampling_{name}": value for name, value in options.sampling.items()},
    }


def _content(name: str) -> str | None:
    """A hash of a model's files; None where it is not on this machine."""
    try:
        return fingerprint(name)
    except (OSError, UserError):
        return None


def answer_all(
    source: RowSource, folder: AnswerFolder, answers: Answers, *, run: Mapping[str, Any], watch: Watch = silent
) -> RunSummary:
    """Answer every row that has no output yet; `answers` go from rows to their results, in any order, some at a time.

    Raises:
        UserError: the folder cannot be written, or is another run's.
        KeyboardInterrupt: after SIGINT, with all results that had come on the disk.
        SystemExit: after SIGTERM, likewise.
    """
    if source.unread:
        _log.warning(
            "%s: the columns %s are not read, since all rows have the same options: give them to the command, or write "
            "lines of an OpenAI batch file",
            source.path,
            ", ".join(source.unread),
        )
    with _ended_by_sigterm(), folder.open(run):
        summary = RunSummary(source.count, len(folder.done))
        left = (row for row in source.rows() if str(row.id) not in folder.done)
        start = time.perf_counter()
        try:
            with closing(answers(left)) as found, watch("answering", source.count, summary.before) as tick:
                for results in found:
                    fresh = folder.add(results)
                    for result in fresh:
                        summary.add(result)
                    tokens = sum(result.completion_tokens for result in fresh)
                    tick(summary.before + summary.answered, tokens=tokens)
        finally:
            summary.seconds = time.perf_counter() - start
        if len(folder.done) != source.count:
            raise UserError(
                f"{source.count - len(folder.done)} of {source.count} rows have no output: run the command again"
            )
        folder.finish()
    return summary


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends the block by an exception, so that results are saved."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
