"""The server application: its routes and their handlers."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import anyio
from anyio.to_thread import run_sync
from fastapi import Depends, FastAPI, Request
from fastapi.sse import EventSourceResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, Response
from starlette.types import Send

from draftproof._version import __version__
from draftproof.backends.base import info
from draftproof.engine.loop import DecodingLoop
from draftproof.errors import LEAVING, UserError
from draftproof.peak import ReleaseTimes, release_freed_memory, resident
from draftproof.server import schemas
from draftproof.server.api.answer import Answer, Endpoint, Form, TokenText
from draftproof.server.api.chat import CHAT
from draftproof.server.api.completions import COMPLETIONS
from draftproof.server.api.messages import MESSAGES, MessagesAnswer, MessagesError, TokenCount
from draftproof.server.api.messages_request import CountBody, MessagesBody, chat_to_count
from draftproof.server.api.responses import RESPONSES
from draftproof.server.api.responses_schemas import ResponsesAnswer, ResponsesBody
from draftproof.server.auth import Access, ApiKeys, note
from draftproof.server.background import BackgroundCalls
from draftproof.server.body import body_of
from draftproof.server.dialects.detection import format_of
from draftproof.server.errors import ApiError, error_answer, failed, of_http, stopping, stuck, too_late, unserved
from draftproof.server.metrics import Metrics
from draftproof.server.parse_request import ParsedRequest, RequestParser, refuse_other_model, refuse_stream_options
from draftproof.server.schemas import ChatBody, CompletionBody, DetokenizeBody, SamplingFields, TokenizeBody
from draftproof.server.settings import Settings, read_text, served_name
from draftproof.server.tools import template_tools
from draftproof.server.worker import EngineWorker, Job, Piece

_log = logging.getLogger(__name__)
_Made = TypeVar("_Made")
_Body = TypeVar("_Body", bound=schemas.Body)
_Tokenized = TypeVar("_Tokenized", CountBody, TokenizeBody, DetokenizeBody)


class Server:
    """A server with exclusive use of one engine; names in `hidden` are not shown to clients."""

    def __init__(self, engine: DecodingLoop, settings: Settings, model: str, hidden: Sequence[str] = ()) -> None:
        self.engine = engine
        self.settings = settings
        self.model = model
        # a name without a place in a file system is no secret, and may be part of other words
        self._hidden = [name for name in hidden if name != model and {*name} & {"/", "\\", ":"}]
        self.metrics = Metrics(model)
        self.worker = EngineWorker(
            engine,
            self.metrics,
            max_waiting=settings.max_waiting,
            max_per_client=settings.max_per_key,
            stuck_after=settings.stuck_timeout,
            redact=self.redact,
        )
        self._reading_calls = BackgroundCalls(_READ_AT_ONCE, "reading")
        self._reading = threading.RLock()  # tokenizers are not made for several threads
        self._parser = RequestParser(engine, settings, self.redact, self._reading)
        self._compiling = BackgroundCalls(_COMPILE_AT_ONCE, "compiling")
        self._making = anyio.CapacityLimiter(1)  # answers that hold log-probabilities of prompts
        self.token_text = TokenText(engine.tokenizer)
        self.created = int(time.time())

    @classmethod
    def named(cls, engine: DecodingLoop, settings: Settings, target: str, draft: str | None) -> Server:
        """The server of models that were loaded by these names; applies the chat template of the settings."""
        if settings.chat_template is not None:
            engine.prompts.use_template(read_text(settings.chat_template, "the chat template"))
        return cls(engine, settings, served_name(target, settings.served_model_name), hidden=[target, draft or target])

    def redact(self, message: str) -> str:
        """The message with hidden names replaced by the model's public name."""
        for name in self._hidden:
            message = message.replace(name, self.model)
        return message

    @property
    def context(self) -> int | None:
        """The model's context in tokens."""
        return self.engine.target.max_positions

    def card(self) -> schemas.ModelCard:
        """The public description of the model."""
        why = self.engine.rounding
        return schemas.ModelCard(
            id=self.model,
            created=self.created,
            max_model_len=self.context,
            max_output_tokens=self.settings.max_tokens_limit,
            reasoning=self.settings.reasoning == "auto" and self.engine.prompts.markers is not None,
            weight_bits=None if (facts := info(self.engine.target)) is None else facts.bits,
            same_bits=not why,
            rounding=self.redact(why),
        )

    @property
    def busy(self) -> bool:
        """Whether any thread is running, even one that never ends."""
        return self.worker.running or bool(self._reading_calls.busy or self._compiling.busy)

    async def body(self, request: Request, kind: type[_Body], *, lenient: bool = False) -> _Body:
        """The parsed body of a request; `lenient` drops unknown fields, whatever the settings say."""
        ignored = lenient or self.settings.unknown_fields == "ignore"
        return await body_of(request, kind, self.settings.max_body, lenient=ignored)

    async def tokenized(
        self, request: Request, kind: type[_Tokenized], call: Callable[[_Tokenized], _Made], *, lenient: bool = False
    ) -> _Made:
        """Answer a request that only needs the tokenizer, in another thread."""
        body = await self.body(request, kind, lenient=lenient)
        refuse_other_model(body.model, self.model)
        return await self._in_time(request, partial(self._reading_calls.run, partial(call, body)))

    async def parse(self, request: Request, body: SamplingFields) -> ParsedRequest:
        """Parse a request in another thread."""
        formed = body.response_format or body.structured_outputs or (isinstance(body, ChatBody) and body.tools)
        threads = self._compiling if formed else self._reading_calls  # compiling takes long: others keep their threads
        return await self._in_time(request, partial(threads.run, partial(self._parser.parse, body)))

    async def _in_time(self, request: Request, call: Callable[[], Awaitable[_Made]]) -> _Made:
        """Await a call; raises ApiError if the client disconnects or the request's time is over."""
        with anyio.move_on_after(self.settings.request_timeout or None):
            return await _until_disconnect(request, call)
        raise too_late(self.settings.request_timeout)

    def _sharing(self, request: Request, body: SamplingFields) -> tuple[str, str, bool]:
        """The client's identity, the cache salt of its request, and whether other requests may draft from it."""
        key, own = request.scope["state"].get("key") or "", body.cache_salt or ""
        if self.settings.share_between_clients:
            return key, own, True
        return key, f"{key}:{own}", bool(key or own)

    def encode(self, body: TokenizeBody) -> list[int]:
        """The token ids of a request to /tokenize."""
        if (body.prompt is None) == (body.messages is None):
            raise ApiError("give either prompt or messages", param="prompt")
        if body.messages is not None:
            shown = template_tools([each.function for each in body.tools or ()])
            if shown:
                format_of(self.engine.tokenizer, self.settings.tool_format)
            if body.add_special_tokens and "add_special_tokens" in body.model_fields_set:
                raise ApiError("add_special_tokens needs prompt: a chat has those of its template", param="messages")
            return list(self._parser.chat_prompt(body.messages, shown))
        if body.tools:
            raise ApiError("tools need messages", param="tools")
        text = body.prompt or ""
        if not body.add_special_tokens:
            return list(self._parser.plain(text, "prompt"))
        return list(self._parser.encode(text, "prompt")[1])

    def tokens(self, body: TokenizeBody) -> schemas.Tokens:
        """The answer to a request to /tokenize."""
        ids = self.encode(body)
        with self._reading:
            texts = [self.token_text(each) for each in ids] if body.return_token_strs else None
        return schemas.Tokens(count=len(ids), max_model_len=self.context, tokens=ids, token_strs=texts)

    def count(self, body: CountBody) -> TokenCount:
        """The answer to a request to /v1/messages/count_tokens."""
        return TokenCount(input_tokens=self._parser.size(chat_to_count(body)))

    def text(self, body: DetokenizeBody) -> schemas.Text:
        """The answer to a request to /detokenize."""
        size, most = self.engine.target.vocab_size, self.context or _MOST_IDS
        if len(body.tokens) > most:
            raise ApiError(
                f"tokens: expected at most {most} ids, got {len(body.tokens)}",
                param="tokens",
                code="context_length_exceeded" if self.context else None,
            )
        bad = next((each for each in body.tokens if not 0 <= each < size), None)
        if bad is not None:
            raise ApiError(f"tokens: expected ids from 0 to {size - 1}, got {bad}", param="tokens")
        with self._reading:
            return schemas.Text(prompt=self.token_text.joined(body.tokens))

    async def answer(self, request: Request, endpoint: Endpoint[Any]) -> Any:
        """Answer a request to an endpoint, as one response or as a stream."""
        job, answer, form = await self._make_job(request, endpoint)
        self.worker.submit(job)
        if not job.streams:
            return await self._full_response(request, job, answer, form)
        pieces = job.pieces()
        try:
            first = await _until_disconnect(request, partial(anext, pieces))  # an early error has its own status
        except BaseException:
            self.worker.close(job)
            raise

        def ended() -> None:
            self.worker.close(job)
            _note_usage(request, answer)

        return Stream(_events(answer, form, first, pieces), ended, seconds=self.settings.write_timeout)

    async def _make_job(self, request: Request, endpoint: Endpoint[Any]) -> tuple[Job, Answer, Form]:
        """The job for the engine and the empty answer of a request; nothing else of its body is kept."""
        arrival = time.monotonic()
        given = await self.body(request, endpoint.body, lenient=endpoint.lenient)
        with endpoint.own_names():
            body, form = endpoint.asked(given), endpoint.form(given)
        del given
        if endpoint.lenient and self.settings.reasoning == "none":
            body.thinking_token_budget = None  # these clients send a limit whatever the model is
        refuse_other_model(body.model, self.model)
        refuse_stream_options(body)
        client, salt, share_text = self._sharing(request, body)
        self.worker.refuse_without_room(client=client)  # before the work of reading a long prompt
        with endpoint.own_names():
            parsed = await self.parse(request, body)
        job = Job(
            parsed,
            self.settings.request_timeout or math.inf,
            streams=body.stream,
            speculates=body.speculation,
            client=client,
            cache_salt=salt,
            share_text=share_text,
            arrival=arrival,
        )
        if job.size > self.worker.capacity:
            raise ApiError(
                f"expected at most {self.worker.capacity} continuations in one request, got {job.size}", param="n"
            )
        full = f"{endpoint.prefix}{request.scope['state']['facts']['request_id']}"
        asked = replace(parsed, constraint=None)  # which the job has, until the engine has it
        answer = Answer.to(body, asked, name=full, model=self.model, token_text=self.token_text)
        return job, answer, form

    async def _full_response(self, request: Request, job: Job, answer: Answer, form: Form) -> Response:
        async def collect() -> None:
            async for pieces in job.pieces():
                for piece in pieces:
                    answer.add(piece)

        def made() -> Response:
            return Response(form.whole(answer).model_dump_json(), media_type="application/json")

        try:
            await _until_disconnect(request, collect)
        finally:
            self.worker.close(job)
        _note_usage(request, answer)
        # Log-probabilities of a long prompt take long and much memory: streams go on meanwhile, and others wait.
        limiter = None if answer.parsed.params.prompt_logprobs is None else self._making
        return await run_sync(made, limiter=limiter)


