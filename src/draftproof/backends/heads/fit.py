"""Whether a draft head fits a target: what must be equal, and what only costs drafts.

A head never changes the output distribution. So it drafts for each target whose states, tokens and layers it can read,
whatever the target's weights are stored in; for another model than its own, fewer of its drafts are accepted.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from draftproof.backends import base as backends
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.errors import UserError
from draftproof.models.found import base_name

REMEDY = "take a head that was made for this target, or train one: draftproof train feature-head"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MadeFor:
    """What a head says of the target that it was made for; None or nothing where it does not say."""

    name: str | None
    hidden: int | None  # width of its hidden states
    vocab: int | None
    layers: int | None = None
    architectures: Sequence[str] = ()  # transformers' classes


def refuse_unfit(head: str, made_for: MadeFor, target: SlotBackend) -> None:
    """Refuse a head that cannot read a target; warn of one for another model, by the names without forms of weights.

    Args:
        head: how errors call it.
        made_for: what it says.
        target: that it would draft for.

    Raises:
        UserError: another width, vocabulary, number of layers, or architecture.
    """
    whose = f" (made for {made_for.name})" if made_for.name else ""
    facts: list[tuple[str, Any, Any]] = [
        ("hidden states of width {}", made_for.hidden, target.capabilities.hidden),
        ("{} tokens", made_for.vocab, target.vocab_size),
        ("{} layers", made_for.layers, target.facts.layers),
    ]
    classes = made_for.architectures, backends.architectures(target)
    families = [{_family(each) for each in names} for names in classes]
    if all(families) and not families[0] & families[1]:
        ours, theirs = (" or ".join(names) for names in classes)
        facts.append(("architecture {}", ours, theirs))
    for what, ours, theirs in facts:
        if ours not in (None, theirs):
            raise UserError(
                f"{head}{whose}: expected a target with {what.format(ours)}, got {target.name} with "
                f"{what.format(theirs)} ({REMEDY})"
            )
    if made_for.name and base_name(made_for.name) != base_name(target.name):
        _log.warning(
            "%s was made for %s, and the target is %s: its sizes fit, but if that is another model, few of its drafts "
            "are accepted (generate --compare shows what it gains; else %s)",
            head,
            made_for.name,
            target.name,
            REMEDY,
        )


def _family(architecture: str) -> str:
    """The name of a class without what it is for: a model's text part has another one."""
    return re.sub(r"(Text)?(For\w+|LMHeadModel|Model)$", "", architecture)
