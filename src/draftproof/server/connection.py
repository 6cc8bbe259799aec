"""Connections that have to send a request soon: one that sends nothing, or a head byte by byte, is closed."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol


class Connection(H11Protocol):
    """uvicorn's protocol, with a limit for the time until the head of a request has come."""

    seconds = 0.0  # 0 is no limit
    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Read on; where a request is served now, the clock stops."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop()
        super().connection_lost(exc)

    def _idle(self) -> bool:
        """Whether a request is awaited."""
        return self.cycle is None or self.cycle.response_complete

    def _watch(self) -> None:
        if not self._idle():
            self._stop()
        elif self._limit is None and self.seconds:
            self._limit = self.loop.call_later(self.seconds, self._late)

    def _stop(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None

    def _late(self) -> None:
        self._limit = None
        if self._idle():
            self.transport.close()


def connection(seconds: float) -> type[Connection]:
    """The protocol with this limit in seconds; 0 is none."""
    return type("LimitedConnection", (Connection,), {"seconds": seconds})
