"""Errors in the formats of OpenAI's and Anthropic's APIs, without paths, tracebacks or prompts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

_LONGEST = 400  # characters of a message
_QUOTED = 100  # characters of what a client sent, where a message has to repeat it
_WORD = re.compile(rf"(\S{{{_QUOTED}}})\S+")  # parsers of grammars quote them


def quoted(text: object) -> str:
    """A client's value for a message: in quotes, and shortened if it is long."""
    shown = repr(text)
    return shown if len(shown) <= _QUOTED else f"{shown[: _QUOTED - 4]}...{shown[-1]}"


class ApiError(Exception):
    """An error response.

    The middle of a long message is left out, whatever has made it, and the end of a long word. `param` names the field
    of the request that is to blame, `code` is a word for programs.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message = _WORD.sub(r"\1...", message)
        if len(message) > _LONGEST:
            message = f"{message[: _LONGEST // 2]} ... {message[-_LONGEST // 2 + 5 :]}"
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def rename(self, param: str) -> None:
        """Give the field that is to blame another name, also where the message begins with it."""
        if self.param is not None and re.match(rf"{re.escape(self.param)}\b", self.message):
            self.message = param + self.message[len(self.param) :]
        self.param = param

    @property
    def kind(self) -> str:
        """OpenAI's `type`."""
        return _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


_KINDS = {401: "authentication_error", 429: "rate_limit_error"}
_MESSAGES = "/v1/messages"
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_anthropic(path: str) -> bool:
    """Whether clients of a path expect Anthropic's error format."""
    return path == _MESSAGES or path.startswith(f"{_MESSAGES}/")


def anthropic_body(error: ApiError) -> dict[str, Any]:
    """The JSON of an error in Anthropic's format."""
    kind = _ANTHROPIC_KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    # By these words clients find out that they have to shorten a chat.
    message = f"prompt is too long: {error.message}" if error.code == "context_length_exceeded" else error.message
    return {"type": "error", "error": {"type": kind, "message": message}}


def error_answer(error: ApiError, scope: Mapping[str, Any]) -> JSONResponse:
    """The error response in the format of the request's API; `scope` has the request's id."""
    body = error.body()
    if is_anthropic(scope["path"]):
        body = {**anthropic_body(error), "request_id": scope["state"]["facts"]["request_id"]}
    return JSONResponse(body, error.status, error.headers)


def of_http(error: HTTPException) -> ApiError:
    """The ApiError for an HTTPException of starlette."""
    return ApiError(str(error.detail), status=error.status_code, headers=error.headers)


def unserved(error: HTTPException, scope: Mapping[str, Any]) -> ApiError:
    """The ApiError for a path or a method that no route has."""
    what = f"{scope['method']} {quoted(scope['path'])}"
    message = f"{what} is not served: /openapi.json lists the paths and methods that are"
    if scope["path"] in ("/chat/completions", "/completions", "/responses", "/models"):
        message += " (do: end the client's base URL with /v1)"
    return ApiError(message, status=error.status_code, headers=error.headers)


def overloaded(seconds: int) -> ApiError:
    """The queue is full."""
    return ApiError(
        f"the queue is full: try again in {seconds} s",
        status=429,
        code="rate_limit_exceeded",
        headers={"Retry-After": str(seconds)},
    )


def crowded() -> ApiError:
    """The largest number of connections is reached."""
    return ApiError(
        "there are too many connections: try again",
        status=503,
        code="too_many_connections",
        headers={"Retry-After": "1", "Connection": "close"},
    )


def stuck(seconds: float) -> ApiError:
    """The engine's thread is stuck."""
    return ApiError(f"the engine has been in one round for {seconds:.0f} s", status=503, code="stuck")


def too_late(seconds: float) -> ApiError:
    """The request's time is over; clients are told not to retry, since it would take as long again."""
    return ApiError(
        f"the answer was not finished within {seconds:g} s, the longest time of a request here: ask for fewer tokens",
        status=504,
        code="timeout",
        headers={"x-should-retry": "false"},
    )


def endless_template(seconds: float, what: str, param: str) -> ApiError:
    """The model's chat template did not end."""
    return ApiError(
        f"the model's chat template did not end within {seconds:g} s for {what}",
        status=504,
        param=param,
        code="timeout",
        headers={"x-should-retry": "false"},
    )


def stopping() -> ApiError:
    """The server is stopping, or its engine has stopped."""
    return ApiError("the server is shutting down", status=503, code="unavailable", headers={"Retry-After": "5"})


def failed() -> ApiError:
    """An internal error; the log has its cause, under the request's id."""
    return ApiError("the request failed inside the server: its log says why, under this request's id", status=500)
