"""Connections that have to make progress: send a request soon, and read its answer; and a limit of how many there are.

One that sends nothing, or a head byte by byte, is closed after some time, and before it where another one needs its
place. One that does not read is dropped together with what was to be sent.
"""

from __future__ import annotations

import asyncio
import logging

from uvicorn.protocols.http.h11_impl import H11Protocol

RESERVE = 16  # connections beyond the limit, which are told whether the server is well, and nothing else
_LEAST = 65_536  # bytes that a client has to read within the time, where so many are left
_log = logging.getLogger(__name__)


class Connections:
    """The open connections: beyond `most`, the longest idle one is closed; a small reserve answers health checks."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.open: set[Connection] = set()
        self.idle: dict[Connection, None] = {}  # the one that has been idle longest first

    def enter(self, one: Connection) -> bool | None:
        """Add a connection; returns whether it is in the reserve, or None if there is no place."""
        spare = False
        if len(self.open) >= self.most:
            if self.idle:
                next(iter(self.idle)).drop()
            elif len(self.open) >= self.most + RESERVE:
                return None
            else:
                spare = True
        self.open.add(one)
        return spare

    def leave(self, one: Connection) -> None:
        """Forget a connection."""
        self.open.discard(one)
        self.idle.pop(one, None)


class Connection(H11Protocol):
    """uvicorn's protocol with time limits for receiving the head of a request and for reading its answer."""

    read_timeout = write_timeout = 0.0
    all: Connections
    _late: asyncio.TimerHandle | None = None
    _slow: asyncio.TimerHandle | None = None
    _unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock."""
        spare = self.all.enter(self)
        super().connection_made(transport)
        if spare is None:
            transport.abort()
            return
        if spare:
            self.app_state = {**self.app_state, "spare": True}
        transport.set_write_buffer_limits(high=0)  # so that the protocol hears of everything that waits to be read
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Process received data; the clock stops while a request is served."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """Start the clock: the client has data to read."""
        super().pause_writing()
        self._watch()
        if self.write_timeout and self._slow is None:
            self._unread = self.transport.get_write_buffer_size()
            self._slow = self.loop.call_later(self.write_timeout, self._drop_slow)

    def resume_writing(self) -> None:
        """Stop the clock: the client has read everything, as far as the system knows."""
        super().resume_writing()
        if self._slow is not None:
            self._slow.cancel()
            self._slow = None
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks."""
        super().connection_lost(exc)
        self._forget()

    def drop(self) -> None:
        """Close the connection at once; unsent data is lost."""
        self._forget()
        self.transport.abort()

    def _forget(self) -> None:
        self.all.leave(self)
        for timer in (self._late, self._slow):
            if timer is not None:
                timer.cancel()
        self._late = self._slow = None

    def _awaits(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        """Start or stop the clock for the next request."""
        if self not in self.all.open or self.transport.is_closing():
            self.all.idle.pop(self, None)
            return
        if self._awaits() and not self.flow.write_paused:
            self.all.idle.setdefault(self)
        else:
            self.all.idle.pop(self, None)
        if not self._awaits():
            if self._late is not None:
                self._late.cancel()
                self._late = None
        elif self._late is None and self.read_timeout:
            self._late = self.loop.call_later(self.read_timeout, self._close_late)

    def _close_late(self) -> None:
        self._late = None
        if self._awaits():
            self.transport.close()

    def _drop_slow(self) -> None:
        left = self.transport.get_write_buffer_size()
        if left and self._unread - left < _LEAST:
            _log.info("a client stopped reading its answer")
            self.drop()
            return
        self._unread = left
        self._slow = self.loop.call_later(self.write_timeout, self._drop_slow)


def connection(read_timeout: float, write_timeout: float, most: int) -> type[Connection]:
    """The protocol with these limits; see `Connection` and `Connections`."""
    limits = {"read_timeout": read_timeout, "write_timeout": write_timeout, "all": Connections(most)}
    return type("LimitedConnection", (Connection,), limits)
