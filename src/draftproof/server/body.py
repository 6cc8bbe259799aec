"""The body of a request: read, checked, and not kept.

FastAPI would hold the bytes, the objects that they become and the checked body until the request is answered. Objects
can take twenty times as much memory as their JSON, and a request can wait for minutes.
"""

from __future__ import annotations

import json
from email.message import Message
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from draftproof.server.errors import ApiError, of_http, quoted
from draftproof.server.parse_request import validated
from draftproof.server.schemas import Body

_Read = TypeVar("_Read", bound=Body)


async def body_of(request: Request, kind: type[_Read], most: int, *, lenient: bool) -> _Read:
    """The body of a request, limited in bytes; `lenient` drops unknown fields, which are otherwise refused."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(f"expected a body without Content-Encoding, got {quoted(encoding)}")
    content = await bytes_of(request, most)
    return validated(kind, _parsed(content, request.headers.get("content-type", "")), lenient=lenient)


async def bytes_of(request: Request, most: int) -> bytes:
    """The bytes of a body; raises ApiError if there are more than `most`, or they do not arrive."""
    parts, size = [], 0
    try:
        async for part in request.stream():
            parts.append(part)
            size += len(part)
            if size > most:
                raise ApiError(f"expected a body of at most {most} bytes, got more", status=413)
    except ClientDisconnect:
        raise ApiError("the client closed the connection", status=499) from None
    except HTTPException as error:  # of `auth.Access`
        raise of_http(error) from error
    return b"".join(parts)


def _parsed(content: bytes, kind: str) -> Any:
    """The JSON value of a body, which must be declared as JSON."""
    header = Message()
    header["content-type"] = kind
    subtype = header.get_content_subtype()
    if header.get_content_maintype() != "application" or not (subtype == "json" or subtype.endswith("+json")):
        return None
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise ApiError("the body is not JSON, or has more levels or longer numbers than can be read") from None
