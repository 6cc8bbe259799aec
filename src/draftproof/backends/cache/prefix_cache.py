"""Prefix cache: sessions of finished requests, reused by later requests with the same prefix.

What is reused are the very keys and values (or states) that the model computed for these tokens, so outputs are those
of a model that read everything. A session is handed over whole where little of it would be lost; else its beginning is
copied, from a kept session or from one that is in use. A session keeps the salt of the request that it was opened for,
and serves requests with the same salt only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from draftproof.backends.base import Backend, Session, common_prefix, unread
from draftproof.peak import available

SHORTEST = 32  # a shorter beginning is read as fast as it is copied
LOST = 64  # a session is handed over instead of copied where at most so many of its tokens are lost
MOST_SESSIONS = 64
MOST_NBYTES = 1 << 30


@dataclass(eq=False)
class _Kept:
    backend: Backend
    session: Session
    nbytes: int  # of the session, which does not change while it is kept


def room_for_sessions(device: torch.device) -> int:
    """Bytes that kept sessions may take where nobody says it: on a CPU a quarter of what is free, MOST_NBYTES at least.

    An agent's session of 30,000 tokens takes more than a gigabyte with a model of 7 B. On an accelerator it is
    MOST_NBYTES, since passes need what is free there.
    """
    free = available(device) if device.type == "cpu" else None
    return max(MOST_NBYTES, (free or 0) // 4)


class PrefixCache:
    """Sessions that no request uses now, of one or several models; the least recently used one goes first.

    Args:
        shortest: tokens; shorter sessions are not kept, and shorter beginnings not reused.
    """

    def __init__(self, most: int = MOST_SESSIONS, most_nbytes: int = MOST_NBYTES, *, shortest: int = SHORTEST) -> None:
        self.most = most
        self.most_nbytes = most_nbytes
        self.shortest = shortest
        self.reused = 0  # tokens that were taken over instead of being read, of all models together
        self._nbytes = 0
        self._kept: list[_Kept] = []  # the most recently used one last

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        """Memory of the sessions, in bytes."""
        return self._nbytes

    def keep(self, backend: Backend, session: Session, tokens: list[int]) -> None:
        """Take over a session whose request has ended well, with these tokens; it may be closed at once."""
        if not self.most or session.length < self.shortest:
            session.close()
            return
        unread(session, tokens)
        length = session.reach(session.length)
        salt = session.cache_salt
        alike = [each for each in self._kept if each.backend is backend and each.session.cache_salt == salt]
        longer = [each for each in alike if each.session.reach(_shared(each.session, session.tokens)) >= length]
        if length < self.shortest or longer:
            session.close()
            for each in longer[:1]:
                self._touch(each)
            return
        for each in alike:  # those that this one makes needless
            size = each.session.length
            if _shared(each.session, session.tokens) == size and session.reach(size) == size:
                self._close(each)
        session.trim()
        self._kept.append(_Kept(backend, session, session.nbytes))
        self._nbytes += session.nbytes
        while len(self._kept) > self.most or (self._kept and self.nbytes > self.most_nbytes):
            self.drop()

    def open(
        self, backend: Backend, tokens: Sequence[int], running: Iterable[Session] = (), cache_salt: str = ""
    ) -> Session:
        """A session that has read as much of the beginning of some tokens as any is known to have; or a new one.

        The last token is never among those that were read. Sessions that are `running` may be copied; those of requests
        with another `cache_salt` are not looked at.
        """
        found = self.find(backend, tokens, running, cache_salt) if self.most else None
        opened = backend.open() if found is None else found
        opened.cache_salt = cache_salt
        return opened

    def find(
        self, backend: Backend, tokens: Sequence[int], running: Iterable[Session] = (), cache_salt: str = ""
    ) -> Session | None:
        """As `open`; None where too little can be reused."""
        wanted = tokens[:-1]
        best, source, kept = self.shortest - 1, None, None
        for each in self._kept:
            if each.backend is not backend or each.session.cache_salt != cache_salt:
                continue
            if (length := _reusable(each.session, wanted)) > best:
                best, source, kept = length, each.session, each
        for session in running:
            if session.cache_salt == cache_salt and (length := _reusable(session, wanted)) > best:
                best, source, kept = length, session, None
        if source is None:
            return None
        found: Session | None = None
        if kept is not None and source.length - best <= LOST:
            found = source
        else:
            found = source.fork(best) or (None if kept is None else source)
        if kept is not None:
            self._touch(kept)
            if found is source:
                self._take(kept)
                source.keep(best)
                source.trim()
        self.reused += 0 if found is None else best
        return found

    def drop(self) -> bool:
        """Close the least recently used session; whether there was one."""
        if self._kept:
            self._close(self._kept[0])
            return True
        return False

    def clear(self) -> None:
        """Close all sessions."""
        while self.drop():
            pass

    def _touch(self, kept: _Kept) -> None:
        self._kept.remove(kept)
        self._kept.append(kept)

    def _take(self, kept: _Kept) -> None:
        self._kept.remove(kept)
        self._nbytes -= kept.nbytes

    def _close(self, kept: _Kept) -> None:
        self._take(kept)
        kept.session.close()


def _shared(session: Session, tokens: Sequence[int]) -> int:
    """How many tokens of a session's stem are the beginning of others."""
    return common_prefix(session.tokens[: session.stem], tokens)


def _reusable(session: Session, tokens: Sequence[int]) -> int:
    return session.reach(_shared(session, tokens))
