"""The declarations of all stoppers: name, argument, and whether their drafts have a constant length."""

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
SHIPPED_FEATURE_HEADS = dict.fromkeys(("smollm2-135m", "smollm2-135m-q4"), feature_head_dir())  # by target
OWN_HEADS = "heads"  # subdirectory of a feature head's directory for its stoppers' heads


def _length(make: Callable[..., Stopper], example: str) -> Callable[[str, str | None], Stopper]:
    """A stopper with an integer as its argument."""

    def build(argument: str, draft: str | None) -> Stopper:  # noqa: ARG001
        try:
            return make(int(argument)) if argument else make()
        except ValueError as cause:
            if isinstance(cause, UserError):
                raise
            name = example.partition(":")[0]
            raise UserError(f"stopper {name}: expected an integer, for example {example}, got {argument!r}") from None

    return build


def _threshold(make: Callable[..., Stopper], example: str) -> Callable[[str, str | None], Stopper]:
    """A stopper with a threshold as its argument."""

    def build(argument: str, draft: str | None) -> Stopper:  # noqa: ARG001
        return make(number(argument, example)) if argument else make()

    return build


def _headed(make: Callable[[Head, float | None], Stopper], example: str) -> Callable[[str, str | None], Stopper]:
    """A stopper with a trained head: DIR, threshold, both or neither; default the head that ships for the draft."""
    name = example.partition(":")[0]

    def build(argument: str, draft: str | None) -> Stopper:
        where, _, last = argument.rpartition(":")
        path, threshold = (where, last) if is_number(last) else (argument, "")
        shipped = None if path else _heads_of(draft)
        if shipped is not None:
            path = str(shipped / name) if (shipped / name).is_dir() else ""
        if not path:
            raise UserError(
                f"stopper {name} needs the directory of a head, for example {example}: none ships for the draft model "
                f"{draft!r} (one ships for {', '.join(SHIPPED_HEADS)}); draftproof train makes heads"
            )
        return make(load_head(path), float(threshold) if threshold else None)

    return build


def _heads_of(draft: str | None) -> Path | None:
    """The directory of the heads that ship for a draft model or a feature head."""
    kind, _, argument = (draft or "").partition(":")
    if kind != "feature_head":
        return SHIPPED_HEADS.get(draft or "")
    if argument:
        return directory(argument)[0] / OWN_HEADS
    return feature_head_dir() / OWN_HEADS


def _refuse_oracle(argument: str, draft: str | None) -> Stopper:  # noqa: ARG001
    raise UserError(
        "stopper oracle needs a recorded run (it knows the target's greedy tokens in advance): use "
        "draftproof.stoppers.history.Oracle in Python, for analysis"
    )


def _auto(argument: str, draft: str | None) -> Stopper:  # noqa: ARG001
    """The stopper `auto`: with the given cost of a draft pass in target passes, or with measured costs."""
    if not argument:
        return Auto()
    share = number(argument, "auto:0.1")
    if not 0 <= share < math.inf:
        raise UserError(
            f"stopper auto: expected the cost of a draft pass in target passes, for example auto:0.1, got {argument}"
        )
    return Auto(RoundCosts(target=1.0, draft=share), name=f"auto:{share:g}")


STOPPERS: dict[str, StopperPart] = {
    part.name: part
    for part in (
        StopperPart(
            name="auto",
            argument="R",
            about="as many tokens as pay off, by acceptance rates and measured costs (or a draft pass of R target "
            "passes)",
            make=_auto,
        ),
        StopperPart(
            name="fixed",
            argument="N",
            about="N tokens in every round",
            make=_length(lambda length=4: FixedLength(length), "fixed:4"),
            constant=True,
        ),
        StopperPart(
            name="schedule",
            argument="N",
            about="N tokens at first; two more after a fully accepted draft, one less after any other",
            make=_length(Schedule, "schedule:5"),
        ),
        StopperPart(
            name="confidence",
            argument="T",
            about="until the draft model's largest probability is below T",
            make=_threshold(Confidence, "confidence:0.4"),
        ),
        StopperPart(
            name="entropy",
            argument="T",
            about="until the entropy's bound on acceptance is below a threshold that starts at T (AdaEDL)",
            make=_threshold(Entropy, "entropy:0.4"),
        ),
        StopperPart(
            name="predicted",
            argument="T",
            about="until a draft head predicts that all tokens are accepted with a probability below T (DSpark)",
            make=_threshold(Predicted, "predicted:0.3"),
        ),
        StopperPart(
            name="acceptance",
            argument="DIR:H",
            about="until a rejection is predicted with a probability above H (SpecDec++)",
            make=_headed(Acceptance, "acceptance:heads/mine:0.7"),
            head="acceptance",
        ),
        StopperPart(
            name="ratio",
            argument="DIR:H",
            about="until the predicted running probability of block verification is below 1 - H",
            make=_headed(Ratio, "ratio:heads/mine:0.7"),
            head="log_ratio",
        ),
        StopperPart(
            name="approximate",
            argument="DIR:T",
            about="until a small verifier gives a token a probability of at most T (SPRINTER)",
            make=_headed(Approximate, "approximate:heads/mine:0.5"),
            head="verifier",
        ),
        StopperPart(
            name="oracle",
            about="up to the next rejection, known from a recorded run; for analysis in Python",
            make=_refuse_oracle,
            offered=False,
        ),
    )
}
OFFERED_STOPPERS = {name: part for name, part in STOPPERS.items() if part.offered}


def find_stopper(spec: str) -> tuple[StopperPart, str]:
    """The part and argument of "name" or "name:argument"."""
    forms = ", ".join(part.form for part in OFFERED_STOPPERS.values())
    return find(STOPPERS, spec, "stopper", f"{forms} (the argument is optional)")


def make_stopper(spec: str, draft: str | None = None) -> Stopper:
    """Make a stopper from "name" or "name:argument".

    `draft` is the name of the draft model, or of the drafter if there is none, for stoppers with shipped heads.
    """
    part, argument = find_stopper(spec)
    return part.make(argument, draft)


def default_stopper(rule: Verifier | None) -> str:
    """The default stopper: auto, or a constant length if the rule needs one."""
    return DEFAULT_CONSTANT_STOPPER if rule is not None and rule.constant_length else DEFAULT_STOPPER