async def _events(
    answer: Answer, form: Form, first: list[Piece], rest: AsyncIterator[list[Piece]]
) -> AsyncIterator[bytes]:
    """The events of a stream, in the order of the pieces."""

    def taken(pieces: list[Piece]) -> bytes:
        return b"".join(form.piece(answer, piece, answer.add(piece)) for piece in pieces)

    try:
        yield form.opening(answer) + taken(first)
        async for pieces in rest:
            yield taken(pieces)
        yield form.closing(answer)
    except ApiError as error:
        yield form.failure(answer, error)


class Stream(EventSourceResponse):
    """A stream that is closed if its client reads nothing for some seconds."""

    def __init__(self, events: AsyncIterator[bytes], ended: Callable[[], None], *, seconds: float) -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._ended = ended
        self._seconds = seconds

    async def stream_response(self, send: Send) -> None:
        """Send the events; `ended` is called in any case."""
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


async def _until_disconnect(request: Request, call: Callable[[], Awaitable[_Made]]) -> _Made:
    """Await a call; raises ApiError if the client disconnects first."""
    made: list[_Made] = []
    errors: list[BaseException] = []
    async with anyio.create_task_group() as group:

        async def work() -> None:
            try:
                made.append(await call())
            except (*LEAVING, asyncio.CancelledError):
                raise
            except BaseException as error:  # noqa: BLE001 - raised below, outside the group
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

