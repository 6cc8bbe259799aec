"""Rows answered by one engine's continuous batch: as many run together as it takes, and each ends when it ends."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass

from draftproof.batch.rows import PromptRows, RowForm, RowOptions, RowRequest, Values
from draftproof.batch.source import Row
from draftproof.engine.loop import DecodingLoop
from draftproof.engine.request import Request
from draftproof.errors import is_panic
from draftproof.server.settings import require


@dataclass(frozen=True)
class Result:
    """The answer to a row: rows of the output, one, or one for each continuation, and whether one has an error."""

    id: str | int
    rows: Sequence[Values]
    failed: bool
    prompt_tokens: int = 0
    completion_tokens: int = 0
    target_calls: int = 0


@dataclass(frozen=True)
class _Open:
    """A row that is being answered."""

    row: Row
    asked: RowRequest
    requests: Sequence[Request]

    @property
    def finished(self) -> bool:
        return all(request.finished for request in self.requests)


class Answerer:
    """Answers rows with one engine, which nobody else should use meanwhile."""

    def __init__(self, engine: DecodingLoop, options: RowOptions) -> None:
        self._engine = engine
        if options.chat_template is not None:
            engine.prompts.use_template(options.chat_template)
        self._form = _form(engine, options)

    def __call__(self, rows: Iterable[Row]) -> Generator[list[Result], None, None]:
        """The results of each round, in the order in which rows end; mostly an empty list.

        An error that is no single row's passes through.
        """
        left, running = iter(rows), list[_Open]()
        try:
            while True:
                refused = self._fill(running, left)
                if running:
                    self._engine.step()
                elif not refused:
                    return
                done = [each for each in running if each.finished]
                running = [each for each in running if not each.finished]
                yield [*refused, *map(self._end, done)]
        finally:
            for each in running:
                self._abort(each.requests)

    def _fill(self, running: list[_Open], left: Iterator[Row]) -> list[Result]:
        """Begin rows until so many wait that a free place is taken at once; return the results of refused ones."""
        most, refused = 2 * self._engine.max_batch, list[Result]()
        while len(refused) < most and sum(len(each.requests) for each in running) < most:
            row = next(left, None)
            if row is None:
                break
            found = self._begin(row)
            if isinstance(found, Result):
                refused.append(found)
            else:
                running.append(found)
        return refused

    def _begin(self, row: Row) -> _Open | Result:
        requests: list[Request] = []
        try:
            asked = self._form.ask(row)
            for prompt in asked.prompts:
                requests += self._engine.add(
                    prompt,
                    asked.params,
                    prediction=asked.prediction,
                    offline=True,
                    speculates=asked.speculates,
                    constraint=asked.constraint,
                    reasoning=asked.reasoning,
                )
        except BaseException as error:  # whatever it is, it is this row's
            self._abort(requests)
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            return Result(row.id, [self._form.refused(row, error)], failed=True)
        return _Open(row, asked, requests)

    def _end(self, each: _Open) -> Result:
        rows, failed = self._form.answer(each.row, each.asked, each.requests)
        return Result(
            each.row.id,
            rows,
            failed,
            prompt_tokens=sum(request.prompt_length for request in each.requests if request.index == 0),
            completion_tokens=sum(request.stats.num_tokens for request in each.requests),
            target_calls=sum(request.stats.num_target_calls for request in each.requests),
        )

    def _abort(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._engine.abort(request)


def _form(engine: DecodingLoop, options: RowOptions) -> RowForm:
    if not options.lines:
        return PromptRows(engine, options)
    require_server()
    from draftproof.batch.lines import OpenAIRows

    return OpenAIRows(engine, options)


def require_server() -> None:
    """Refuse lines of an OpenAI batch file where the server's packages are missing."""
    require("an OpenAI batch file", "fastapi", "prometheus_client")
