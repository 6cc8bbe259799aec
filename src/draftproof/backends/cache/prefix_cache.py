"""Prefix cache: sessions of finished requests, reused by later requests with the same prefix.

The reused keys and values (or states) are those that the model computed for the same tokens, so outputs do not change.
A cached session is handed over as a whole if little of it would be lost; otherwise its prefix is copied. Prefixes of
running sessions can be copied, too. A session keeps the salt of the request that it was opened for, and serves only
requests with the same salt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from draftproof.backends.base import Backend, Session, common_prefix, unread
from draftproof.peak import available

SHORTEST = 32  # a shorter prefix is read as fast as it is copied
LOST = 64  # a session is handed over instead of copied if at most this many of its tokens are lost
MOST_SESSIONS = 64
MOST_NBYTES = 1 << 30


@dataclass(eq=False)
class _Entry:
    backend: Backend
    session: Session
    nbytes: int  # of the session, which does not change while it is cached


def room_for_sessions(device: torch.device) -> int:
    """The default limit of cached sessions in bytes: on a CPU a quarter of the free memory, but at least MOST_NBYTES.

    An agent's session of 30,000 tokens takes more than a gigabyte with a model of 7 B. On an accelerator the limit is
    MOST_NBYTES, since passes need the free memory there.
    """
    free = available(device) if device.type == "cpu" else None
    return max(MOST_NBYTES, (free or 0) // 4)


class PrefixCache:
    """Sessions that no request uses any more, of one or several models; the least recently used one is dropped first.

    Args:
        most: largest number of sessions; 0 turns the cache off.
        most_nbytes: largest memory of all sessions, in bytes.
        shortest: shorter sessions are not cached, and shorter prefixes not reused, in tokens.
    """

    def __init__(self, most: int = MOST_SESSIONS, most_nbytes: int = MOST_NBYTES, *, shortest: int = SHORTEST) -> None:
        self.most = most
        self.most_nbytes = most_nbytes
        self.shortest = shortest
        self.reused = 0  # tokens that were reused instead of being read, of all models together
        self._nbytes = 0
        self._entries: list[_Entry] = []  # the most recently used one last

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Memory of the sessions, in bytes."""
        return self._nbytes

    def keep(self, backend: Backend, session: Session, tokens: list[int]) -> None:
        """Cache the session of a finished request with these tokens; it is closed if it is not worth caching."""
        if not self.most or session.length < self.shortest:
            session.close()
            return
        unread(session, tokens)
        length = session.reach(session.length)
        salt = session.cache_salt
        comparable = [each for each in self._entries if each.backend is backend and each.session.cache_salt == salt]
        longer = [each for each in comparable if each.session.reach(_shared(each.session, session.tokens)) >= length]
        if length < self.shortest or longer:
            session.close()
            for each in longer[:1]:
                self._touch(each)
            return
        for each in comparable:  # those that the new one makes redundant
            size = each.session.length
            if _shared(each.session, session.tokens) == size and session.reach(size) == size:
                self._close(each)
        session.trim()
        self._entries.append(_Entry(backend, session, session.nbytes))
        self._nbytes += session.nbytes
        while len(self._entries) > self.most or (self._entries and self.nbytes > self.most_nbytes):
            self.drop()

    def open(
        self, backend: Backend, tokens: Sequence[int], running: Iterable[Session] = (), cache_salt: str = ""
    ) -> Session:
        """A session that has read the longest cached prefix of the tokens; a new one if there is none.

        The last token is never read in advance. `running` sessions may be copied; those with another
        `cache_salt` are ignored.
        """
        found = self.find(backend, tokens, running, cache_salt) if self.most else None
        opened = backend.open() if found is None else found
        opened.cache_salt = cache_salt
        return opened

    def find(
        self, backend: Backend, tokens: Sequence[int], running: Iterable[Session] = (), cache_salt: str = ""
    ) -> Session | None:
        """As `open`, but None if too little can be reused."""
        prefix = tokens[:-1]
        best, source, entry = self.shortest - 1, None, None
        for each in self._entries:
            if each.backend is not backend or each.session.cache_salt != cache_salt:
                continue
            if (length := _reusable(each.session, prefix)) > best:
                best, source, entry = length, each.session, each
        for session in running:  # these go on, so they can only be copied
            if session.cache_salt == cache_salt and (length := _reusable(session, prefix)) > best:
                best, source, entry = length, session, None
        if source is None:
            return None
        found: Session | None = None
        # A copy takes memory and time. So a kept session is handed over if hardly anything of it is lost, or if it
        # cannot be copied.
        if entry is not None and source.length - best <= LOST:
            found = source
        else:
            found = source.fork(best) or (None if entry is None else source)
        if entry is not None:
            self._touch(entry)
            if found is source:
                self._take(entry)
                source.keep(best)
                source.trim()
        self.reused += 0 if found is None else best
        return found

    def drop(self) -> bool:
        """Close the least recently used session; returns whether there was one."""
        if self._entries:
            self._close(self._entries[0])
            return True
        return False

    def clear(self) -> None:
        """Close all sessions."""
        while self.drop():
            pass

    def _touch(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        self._entries.append(entry)

    def _take(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        self._nbytes -= entry.nbytes

    def _close(self, entry: _Entry) -> None:
        self._take(entry)
        entry.session.close()


def _shared(session: Session, tokens: Sequence[int]) -> int:
    """Length of the common prefix of a session's stem and these tokens."""
    return common_prefix(session.tokens[: session.stem], tokens)


def _reusable(session: Session, tokens: Sequence[int]) -> int:
    return session.reach(_shared(session, tokens))
