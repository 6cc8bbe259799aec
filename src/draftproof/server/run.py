"""Running a server: its socket, its application, and signals."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from typing_extensions import override

from draftproof.errors import UserError
from draftproof.server.app import server_of
from draftproof.server.connection import RESERVE, connection
from draftproof.server.logs import flush_logs
from draftproof.server.settings import Settings

_CONNECTIONS = 800  # by default, where no more requests may wait
_BACKLOG = 1024  # connections that wait to be accepted, in the system
_ACCEPTED = 8  # of them in one turn of the event loop: others are served between these
_FILES = 128  # descriptors for other things
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_FORCED = 1  # exit code where threads did not end
_GRACE = 2.0  # seconds that threads besides the engine's get
_log = logging.getLogger(__name__)


def bind(settings: Settings) -> socket.socket:
    """Bind a socket to the settings' address, before a model is loaded; raises UserError if that fails."""
    where = f"{settings.host}:{settings.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
    except (OSError, OverflowError, UnicodeError) as error:
        raise UserError(f"cannot listen on {where}: {error}") from error
    try:
        if sys.platform != "win32":  # there it would let two processes have one address
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except (OSError, OverflowError) as error:
        made.close()
        why = getattr(error, "strerror", None) or error
        raise UserError(f"cannot listen on {where}: {why}; choose another --port or --host") from error
    made.set_inheritable(True)
    return made


def address(listener: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Speaker(uvicorn.Server):
    """uvicorn's server, with a callback when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listens: Callable[[], None] = lambda: None

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(_Unhandled())
        await super().startup(sockets)
        if self.started:
            for each in sockets or ():
                each.listen(_BACKLOG)  # asyncio has one number for the system's queue and its own turns
            self.listens()


class _Unhandled:
    """Logs errors of the event loop; one line in ten seconds where connections cannot be accepted."""

    def __init__(self) -> None:
        self._said = -100.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _NO_DESCRIPTOR):
            loop.default_exception_handler(context)
        elif time.monotonic() - self._said >= 10:
            self._said = time.monotonic()
            _log.error("connections cannot be accepted: %s", error.strerror)


def prepared(app: FastAPI, settings: Settings) -> _Speaker:
    """The HTTP server of an application."""
    # A client may wait with a request that is refused, or may not have read its answer yet.
    most = settings.max_connections or max(_CONNECTIONS, 2 * server_of(app).worker.capacity)
    config = uvicorn.Config(
        app,
        http=connection(settings.read_timeout, settings.write_timeout, descriptors_for(most)),
        backlog=_ACCEPTED,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ws="none",
        timeout_graceful_shutdown=settings.drain_timeout,
    )
    return _Speaker(config)


def descriptors_for(connections: int) -> int:
    """Raise the limit of open files for this many connections; returns the number possible, which may be smaller."""
    if sys.platform == "win32":  # which does not count sockets with files
        return connections
    import resource

    needed = connections + RESERVE + _ACCEPTED + _FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
        except (OSError, ValueError):  # the system has a limit of its own
            pass
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return connections
    fewer = max(soft - (needed - connections), 1)
    _log.warning(
        "%d connections need %d open files, and %d are allowed: there will be at most %d",
        connections,
        needed,
        soft,
        fewer,
    )
    return fewer


def serve(
    app: FastAPI, listener: socket.socket, settings: Settings, listens: Callable[[], None] = lambda: None
) -> None:
    """Serve until SIGTERM or Ctrl-C: then no connection is accepted, and running requests may end.

    Where a thread does not end with them, the process ends here, with code 1. `listens` is called when connections are
    accepted.

    Raises:
        KeyboardInterrupt: after Ctrl-C, when everything has ended.
        UserError: the engine's thread ended by an error; a supervisor may start the server again.
    """
    before = signal.signal(signal.SIGTERM, _ended)  # uvicorn raises the signal again when it has drained
    speaks = prepared(app, settings)
    speaks.listens = listens
    server = server_of(app)

    def died() -> None:
        speaks.should_exit = True

    server.worker.died = died
    try:
        speaks.run(sockets=[listener])
        if server.worker.failed:
            raise UserError("the engine's thread ended by an error, which is in the log")
    finally:
        signal.signal(signal.SIGTERM, before)
        listener.close()
        if speaks.force_exit:  # nobody has stopped it
            server.worker.stop()
        end = time.monotonic() + _GRACE
        while server.busy and time.monotonic() < end:  # such as with a text that nobody waits for any more
            time.sleep(0.01)
        flush_logs()
        if server.busy:
            which = "the engine's thread" if server.worker.running else "a thread that reads requests"
            _leave(f"draftproof: error: {which} did not end, so the process does not wait for it")


def _leave(message: str) -> None:
    """End the process whatever its threads do; Python itself would wait for some of them, or end under others."""
    with suppress(OSError, ValueError):
        where = sys.stderr.fileno()
        # Else somebody does not read it; Windows cannot tell.
        if sys.platform == "win32" or select.select([], [where], [], 1.0)[1]:
            os.write(where, f"{message}\n".encode())
    os._exit(_FORCED)


def _ended(_: int, __: FrameType | None) -> None:
    """SIGTERM has done its work: the process ends as one that finished."""
