"""A server from start to end: a socket, the application on it, and what signals do."""

from __future__ import annotations

import signal
import socket
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from draftproof.engine.loop import DecodingLoop
from draftproof.errors import UserError
from draftproof.server.app import Server
from draftproof.server.connection import connection
from draftproof.server.settings import Settings

_CONNECTIONS = 800  # at once; a process has at least 1024 descriptors


def bind(settings: Settings) -> socket.socket:
    """A socket at the settings' address, before a model is loaded for it.

    Raises:
        UserError: the address cannot be had.
    """
    where = f"{settings.host}:{settings.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(f"cannot listen on {where}: {error}") from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except (OSError, OverflowError) as error:
        made.close()
        why = getattr(error, "strerror", None) or error
        raise UserError(f"cannot listen on {where}: {why}; choose another --port or --host") from error
    made.set_inheritable(True)
    return made


def address(listener: socket.socket) -> str:
    """Where a socket listens, as a URL."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def use_template(engine: DecodingLoop, file: Path) -> None:
    """Give a model another chat template.

    Raises:
        UserError: the file cannot be read, or the model has no tokenizer.
    """
    if engine.tokenizer is None:
        raise UserError("chat_template needs a model with a tokenizer")
    try:
        engine.tokenizer.chat_template = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read the chat template {file}: {why}") from error


def prepared(app: FastAPI, settings: Settings) -> uvicorn.Server:
    """What speaks HTTP for an application."""
    config = uvicorn.Config(
        app,
        http=connection(settings.read_timeout),
        limit_concurrency=_CONNECTIONS,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        timeout_graceful_shutdown=settings.drain_timeout,
    )
    return uvicorn.Server(config)


def serve(app: FastAPI, listener: socket.socket, settings: Settings) -> None:
    """Serve until SIGTERM or Ctrl-C: then no connection is accepted, and running requests may end.

    Args:
        app: of `make_app`.
        listener: of `bind`.
        settings: with the time that running requests get.

    Raises:
        KeyboardInterrupt: after Ctrl-C, when everything has ended.
        UserError: the engine's thread ended by an error; a supervisor may start the server again.
    """
    before = signal.signal(signal.SIGTERM, _ended)  # uvicorn raises the signal again when it has drained
    speaks = prepared(app, settings)
    server = app.state.server
    assert isinstance(server, Server), "set by make_app"

    def died() -> None:
        speaks.should_exit = True

    server.ended = died
    try:
        speaks.run(sockets=[listener])
        if server.worker.failed:
            raise UserError("the engine's thread ended by an error, which is in the log")
    finally:
        signal.signal(signal.SIGTERM, before)
        listener.close()


def _ended(_: int, __: FrameType | None) -> None:
    """SIGTERM has done its work: the process ends as one that finished."""
