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
class PluginOptions:
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
    def of(cls, vllm_config: Any) -> PluginOptions:
        """The options in a `VllmConfig`; `rejection_sample_method: block` in its speculative config counts too."""
        whole = vllm_config.additional_config
        given = whole.get(_SECTION, {}) if isinstance(whole, dict) else {}
        if not isinstance(given, dict):
            raise UserError(f"--additional-config: {_SECTION}: expected an object such as {_EXAMPLE}, got {given!r}")
        names = [field.name for field in fields(cls)]
        for name, value in given.items():
            if name not in names:
                raise UserError(f"--additional-config: {_SECTION}: expected options {', '.join(names)}, got {name!r}")
            _check(name, value)
        if given.get("stopper") is not None and given.get("drafter") == "auto":
            raise UserError(f"{_SECTION}: drafter auto decides itself how much to draft: leave the stopper out")
        speculative = vllm_config.speculative_config
        method = "standard" if speculative is None else speculative.rejection_sample_method
        rule = given.get("rule")
        if rule is not None and method not in ("standard", rule):
            raise UserError(
                f"the rule {rule!r} of {_SECTION} and rejection_sample_method {method!r} of --speculative-config "
                "contradict each other: leave one of them out"
            )
        return cls(**{**given, "rule": "block" if method == "block" else rule})


def _check(name: str, value: object) -> None:
    allowed = {"rule": RULES, "drafter": DRAFTERS}.get(name)
    if allowed is not None and value not in allowed and (name != "rule" or value is not None):
        raise UserError(f"{_SECTION}: {name}: expected one of {', '.join(allowed)}, got {value!r}")
    if name == "stopper" and value is not None and str(value).partition(":")[0] not in STOPPERS:
        raise UserError(
            f"{_SECTION}: stopper: expected one of {', '.join(STOPPERS)}, for example 'schedule:5', got {value!r} "
            "(other stoppers need the probabilities of a draft model)"
        )
    if name == "shared" and not isinstance(value, bool):
        raise UserError(f"{_SECTION}: shared: expected true or false, got {value!r}")


_EXAMPLE = '{"draftproof": {"rule": "block"}}'
