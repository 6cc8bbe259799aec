"""The registry of parts by name, from `drafter_parts`, `stopper_parts` and `verifier_parts`, and `make_drafter`.

Parsing, help texts, the table of compositions, benchmarks and documentation are generated from these declarations.
"""

from __future__ import annotations

import math

from draftproof.backends.base import Backend, info
from draftproof.drafters.base import Drafter
from draftproof.engine.composition import no_rollback_reason
from draftproof.engine.drafter_context import DrafterContext, DrafterPart
from draftproof.engine.drafter_parts import DEFAULT_DRAFTER, DRAFTERS, find_drafter, reads_draft, why_not
from draftproof.engine.parts import Part, StopperPart, VerifierPart
from draftproof.engine.published_parts import PUBLISHED
from draftproof.engine.stopper_parts import (
    DEFAULT_CONSTANT_STOPPER,
    DEFAULT_STOPPER,
    OFFERED_STOPPERS,
    SHIPPED_FEATURE_HEADS,
    SHIPPED_HEADS,
    STOPPERS,
    default_stopper,
    find_stopper,
    make_stopper,
)
from draftproof.engine.verifier_parts import (
    DEFAULT_TREE_VERIFIER,
    DEFAULT_VERIFIER,
    LOSSY,
    SEEDED_VERIFIER,
    VERIFIERS,
    find_verifier,
    make_verifier,
)
from draftproof.errors import UserError
from draftproof.verifiers.base import Verifier

__all__ = [
    "DEFAULT_CONSTANT_STOPPER",
    "DEFAULT_DRAFTER",
    "DEFAULT_STOPPER",
    "DEFAULT_TREE_VERIFIER",
    "DEFAULT_VERIFIER",
    "DRAFTERS",
    "LOSSY",
    "OFFERED_STOPPERS",
    "SEEDED_VERIFIER",
    "SHIPPED_FEATURE_HEADS",
    "SHIPPED_HEADS",
    "STOPPERS",
    "VERIFIERS",
    "DrafterContext",
    "DrafterPart",
    "Part",
    "StopperPart",
    "VerifierPart",
    "default_stopper",
    "find_drafter",
    "find_stopper",
    "find_verifier",
    "make_drafter",
    "make_stopper",
    "make_verifier",
    "names_head",
    "reads_draft",
    "why_not",
]


def make_drafter(
    name: str | None,
    *,
    target: Backend,
    draft: Backend | None,
    stopper: str,
    temperature: float | None = None,
    top_k: int | None = None,
    bits: int | None = None,
    whole: str | None = None,
    rule: Verifier | None = None,
    budget: float = math.inf,
) -> Drafter:
    """Make a drafter from "name" or "name:argument"; the default is `auto`.

    `temperature` and `top_k` override the request's for the draft. With `bits`, `draft` is already quantized. `whole`
    is a dtype, in which a head keeps all its weights. See `DrafterContext` for the other arguments.
    """
    spec = name or DEFAULT_DRAFTER
    part, argument = find_drafter(spec)
    traits = part.traits
    if traits.reads_draft and draft is None:
        raise UserError(f"drafter {part.name} needs a draft model: name one with draft (--draft)")
    if not (traits.reads_draft or traits.accepts_draft_model) and draft is not None and part.name != "none":
        raise UserError(f"drafter {part.name} uses no draft model: leave out {draft.name!r}, or choose another drafter")
    if part.name not in ("none", "auto") and (why := no_rollback_reason(target)):
        raise UserError(f"drafter {spec} cannot be used, because {why}: use drafter none")
    heads = spec.removeprefix("auto:").startswith("feature_head") or (
        traits.accepts_draft_model and target.name in SHIPPED_FEATURE_HEADS
    )
    if bits is not None and draft is None and not (heads or part in PUBLISHED):
        raise UserError(
            f"draft_dtype int{bits} is for a draft model or a head, but drafter {spec} has none: leave it out, "
            f"or choose drafter quantized:{bits}, the target with such weights"
        )
    facts = info(target)
    own = whole if facts is None else str(facts.dtype).removeprefix("torch.")
    if draft is None and whole not in (None, own):
        raise UserError(f"draft_dtype: expected auto, int8, int4 or {own}, the dtype of a head's target, got {whole}")
    changes = {"temperature": temperature, "top_k": top_k}
    context = DrafterContext(
        target, draft, stopper, spec, part, argument, changes, bits, whole is not None, rule, budget=budget
    )
    return part.make(context, argument)


def names_head(spec: str | None) -> bool:
    """Whether a drafter is a head, or `auto` with one."""
    if spec is None or spec == DEFAULT_DRAFTER:
        return False
    part, _ = find_drafter(spec.removeprefix(f"{DEFAULT_DRAFTER}:"))
    return part.name == "feature_head" or part in PUBLISHED