_STATUSES = (400, 401, 404, 413, 421, 429, 500, 503, 504)
Statuses = dict[int | str, dict[str, Any]]  # descriptions of answers by status
_ERRORS: Statuses = {status: {"model": schemas.ErrorAnswer} for status in _STATUSES}
_MESSAGES_ERRORS: Statuses = {status: {"model": MessagesError} for status in _STATUSES}


def server_of(app: Any) -> Server:
    """The server that an application was made for."""
    found = app.state.server
    assert isinstance(found, Server), "set by make_app"
    return found


def _server(request: Request) -> Server:
    return server_of(request.app)


_BODIES_AT_ONCE = 64  # requests beyond those that the engine takes whose bodies are read, such as for /tokenize
_MOST_IDS = 131_072  # that are decoded at once, where the model's context has no end
_COMPILE_AT_ONCE = 64  # requests with a grammar that are read; most of them wait for a process that compiles it
_READ_AT_ONCE = 32  # others
_RELEASE_EVERY = 5.0  # seconds between two looks at the memory
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
_Served = Annotated[Server, Depends(_server)]


async def _release_memory() -> None:
    """Return freed memory to the system while the server runs.

    Grammars are compiled in threads of their own and leave large free blocks in their parts of the heap, which the C
    library would keep: after hundreds of heavy grammars 400 MB.
    """
    looks = ReleaseTimes()
    while True:
        await asyncio.sleep(_RELEASE_EVERY)
        before = resident() or 0
        if looks.due(before):
            await run_sync(release_freed_memory)
            looks.released(before, resident() or 0)


