"""The application: its routes, and how each of them answers."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import anyio
from anyio.to_thread import run_sync
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.sse import EventSourceResponse, format_sse_event
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.types import Send

from draftproof._version import __version__
from draftproof.engine.loop import DecodingLoop
from draftproof.errors import UserError
from draftproof.server import schemas
from draftproof.server.access import Access, note
from draftproof.server.answers import END, Answer, ChatForm, CompletionForm, Form, TokenText, event
from draftproof.server.errors import ApiError, failed, stopping
from draftproof.server.metrics import Metrics
from draftproof.server.reading import Question, Reader, invalid_body, refuse_other_model, refuse_stream_options
from draftproof.server.schemas import ChatBody, CompletionBody, DetokenizeBody, SamplingFields, TokenizeBody
from draftproof.server.settings import Settings
from draftproof.server.tools import format_of, template_tools
from draftproof.server.worker import EngineWorker, Job

_log = logging.getLogger(__name__)
_Made = TypeVar("_Made")


class Server:
    """One engine and what answers for it.

    Args:
        engine: nobody else may use it from now on.
        settings: limits.
        model: its name in the API.
        hidden: names that no answer may show, such as the directory of the model.
    """

    def __init__(self, engine: DecodingLoop, settings: Settings, model: str, hidden: Sequence[str] = ()) -> None:
        self.engine, self.settings, self.model = engine, settings, model
        # a name without a place in a file system is no secret, and may be part of other words
        self._hidden = [name for name in hidden if name != model and {*name} & {"/", "\\", ":"}]
        self.metrics = Metrics(model)
        self.ended: Callable[[], None] = lambda: None  # what is done when the engine's thread has died
        self.worker = EngineWorker(
            engine, self.metrics, max_waiting=settings.max_waiting, shown=self.shown, died=self._died
        )
        self._reading = threading.RLock()  # tokenizers are not made for several threads
        self._reader = Reader(engine, settings, self.shown, self._reading)
        self._compiling = anyio.CapacityLimiter(_COMPILE_AT_ONCE)
        self.token_text = TokenText(engine.tokenizer)
        self.created = int(time.time())

    def _died(self) -> None:
        self.ended()

    def shown(self, message: str) -> str:
        """A message without the names that clients do not see."""
        for name in self._hidden:
            message = message.replace(name, self.model)
        return message

    @property
    def context(self) -> int | None:
        """The model's context in tokens."""
        return self.engine.target.max_positions

    def check_model(self, name: str | None) -> None:
        """Refuse the name of another model.

        Raises:
            ApiError: with status 404.
        """
        refuse_other_model(name, self.model)

    async def aside(self, call: Callable[[], _Made]) -> _Made:
        """Tokenize outside the event loop's thread."""

        def locked() -> _Made:
            with self._reading:
                return call()

        return await run_sync(locked)

    async def question(self, body: SamplingFields) -> Question:
        """What a request asks."""
        formed = body.response_format or body.structured_outputs or (isinstance(body, ChatBody) and body.tools)
        limiter = self._compiling if formed else None  # compiling takes long: others keep their threads
        return await run_sync(partial(self._reader.question, body), limiter=limiter)

    def encode(self, body: TokenizeBody) -> list[int]:
        """The token ids of a request to /tokenize."""
        if (body.prompt is None) == (body.messages is None):
            raise ApiError("give either prompt or messages", param="prompt")
        if body.messages is not None:
            shown = template_tools([each.function for each in body.tools or ()])
            if shown:
                format_of(self.engine.tokenizer, self.settings.tool_format)
            return list(self._reader.chat_prompt(body.messages, shown)[1])
        if body.tools is not None:
            raise ApiError("tools need messages", param="tools")
        text = body.prompt or ""
        if not body.add_special_tokens:
            return list(self._reader.plain(text, "prompt"))
        return list(self._reader.encode(text, "prompt")[1])

    def tokens(self, body: TokenizeBody) -> schemas.Tokens:
        """The answer to a request to /tokenize."""
        ids = self.encode(body)
        texts = [self.token_text(each) for each in ids] if body.return_token_strs else None
        return schemas.Tokens(count=len(ids), max_model_len=self.context, tokens=ids, token_strs=texts)

    async def answer(self, request: Request, body: SamplingFields, form: Form, kind: str) -> Any:
        """Answer a request for completions, whole or as a stream."""
        self.check_model(body.model)
        refuse_stream_options(body)
        self.worker.refuse_without_room()  # before the work of reading a long prompt
        question = await self.question(body)
        seconds = self.settings.request_timeout or float("inf")
        job = Job(
            question.prompts,
            question.params,
            seconds,
            question.prediction,
            body.stream,
            body.speculation,
            question.constraint,
        )
        if job.size > self.worker.capacity:
            raise ApiError(
                f"the request has {job.size} continuations: legal are up to {self.worker.capacity} here", param="n"
            )
        name = f"{kind}-{request.scope['state']['facts']['request_id']}"
        answer = Answer.to(body, question, name=name, model=self.model, token_text=self.token_text)
        self.worker.submit(job)
        if not body.stream:
            return await self._whole(request, job, answer, form)
        options = body.stream_options or schemas.StreamOptions()
        pieces = job.pieces()
        try:
            first = await _unless_gone(request, partial(anext, pieces))  # so that an early error has its own status
        except BaseException:
            self.worker.close(job)
            raise

        def ended() -> None:
            self.worker.close(job)
            _note_usage(request, answer)

        events = self._events(answer, form, options, first, pieces)
        return Stream(events, ended, seconds=self.settings.write_timeout)

    async def _whole(self, request: Request, job: Job, answer: Answer, form: Form) -> Response:
        async def collect() -> None:
            async for pieces in job.pieces():
                answer.add(pieces)

        def made() -> Response:
            return Response(form.whole(answer).model_dump_json(), media_type="application/json")

        try:
            await _unless_gone(request, collect)
        finally:
            self.worker.close(job)
        _note_usage(request, answer)
        return await run_sync(made)  # log-probabilities of a long prompt take long: streams go on meanwhile

    async def _events(
        self,
        answer: Answer,
        form: Form,
        options: schemas.StreamOptions,
        first: list[Any],
        rest: AsyncIterator[list[Any]],
    ) -> AsyncIterator[bytes]:
        """The events of a stream, in the order of the pieces."""

        def taken(pieces: list[Any]) -> bytes:
            made = []
            for piece in pieces:
                choice = form.chunk(answer, piece)
                answer.add([piece])
                usage = answer.usage if options.continuous_usage_stats else None
                made.append(event(answer, form, [choice], usage))
            return b"".join(made)

        try:
            yield b"".join(event(answer, form, [choice]) for choice in form.opening(answer)) + taken(first)
            async for pieces in rest:
                yield taken(pieces)
            if options.include_usage:
                yield event(answer, form, [], answer.usage)
            yield END
        except ApiError as error:
            yield format_sse_event(data_str=json.dumps(error.body()))


