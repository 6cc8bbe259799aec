"""Every stopper, declared once: its name and argument, and whether its drafts have one length."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from draftproof.embedded import feature_head_dir, heads_dir, stories_heads_dir
from draftproof.engine.parts import StopperPart, directory, find, is_number, number
from draftproof.errors import UserError
from draftproof.heads import Head, load_head
from draftproof.stoppers.auto import Auto
from draftproof.stoppers.base import Stopper
from draftproof.stoppers.fixed import FixedLength
from draftproof.stoppers.history import Schedule
from draftproof.stoppers.probability import Confidence, Entropy, Predicted
from draftproof.stoppers.trained import Acceptance, Approximate, Ratio
from draftproof.theory.cost import RoundCosts
from draftproof.verifiers.base import Verifier

DEFAULT_STOPPER, DEFAULT_CONSTANT_STOPPER = "auto", "fixed:4"
SHIPPED_HEADS = {  # by draft model; in each a directory named as the stopper
    "embedded:draft": heads_dir(),
    "embedded:stories-draft": stories_heads_dir(),
}
SHIPPED_FEATURE_HEADS = {"smollm2-135m": feature_head_dir()}  # by target
OWN_HEADS = "heads"  # a feature head's directory may hold such a directory of its own


def _length(make: Callable[..., Stopper], example: str) -> Callable[[str, str | None], Stopper]:
    """A stopper with a whole number as its argument."""

    def build(argument: str, draft: str | None) -> Stopper:  # noqa: ARG001
        try:
            return make(int(argument)) if argument else make()
        except ValueError as cause:
            if isinstance(cause, UserError):
                raise
            name = example.partition(":")[0]
            raise UserError(f"stopper {name} takes a whole number, not {argument!r}: for example {example}") from None

    return build


def _threshold(make: Callable[..., Stopper], example: str) -> Callable[[str, str | None], Stopper]:
    """A stopper with a threshold as its argument."""

    def build(argument: str, draft: str | None) -> Stopper:  # noqa: ARG001
        return make(number(argument, example)) if argument else make()

    return build


def _headed(make: Callable[[Head, float | None], Stopper], example: str) -> Callable[[str, str | None], Stopper]:
    """A stopper with a trained head: its directory, a threshold, both or none; default the draft's own shipped head."""
    name = example.partition(":")[0]

    def build(argument: str, draft: str | None) -> Stopper:
        where, _, last = argument.rpartition(":")
        path, threshold = (where, last) if is_number(last) else (argument, "")
        shelf = None if path else _heads_of(draft)
        if shelf is not None:
            path = str(shelf / name) if (shelf / name).is_dir() else ""
        if not path:
            raise UserError(
                f"stopper {name} needs the directory of a head, for example {example}: none ships for the draft model "
                f"{draft!r} (one ships for {', '.join(SHIPPED_HEADS)}); draftproof train makes heads"
            )
        return make(load_head(path), float(threshold) if threshold else None)

    return build


def _heads_of(draft: str | None) -> Path | None:
    """Where the heads lie that ship for a draft model, or for a feature head beside its own files."""
    kind, _, argument = (draft or "").partition(":")
    if kind != "feature_head":
        return SHIPPED_HEADS.get(draft or "")
    if argument:
        return directory(argument)[0] / OWN_HEADS
    (shipped,) = SHIPPED_FEATURE_HEADS.values()
    return shipped / OWN_HEADS


def _refuse_oracle(argument: str, draft: str | None) -> Stopper:  # noqa: ARG001
    raise UserError(
        "stopper oracle needs a recorded run (it knows the target's greedy tokens in advance): "
        "it is for analysis in Python, draftproof.stoppers.history.Oracle"
    )


def _auto(argument: str, draft: str | None) -> Stopper:  # noqa: ARG001
    """The length by the cost model: at a draft pass's share of a target pass, or at what is measured here."""
    if not argument:
        return Auto()
    share = number(argument, "auto:0.1")
    if not 0 <= share < math.inf:
        raise UserError(
            f"stopper auto takes a draft pass's cost in target passes, not {argument}: for example auto:0.1"
        )
    return Auto(RoundCosts(target=1.0, draft=share), name=f"auto:{share:g}")


STOPPERS: dict[str, StopperPart] = {
    part.name: part
    for part in (
        StopperPart(
            name="auto",
            argument="R",
            example="auto:0.1",
            about="as many tokens as pay, by measured costs (or with a draft pass at R target passes) and acceptance",
            make=_auto,
        ),
        StopperPart(
            name="fixed",
            argument="N",
            example="fixed:4",
            about="N tokens every round",
            make=_length(lambda length=4: FixedLength(length), "fixed:4"),
            constant=True,
        ),
        StopperPart(
            name="schedule",
            argument="N",
            example="schedule:5",
            about="N tokens at first; two more after a draft that was accepted whole, one less after any other",
            make=_length(Schedule, "schedule:5"),
        ),
        StopperPart(
            name="confidence",
            argument="T",
            example="confidence:0.4",
            about="until the draft model's largest probability is below T",
            make=_threshold(Confidence, "confidence:0.4"),
        ),
        StopperPart(
            name="entropy",
            argument="T",
            example="entropy:0.4",
            about="until the entropy's bound on acceptance is below a threshold that starts at T (AdaEDL)",
            make=_threshold(Entropy, "entropy:0.4"),
        ),
        StopperPart(
            name="predicted",
            argument="T",
            example="predicted:0.3",
            about="as long as a draft head predicts, with a probability of T or more, that all is accepted (DSpark)",
            make=_threshold(Predicted, "predicted:0.3"),
        ),
        StopperPart(
            name="acceptance",
            argument="DIR:H",
            example="acceptance:heads/mine:0.7",
            about="until a rejection is predicted with a probability above H (SpecDec++)",
            make=_headed(Acceptance, "acceptance:heads/mine:0.7"),
            head="acceptance",
        ),
        StopperPart(
            name="ratio",
            argument="DIR:H",
            example="ratio:heads/mine:0.7",
            about="until the predicted running probability of block verification is below 1 - H",
            make=_headed(Ratio, "ratio:heads/mine:0.7"),
            head="log_ratio",
        ),
        StopperPart(
            name="approximate",
            argument="DIR:T",
            example="approximate:heads/mine:0.5",
            about="until a small verifier refuses a token: its probability is at most T (SPRINTER)",
            make=_headed(Approximate, "approximate:heads/mine:0.5"),
            head="verifier",
        ),
        StopperPart(
            name="oracle",
            about="up to the next rejection, by hindsight on a recorded run; for analysis in Python",
            make=_refuse_oracle,
            offered=False,
        ),
    )
}
OFFERED_STOPPERS = {name: part for name, part in STOPPERS.items() if part.offered}


def find_stopper(spec: str) -> tuple[StopperPart, str]:
    """The part that "name" or "name:argument" names, and the argument."""
    forms = ", ".join(part.form for part in OFFERED_STOPPERS.values())
    return find(STOPPERS, spec, "stopper", f"{forms} (the argument may be left out)")


def make_stopper(spec: str, draft: str | None = None) -> Stopper:
    """A stopper from "name" or "name:argument".

    `draft` is the name of the draft model, or the drafter's where it has none, for stoppers whose head ships for it.
    """
    part, argument = find_stopper(spec)
    return part.make(argument, draft)


def default_stopper(rule: Verifier | None) -> str:
    """The stopper of an engine for which none is named: what pays, or a constant length where the rule needs one."""
    return DEFAULT_CONSTANT_STOPPER if rule is not None and rule.constant_length else DEFAULT_STOPPER
