"""How much of a prompt is read in a round, so that the requests that are decoded beside it do not wait long."""

from __future__ import annotations

EXTRA = 0.6  # time that reading may add to a usual round, as a share of it
FIRST, LEAST, MOST = 8, 2, 512  # tokens
_GRAIN = 16  # larger portions are multiples of this
_WEIGHT = 0.2  # of the newest round in the averages


class PortionSize:
    """Chooses the number of prompt tokens that a round reads, by what rounds with and without them have taken.

    Args:
        extra: share of a usual round that reading may add.

    Attributes:
        size: tokens for the next round.
    """

    def __init__(self, extra: float = EXTRA) -> None:
        self.size = FIRST
        self._extra = extra
        self._usual = 0.0
        self._each = 0.0

    def spent(self, seconds: float, tokens: int) -> None:
        """Take in the time of a round in which some requests were decoded, and so many prompt tokens were read."""
        if not tokens:
            self._usual = _moved(self._usual, seconds)
            return
        if not self._usual:
            return
        self._each = _moved(self._each, max(seconds - self._usual, 0.02 * self._usual) / tokens)
        wanted = self._extra * self._usual / self._each
        wanted = min(max(wanted, self.size / 2), self.size * 2)
        size = int(min(max(wanted, LEAST), MOST))
        self.size = size if size < _GRAIN else size // _GRAIN * _GRAIN


def _moved(average: float, newest: float) -> float:
    return newest if not average else average + _WEIGHT * (newest - average)