class Stream(EventSourceResponse):
    """A stream that is given up when its client reads nothing for some seconds."""

    def __init__(self, events: AsyncIterator[bytes], ended: Callable[[], None], *, seconds: float) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._ended, self._seconds = ended, seconds

    async def stream_response(self, send: Send) -> None:
        """Send the events; `ended` is called however this ends."""
        try:
            with anyio.fail_after(None) as limit:  # a scope for each chunk would cost more than the chunk

                async def limited(message: Any) -> None:
                    limit.deadline = anyio.current_time() + (self._seconds or math.inf)
                    await send(message)
                    limit.deadline = math.inf

                await super().stream_response(limited)
        except TimeoutError:
            _log.info("a client stopped reading its stream")
        finally:
            self._ended()


async def _unless_gone(request: Request, call: Callable[[], Awaitable[_Made]]) -> _Made:
    """What a call returns, unless the client leaves before.

    Raises:
        ApiError: it left.
    """
    made: list[_Made] = []
    errors: list[Exception] = []
    async with anyio.create_task_group() as group:

        async def work() -> None:
            try:
                made.append(await call())
            except Exception as error:  # noqa: BLE001 - raised below, outside the group
                errors.append(error)
            group.cancel_scope.cancel()

        group.start_soon(work)
        while (await request.receive())["type"] != "http.disconnect":
            pass
        group.cancel_scope.cancel()
    if errors:
        raise errors[0]
    if not made:
        raise ApiError("the client closed the connection", status=499)
    return made[0]


def _note_usage(request: Request, answer: Answer) -> None:
    usage = answer.usage
    reasons = sorted({each.finish_reason or "abort" for each in answer.continuations})
    note(
        request.scope,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        finish_reason=",".join(reasons),
    )


# --- routes ----------------------------------------------------------------------------------------------------------

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.ErrorAnswer} for status in (400, 401, 404, 413, 429, 500, 503, 504)
}


def _server(request: Request) -> Server:
    found = request.app.state.server
    assert isinstance(found, Server), "set by make_app"
    return found


_READ_AT_ONCE = 64  # requests beyond those that the engine takes whose bodies are read, such as for /tokenize
_COMPILE_AT_ONCE = 64  # requests with a grammar that are read; most of them wait for a process that compiles it
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
_Served = Annotated[Server, Depends(_server)]


