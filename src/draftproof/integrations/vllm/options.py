"""What a user asks of the plug-in: the section `draftproof` of vLLM's `--additional-config`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from draftproof.errors import UserError
from draftproof.integrations.vllm.rules import RULES

DRAFTERS = ("suffix", "ngram", "auto")
STOPPERS = ("fixed", "schedule", "auto")  # those that read no probabilities, which lookups do not have
_SECTION = "draftproof"


@dataclass(frozen=True)
class Options:
    """Options of the plug-in.

    Attributes:
        rule: verification rule, a name in `RULES`; None for vLLM's own.
        drafter: what `draftproof.integrations.vllm.Proposer` drafts from, a name in `DRAFTERS`.
        stopper: what ends its drafts, such as "schedule:5"; None for the drafter's own way.
        shared: whether its requests draft from each other's tokens.
    """

    rule: str | None = None
    drafter: str = "suffix"
    stopper: str | None = None
    shared: bool = True

    @classmethod
    def of(cls, vllm_config: Any) -> Options:
        """The options in a `VllmConfig`; `rejection_sample_method: block` in its speculative config counts too.

        Raises:
            UserError: an option that there is not, a value that is not legal, or two that contradict each other.
        """
        whole = vllm_config.additional_config
        given = whole.get(_SECTION, {}) if isinstance(whole, dict) else {}
        if not isinstance(given, dict):
            raise UserError(f"--additional-config: {_SECTION} is {given!r}: legal is an object such as {_EXAMPLE}")
        names = [field.name for field in fields(cls)]
        for name in given:
            if name not in names:
                raise UserError(f"--additional-config: {_SECTION} has {name!r}: legal are {', '.join(names)}")
        asked = cls(**given)
        asked._check()
        speculative = vllm_config.speculative_config
        method = "standard" if speculative is None else speculative.rejection_sample_method
        if asked.rule is not None and method != "standard" and asked.rule != method:
            raise UserError(
                f"the rule {asked.rule!r} of {_SECTION} and rejection_sample_method {method!r} of --speculative-config "
                "contradict each other: leave one of them out"
            )
        return cls(**{**given, "rule": "block"}) if method == "block" else asked

    def _check(self) -> None:
        if self.rule is not None and self.rule not in RULES:
            raise UserError(f"{_SECTION}: rule is {self.rule!r}: legal are {', '.join(RULES)}")
        if self.drafter not in DRAFTERS:
            raise UserError(f"{_SECTION}: drafter is {self.drafter!r}: legal are {', '.join(DRAFTERS)}")
        if self.stopper is not None and str(self.stopper).partition(":")[0] not in STOPPERS:
            raise UserError(
                f"{_SECTION}: stopper is {self.stopper!r}: legal are {', '.join(STOPPERS)}, for example 'schedule:5'; "
                "others read probabilities of a draft model"
            )
        if self.stopper is not None and self.drafter == "auto":
            raise UserError(f"{_SECTION}: drafter auto decides itself how much to draft: leave the stopper out")
        if not isinstance(self.shared, bool):
            raise UserError(f"{_SECTION}: shared is {self.shared!r}: legal are true and false")


_EXAMPLE = '{"draftproof": {"rule": "block"}}'
