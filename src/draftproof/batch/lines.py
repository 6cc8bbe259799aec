"""Lines of an OpenAI batch file: read and answered as the server reads and answers the bodies of its requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from typing_extensions import override

from draftproof.batch.rows import RowForm, RowOptions, RowRequest, Values, row_seed
from draftproof.batch.source import Row
from draftproof.engine.loop import DecodingLoop
from draftproof.engine.request import Request
from draftproof.provenance import digest
from draftproof.server.api.answer import Answer, Endpoint, Form, TokenText
from draftproof.server.api.chat import CHAT
from draftproof.server.api.completions import COMPLETIONS
from draftproof.server.api.responses import RESPONSES
from draftproof.server.errors import ApiError
from draftproof.server.parse_request import RequestParser, refuse_other_model, refuse_stream_options, validated
from draftproof.server.schemas import Body
from draftproof.server.settings import Settings
from draftproof.server.worker import explained, pieces_of

_Body = TypeVar("_Body", bound=Body)
_ENDPOINTS: dict[str, Endpoint[Any]] = {each.path: each for each in (CHAT, COMPLETIONS, RESPONSES)}


class OpenAIRows(RowForm):
    """Rows with custom_id, method, url and body, answered in the shape of OpenAI's output files."""

    def __init__(self, engine: DecodingLoop, options: RowOptions) -> None:
        self._options = options
        settings = Settings(max_tokens_limit=options.max_tokens_limit, tool_format=options.tool_format)
        self._parser = RequestParser(engine, settings, str, threading.RLock())
        self._token_text = TokenText(engine.tokenizer)

    @override
    def ask(self, row: Row) -> RowRequest:
        method, url = row.values.get("method"), row.values.get("url")
        if method != "POST":
            raise ApiError(f"method: expected POST, got {str(method)[:20]!r}", param="method")
        if url not in _ENDPOINTS:
            raise ApiError(f"url: expected {' or '.join(_ENDPOINTS)}, got {str(url)[:100]!r}", status=404, param="url")
        endpoint = _ENDPOINTS[str(url)]
        given = _body(endpoint.body, row.values.get("body"))
        with endpoint.own_names():
            body = endpoint.asked(given)
        refuse_other_model(body.model, self._options.model)
        if body.stream:
            raise ApiError("stream is true: lines of a batch are answered whole, so leave it out", param="stream")
        refuse_stream_options(body)
        with endpoint.own_names():
            parsed = self._parser.parse(body)
        if body.seed is None and self._options.seed is not None:
            seed = row_seed(self._options.seed, row.id)
            parsed = replace(parsed, params=replace(parsed.params, seed=seed))
        answer = Answer.to(
            body,
            parsed,
            name=f"{endpoint.prefix}{self._name(row)}",
            model=self._options.model,
            token_text=self._token_text,
        )
        return RowRequest(
            [list(each) for each in parsed.prompts],
            parsed.params,
            list(parsed.prediction) or None,
            body.speculation,
            parsed.constraint,
            parsed.reasoning,
            more=(answer, endpoint.form(given)),
        )

    @override
    def answer(self, row: Row, asked: RowRequest, requests: Sequence[Request]) -> tuple[list[Values], bool]:
        """One row, whose choices are the continuations."""
        error = next((each.error for each in requests if each.error is not None), None)
        if error is not None:
            return [self.refused(row, error)], True
        assert isinstance(asked.more, tuple), "made by ask"
        answer: Answer = asked.more[0]
        form: Form = asked.more[1]
        for index, request in enumerate(requests):
            for piece in pieces_of(request, index):
                answer.add(piece)
        return [self._row(row, 200, form.whole(answer).model_dump(mode="json"))], False

    @override
    def refused(self, row: Row, error: BaseException) -> Values:
        told = error if isinstance(error, ApiError) else explained(error, str)
        return self._row(row, told.status, told.body())

    def _row(self, row: Row, status: int, body: Mapping[str, Any]) -> Values:
        name = self._name(row)
        response = {"status_code": status, "request_id": f"req_{name}", "body": body}
        return {"id": f"batch_req_{name}", "custom_id": row.id, "response": response, "error": None}

    def _name(self, row: Row) -> str:
        """The same for a row whenever and wherever it is answered."""
        return digest(str(row.id), self._options.seed)[:24]


def _body(kind: type[_Body], given: Any) -> _Body:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise ApiError("the body is not JSON", param="body") from None
    if not isinstance(given, Mapping):
        raise ApiError("expected a JSON object as body", param="body")
    return validated(kind, dict(given))