def make_app(server: Server, keys: Sequence[str] | ApiKeys = (), hosts: Sequence[str] | None = None) -> FastAPI:
    """The application of a server; without keys all clients are admitted. `hosts` are those of `allowed_hosts`."""

    @asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        server.worker.start()
        trimming = asyncio.create_task(_release_memory())
        try:
            yield
        finally:
            trimming.cancel()
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
    described = app.openapi
    app.openapi = lambda: _with_bodies(described())  # type: ignore[method-assign]  # as FastAPI's manual has it
    settings = server.settings
    app.add_middleware(
        Access,
        keys=ApiKeys.of(keys),
        max_body=settings.max_body,
        at_once=server.worker.capacity + _BODIES_AT_ONCE,
        seconds=settings.read_timeout,
        hosts=hosts,
    )
    app.add_exception_handler(ApiError, _error_response)
    app.add_exception_handler(UserError, _mistake)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)
    _add_completions(app)
    _add_messages(app)
    _add_tokens(app)
    _add_state(app)
    _add_page(app)
    return app


_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
_STREAMED: Statuses = {
    200: {
        "description": "The answer; with stream its chunks as events",
        "content": {"text/event-stream": {"itemSchema": _EVENT}},
    }
}


_BODIES = (CompletionBody, ChatBody, MessagesBody, CountBody, ResponsesBody, TokenizeBody, DetokenizeBody)
_SCHEMAS = "#/components/schemas/"


