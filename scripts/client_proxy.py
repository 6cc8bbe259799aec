"""A proxy between a client and a server that keeps what was said, and lets a model call a tool that would not."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

_SECONDS = 600.0  # of one request
_COUNT = "/count_tokens"


@dataclass(frozen=True)
class Tool:
    """A tool of a client that only reads.

    Attributes:
        name: as the client calls it.
        arguments: of the call; the model can write no others.
    """

    name: str
    arguments: dict[str, Any]

    @property
    def schema(self) -> dict[str, Any]:
        """Arguments that are legal."""
        fixed = {name: {"enum": [value]} for name, value in self.arguments.items()}
        return {"type": "object", "properties": fixed, "required": [*fixed], "additionalProperties": False}


@dataclass
class Exchange:
    """A request for an answer, and what the server said.

    Attributes:
        path: that was asked.
        stream: whether a stream was asked for.
        tools: names of the tools in the request.
        results: texts of the tools' results in it.
        forced: whether the proxy made the model call a tool.
        status: of the answer; 0 where none came.
        pieces: of the answer's text.
        prompt_tokens: of the request, by the server's count.
        refusal: the answer, where it is an error.
    """

    path: str
    stream: bool
    tools: list[str]
    results: list[str]
    forced: bool = False
    status: int = 0
    pieces: list[str] = field(default_factory=list)
    prompt_tokens: int | None = None
    refusal: str = ""

    @property
    def text(self) -> str:
        """The answer's text, with single blanks."""
        return " ".join("".join(self.pieces).split())


@dataclass(frozen=True)
class _Api:
    """How one of the APIs says what matters here.

    Attributes:
        schema: the name of a tool's schema.
        function: where name and schema stand in a tool.
        choice: of one tool, by its name.
        no_choice: of no tool.
        results: contents of tools' results in a request.
        piece: the text in an event of a stream.
        usage: the counts in an event, or in an answer that is not streamed.
        text: of an answer that is not streamed.
    """

    schema: str
    function: Callable[[dict[str, Any]], dict[str, Any]]
    choice: Callable[[str], dict[str, Any]]
    no_choice: Any
    results: Callable[[dict[str, Any]], list[Any]]
    piece: Callable[[dict[str, Any]], str]
    usage: Callable[[dict[str, Any]], dict[str, Any]]
    text: Callable[[dict[str, Any]], str]


def _chat_piece(event: dict[str, Any]) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))


def _messages_usage(event: dict[str, Any]) -> dict[str, Any]:
    used: dict[str, Any] = event.get("message", event).get("usage") or {}
    if "input_tokens" not in used:
        return {}
    return {"prompt_tokens": used["input_tokens"] + used.get("cache_read_input_tokens", 0)}


def _responses_usage(event: dict[str, Any]) -> dict[str, Any]:
    used: dict[str, Any] = event.get("response", event).get("usage") or {}
    return {"prompt_tokens": used["input_tokens"]} if used else {}


