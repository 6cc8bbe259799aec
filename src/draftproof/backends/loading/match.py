"""Which models on this disk can draft for a target: shared tokens, and how much of its weights one reads."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from draftproof import models
from draftproof.backends.lean.checkpoint import weight_files
from draftproof.backends.loading.load import LoadedModel, load
from draftproof.backends.loading.tokenization import share_of_text, shared_tokens
from draftproof.errors import UserError
from draftproof.models.found import found_files
from draftproof.models.gguf_file import GGUFFile, is_gguf
from draftproof.theory.lengths import iid_block_efficiency

VERIFIED = 1.04  # what a pass over five rows costs, of one row (docs/results/gguf.md, 1.5 B shapes)
_MOST_DRAFTED = 8
_LIKELY = 0.7  # accepted tokens of a drafted one, of small models of the same family
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Match:
    """A model that may draft for a target."""

    name: str  # that `--draft` takes
    nbytes: int  # that are read for a token
    share: float  # of the target's
    why_not: str  # why it cannot draft; empty where it can
    shared: float | None = None  # with another vocabulary, the share of the target's tokens in a text that it has, too

    def gain(self, accepted: float) -> tuple[float, int]:
        """Speed-up over plain decoding at the best length, and that length, by bytes alone.

        A drafted token costs `share`, a verification VERIFIED.

        Args:
            accepted: share of drafted tokens that are accepted after an accepted one.
        """
        lengths = range(1, _MOST_DRAFTED + 1)
        return max((iid_block_efficiency(accepted, n) / (n * self.share + VERIFIED), n) for n in lengths)


def find_draft(target: LoadedModel) -> str | None:
    """The name of the model on this disk that gains most as the target's draft model; None where none gains.

    Only models with the target's own vocabulary are taken. The gain is that of the bytes which both read.
    """
    fitting = [each for each in matches(target) if not each.why_not and each.shared is None]
    best = max(fitting, key=lambda each: each.gain(_LIKELY), default=None)
    if best is None or best.gain(_LIKELY)[0] <= 1:
        _log.warning("no model on this disk gains as a draft model of %s (draftproof models match)", target.name)
        return None
    _log.warning("the draft model of %s is %s, which reads %.2f of its bytes", target.name, best.name, best.share)
    return best.name


def matches(target: LoadedModel, folders: Iterable[Path] = ()) -> list[Match]:
    """What can draft for a target, the smallest first; then those with another vocabulary, then what cannot.

    Args:
        target: whose tokenizer is compared; its weights are not read.
        folders: that are searched for .gguf files and directories of models, beside what `found_files` finds and the
            registered models that are here.
    """
    whole = _read_bytes(target.name)
    names = [name for name in models.REGISTRY if models.pulled(name)]
    names += [each.name for each in found_files()]
    for folder in folders:
        names += [str(path) for path in sorted(folder.rglob("*.gguf"))]
        names += [str(path.parent) for path in sorted(folder.rglob("config.json"))]
    own = _place(target.name)
    found = [_match(name, target, whole) for name in dict.fromkeys(names) if _place(name) != own]
    return sorted(found, key=lambda each: (bool(each.why_not), each.shared is not None, each.nbytes))


def _place(name: str) -> str | None:
    """Where a model is; None where it is not to be had, of which `_match` says why."""
    try:
        return models.resolve(name)
    except UserError:
        return None


def _match(name: str, target: LoadedModel, whole: int) -> Match:
    try:
        nbytes = _read_bytes(name)
    except (UserError, OSError, KeyError, ValueError) as cause:
        return Match(name, 0, math.inf, str(cause))
    share = nbytes / whole
    if share >= 1:
        return Match(name, nbytes, share, "it is not smaller than the target")
    try:
        found = shared_tokens(target.tokenizer, load(name).tokenizer, target_name=target.name, draft_name=name)
    except UserError as cause:
        return Match(name, nbytes, share, str(cause))
    shared = None if found is None else share_of_text(found, target.tokenizer)
    return Match(name, nbytes, share, "", shared)


def _read_bytes(name: str) -> int:
    """Bytes of weights that are read for a token: all but the embedding, where the output layer has a table of its own.

    Raises:
        OSError, KeyError, ValueError, UserError: it cannot be read.
    """
    where = Path(models.resolve(name))
    if not is_gguf(where):
        return sum(path.stat().st_size for path in weight_files(where))
    return sum(entry.nbytes for entry in GGUFFile(where).read_for_a_token)