def _takes(kind: type[schemas.Body]) -> dict[str, Any]:
    """The OpenAPI description of a body that a route reads itself, so that it is not kept while the route answers."""
    content = {"application/json": {"schema": {"$ref": f"{_SCHEMAS}{kind.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}}


def _answers(kind: type[schemas.Body], made: type[BaseModel], errors: Statuses | None = None) -> dict[str, Any]:
    """The description of a route that answers such a body with such an object, or with a stream."""
    return {"response_model": made, "responses": (errors or {}) | _STREAMED, "openapi_extra": _takes(kind)}


def _with_bodies(described: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI description, with the bodies that routes read themselves."""
    _, found = models_json_schema([(each, "validation") for each in _BODIES], ref_template=_SCHEMAS + "{model}")
    described["components"]["schemas"] |= found["$defs"]
    return described


def _add_completions(app: FastAPI) -> None:
    @app.post("/v1/completions", **_answers(CompletionBody, schemas.CompletionAnswer))
    async def completions(request: Request, server: _Served) -> Any:
        """Continue prompts."""
        return await server.answer(request, COMPLETIONS)

    @app.post("/v1/chat/completions", **_answers(ChatBody, schemas.ChatAnswer))
    async def chat(request: Request, server: _Served) -> Any:
        """Answer a chat."""
        return await server.answer(request, CHAT)

    @app.post("/v1/responses", **_answers(ResponsesBody, ResponsesAnswer))
    async def responses(request: Request, server: _Served) -> Any:
        """Answer a chat by OpenAI's Responses API; nothing is stored."""
        return await server.answer(request, RESPONSES)

    @app.get("/v1/models")
    async def models(server: _Served) -> schemas.ModelList:
        """List the served models."""
        return schemas.ModelList(data=[server.card()])

    @app.get("/v1/models/{name:path}")
    async def model(name: str, server: _Served) -> schemas.ModelCard:
        """Describe one model."""
        refuse_other_model(name, server.model)
        return server.card()


def _add_messages(app: FastAPI) -> None:
    @app.post("/v1/messages", **_answers(MessagesBody, MessagesAnswer, _MESSAGES_ERRORS))
    async def messages(request: Request, server: _Served) -> Any:
        """Answer a chat by Anthropic's Messages API."""
        return await server.answer(request, MESSAGES)

    @app.post("/v1/messages/count_tokens", responses=_MESSAGES_ERRORS, openapi_extra=_takes(CountBody))
    async def count_tokens(request: Request, server: _Served) -> TokenCount:
        """Count the tokens of a chat in Anthropic's format."""
        return await server.tokenized(request, CountBody, server.count, lenient=True)


def _add_tokens(app: FastAPI) -> None:
    @app.post("/tokenize", openapi_extra=_takes(TokenizeBody))
    async def tokenize(request: Request, server: _Served) -> schemas.Tokens:
        """Tokenize a text or a chat."""
        return await server.tokenized(request, TokenizeBody, server.tokens)

    @app.post("/detokenize", openapi_extra=_takes(DetokenizeBody))
    async def detokenize(request: Request, server: _Served) -> schemas.Text:
        """Turn token ids into text."""
        return await server.tokenized(request, DetokenizeBody, server.text)


def _add_page(app: FastAPI) -> None:
    page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")

    @app.get("/", include_in_schema=False)
    async def show() -> HTMLResponse:
        """The page for trying out the model."""
        return HTMLResponse(page, headers={"Content-Security-Policy": _POLICY})


def _add_state(app: FastAPI) -> None:
    @app.get("/health")
    async def health(server: _Served) -> dict[str, str]:
        """Whether the engine runs and its rounds end in time."""
        if server.worker.dead:
            raise stopping()
        if seconds := server.worker.stuck:
            raise stuck(seconds)
        return {"status": "ok"}

    @app.get("/ready")
    async def ready(server: _Served) -> dict[str, str]:
        """Whether a request would be accepted now."""
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


async def _error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError), "registered for it"
    return error_answer(error, request.scope)


async def _mistake(request: Request, error: Exception) -> Response:
    return await _error_response(request, ApiError(_server(request).redact(str(error))))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for it"
    made = unserved(error, request.scope) if error.status_code in (404, 405) else of_http(error)  # of the router
    return await _error_response(request, made)


async def _unexpected(request: Request, _: Exception) -> Response:
    return await _error_response(request, failed())
