"""Help texts of drafters, stoppers, rules and backends, from their declarations, and the default draft model."""

from __future__ import annotations

from collections.abc import Iterable

from draftproof import models
from draftproof.backends.loading.by_name import BACKENDS
from draftproof.engine.drafter_parts import DRAFTERS, reads_draft
from draftproof.engine.parts import Part
from draftproof.engine.stopper_parts import OFFERED_STOPPERS
from draftproof.engine.verifier_parts import VERIFIERS


def _forms(parts: Iterable[Part]) -> str:
    return ", ".join(part.form for part in parts)


LOSSLESS = _forms(part for part in VERIFIERS.values() if part.lossless)
LOSSY = _forms(part for part in VERIFIERS.values() if not part.lossless)
DRAFTER_HELP = f"Where drafts come from: {_forms(DRAFTERS.values())}."
STOPPER_HELP = f"When a draft ends: {_forms(OFFERED_STOPPERS.values())}; arguments are optional"
VERIFIER_HELP = f"The verification rule: {LOSSLESS}; lossy: {LOSSY}"
BACKEND_HELP = f"Implementation of the forward pass: {', '.join(BACKENDS)}."

HEADED = tuple(name for name, part in OFFERED_STOPPERS.items() if part.head)  # stoppers with a trained head


def default_draft(target: str, drafter: str | None) -> str | None:
    """The draft model of an embedded target, if the drafter uses a draft model."""
    return models.EMBEDDED_DRAFTS.get(target) if reads_draft(drafter) else None
