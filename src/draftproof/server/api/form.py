"""What tells one API from another: the body of a request, what it asks of the engine, and how its answer is worded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from pydantic import BaseModel

from draftproof.server.api.answer import Answer, Parts
from draftproof.server.errors import ApiError
from draftproof.server.schemas import Body, SamplingFields
from draftproof.server.worker import Piece

_Body = TypeVar("_Body", bound=Body)


@runtime_checkable
class Form(Protocol):
    """How one answer is worded, whole or as the events of a stream. It keeps nothing large of the request's body."""

    def whole(self, answer: Answer) -> BaseModel:
        """The body of an answer that is not streamed."""
        ...

    def opening(self, answer: Answer) -> bytes:
        """The events before the first piece."""
        ...

    def piece(self, answer: Answer, piece: Piece, parts: Parts) -> bytes:
        """The events for a piece, whose parts have been added to the answer."""
        ...

    def closing(self, answer: Answer) -> bytes:
        """The events after the last piece."""
        ...

    def failure(self, answer: Answer, error: ApiError) -> bytes:
        """The events at the end of a stream that cannot go on."""
        ...


@dataclass(frozen=True)
class Endpoint(Generic[_Body]):
    """A path that requests for answers are sent to, with the kind of their body.

    Attributes:
        prefix: what the answer's id begins with.
        asked: what a body asks, in the words of OpenAI's endpoints.
        form: of the answer to a body.
        lenient: whether fields that are not known are left out, as the clients of this API expect.
    """

    path: str
    body: type[_Body]
    prefix: str
    asked: Callable[[_Body], SamplingFields]
    form: Callable[[_Body], Form]
    lenient: bool = False


def itself(body: Any) -> Any:
    """What a body asks where it is OpenAI's."""
    return body