def _blocks(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for message in body["messages"]:
        if isinstance(message["content"], list):
            yield from message["content"]


_APIS = {
    "/v1/chat/completions": _Api(
        "parameters",
        lambda tool: tool["function"],
        lambda name: {"type": "function", "function": {"name": name}},
        "none",
        lambda body: [each["content"] for each in body["messages"] if each["role"] == "tool"],
        _chat_piece,
        lambda event: event.get("usage") or {},
        lambda answer: answer["choices"][0]["message"]["content"] or "",
    ),
    "/v1/responses": _Api(
        "parameters",
        lambda tool: tool,
        lambda name: {"type": "function", "name": name},
        "none",
        lambda body: [
            each["output"]
            for each in body["input"]
            if isinstance(each, dict) and each.get("type") == "function_call_output"
        ],
        lambda event: event["delta"] if event.get("type") == "response.output_text.delta" else "",
        _responses_usage,
        lambda answer: "".join(
            part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"]
        ),
    ),
    "/v1/messages": _Api(
        "input_schema",
        lambda tool: tool,
        lambda name: {"type": "tool", "name": name, "disable_parallel_tool_use": True},
        {"type": "none"},
        lambda body: [each["content"] for each in _blocks(body) if each["type"] == "tool_result"],
        lambda event: event.get("delta", {}).get("text", "") if event.get("type") == "content_block_delta" else "",
        _messages_usage,
        lambda answer: "".join(block.get("text", "") for block in answer["content"]),
    ),
}


class Proxy:
    """Passes requests on to a server, at a port of its own.

    Args:
        server: the server's address.

    Attributes:
        url: its own address, when it runs.
        tool: that the model calls in each conversation with tools; None lets it choose.
        exchanges: requests for answers since it was last emptied.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self.url = ""
        self.tool: Tool | None = None
        self.exchanges: list[Exchange] = []

    @contextmanager
    def running(self) -> Iterator[Proxy]:
        """Serve in a thread."""
        app = Starlette(routes=[Route("/{path:path}", self._passed_on, methods=["GET", "POST", "HEAD"])])
        speaks = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", timeout_graceful_shutdown=2))
        thread = threading.Thread(target=speaks.run, daemon=True)
        thread.start()
        while not speaks.started:
            if not thread.is_alive():
                raise SystemExit("the proxy did not start")
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{speaks.servers[0].sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            speaks.should_exit = True
            thread.join()

    async def _passed_on(self, request: Request) -> Response:
        content = await request.body()
        api = _APIS.get(request.url.path.removesuffix(_COUNT)) if request.method == "POST" else None
        exchange = None
        if api is not None:
            made, content = self._changed(api, request.url.path, json.loads(content))
            if not request.url.path.endswith(_COUNT):  # its tokens are counted after the change, as the request's are
                exchange = made
                self.exchanges.append(exchange)
        left_out = ("host", "content-length", "connection", "accept-encoding")
        headers = {name: value for name, value in request.headers.items() if name not in left_out}
        client = httpx.AsyncClient(timeout=_SECONDS)
        asked = client.build_request(
            request.method,
            self._server + request.url.path,
            params=request.query_params,
            headers=headers | {"accept-encoding": "identity"},
            content=content,
        )
        answer = await client.send(asked, stream=True)
        if exchange is not None:
            exchange.status = answer.status_code

        async def said() -> AsyncIterator[bytes]:
            whole = b""
            try:
                async for part in answer.aiter_raw():
                    whole += part
                    yield part
            finally:
                if api is not None and exchange is not None:
                    _keep(api, exchange, whole)
                await answer.aclose()
                await client.aclose()

        kept = {name: value for name, value in answer.headers.items() if name not in ("connection", "date")}
        return StreamingResponse(said(), answer.status_code, kept)

    def _changed(self, api: _Api, path: str, body: dict[str, Any]) -> tuple[Exchange, bytes]:
        """What a client asks, and the request that the server gets."""
        functions = [api.function(tool) for tool in body.get("tools") or () if tool.get("type") != "namespace"]
        results = [each if isinstance(each, str) else json.dumps(each) for each in api.results(body)]
        names = [each["name"] for each in functions if "name" in each]
        exchange = Exchange(path, bool(body.get("stream")), names, results)
        if self.tool is None or not names:
            return exchange, json.dumps(body).encode()
        if results:
            body["tool_choice"] = api.no_choice
        elif self.tool.name in names:
            exchange.forced = True
            body["tool_choice"] = api.choice(self.tool.name)
            functions[names.index(self.tool.name)][api.schema] = self.tool.schema
        return exchange, json.dumps(body).encode()


def _keep(api: _Api, exchange: Exchange, whole: bytes) -> None:
    """Write what the server said into an exchange."""
    text = whole.decode(errors="replace")
    if exchange.status != 200:
        exchange.refusal = text
    elif exchange.stream:
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
        for event in map(json.loads, lines):
            if piece := api.piece(event):
                exchange.pieces.append(piece)
            exchange.prompt_tokens = api.usage(event).get("prompt_tokens", exchange.prompt_tokens)
            if event.get("error"):
                exchange.refusal = json.dumps(event)
    elif text:
        answer = json.loads(text)
        exchange.pieces.append(api.text(answer))
        exchange.prompt_tokens = api.usage(answer).get("prompt_tokens")