def make_app(server: Server, keys: Sequence[str] = ()) -> FastAPI:
    """The application of a server.

    Args:
        server: what answers.
        keys: API keys; empty lets everybody in.
    """

    @asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        server.worker.start()
        try:
            yield
        finally:
            await run_sync(server.worker.stop)

    app = FastAPI(
        title="draftproof",
        version=__version__,
        lifespan=running,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},
        responses=_ERRORS,
    )
    app.state.server = server
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=server.settings.max_body)
    settings = server.settings
    app.add_middleware(
        Access,
        keys=keys,
        max_body=settings.max_body,
        at_once=server.worker.capacity + _READ_AT_ONCE,
        seconds=settings.read_timeout,
    )
    app.add_exception_handler(ApiError, _shown_error)
    app.add_exception_handler(UserError, _mistake)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    _add_completions(app)
    _add_tokens(app)
    _add_state(app)
    _add_page(app)
    return app


_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
_STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with stream its chunks as events",
        "content": {"text/event-stream": {"itemSchema": _EVENT}},
    }
}


def _add_completions(app: FastAPI) -> None:
    @app.post("/v1/completions", response_model=schemas.CompletionAnswer, responses=_STREAMED)
    async def completions(body: CompletionBody, request: Request, server: _Served) -> Any:
        """Continue prompts."""
        return await server.answer(request, body, CompletionForm(), "cmpl")

    @app.post("/v1/chat/completions", response_model=schemas.ChatAnswer, responses=_STREAMED)
    async def chat(body: ChatBody, request: Request, server: _Served) -> Any:
        """Answer a chat."""
        return await server.answer(request, body, ChatForm(), "chatcmpl")

    @app.get("/v1/models")
    async def models(server: _Served) -> schemas.ModelList:
        """The models that are served."""
        card = schemas.ModelCard(id=server.model, created=server.created, max_model_len=server.context)
        return schemas.ModelList(data=[card])

    @app.get("/v1/models/{name:path}")
    async def model(name: str, server: _Served) -> schemas.ModelCard:
        """One of them."""
        server.check_model(name)
        return schemas.ModelCard(id=server.model, created=server.created, max_model_len=server.context)


def _add_tokens(app: FastAPI) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody, server: _Served) -> schemas.Tokens:
        """The token ids of a text or a chat."""
        server.check_model(body.model)
        return await server.aside(partial(server.tokens, body))

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody, server: _Served) -> schemas.Text:
        """The text of token ids."""
        server.check_model(body.model)
        size = server.engine.target.vocab_size
        bad = next((each for each in body.tokens if not 0 <= each < size), None)
        if bad is not None:
            raise ApiError(f"tokens holds {bad}: legal ids are 0 to {size - 1}", param="tokens")
        return schemas.Text(prompt=await server.aside(partial(server.token_text.joined, body.tokens)))


def _add_page(app: FastAPI) -> None:
    page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")

    @app.get("/", include_in_schema=False)
    async def show() -> HTMLResponse:
        """A page for people."""
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY})


def _add_state(app: FastAPI) -> None:
    @app.get("/health")
    async def health(server: _Served) -> dict[str, str]:
        """Whether the engine runs."""
        if server.worker.dead:
            raise stopping()
        return {"status": "ok"}

    @app.get("/ready")
    async def ready(server: _Served) -> dict[str, str]:
        """Whether a request would be served now."""
        if not server.worker.ready:
            raise stopping()
        return {"status": "ready"}

    @app.get("/version")
    async def version() -> dict[str, str]:
        """The version of draftproof."""
        return {"version": __version__}

    @app.get("/metrics", response_class=Response)
    async def metrics(server: _Served) -> Response:
        """Prometheus metrics."""
        return Response(server.metrics.page(), media_type=CONTENT_TYPE_LATEST)


# --- errors ----------------------------------------------------------------------------------------------------------


async def _shown_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), "registered for it"
    return JSONResponse(error.body(), error.status, error.headers)


async def _mistake(request: Request, error: Exception) -> Response:
    return await _shown_error(request, ApiError(_server(request).shown(str(error))))


async def _invalid(request: Request, error: Exception) -> Response:
    """What is wrong with a body, without what the client sent."""
    assert isinstance(error, RequestValidationError), "registered for it"
    return await _shown_error(request, invalid_body(error.errors()))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for it"
    made = ApiError(str(error.detail), status=error.status_code, headers=error.headers)
    return await _shown_error(request, made)


async def _unexpected(request: Request, _: Exception) -> Response:
    return await _shown_error(request, failed())
