"""What a person reads on stderr after a run: its summary, and the outcome of a comparison."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from draftproof.cli._compare import Comparison, block_efficiency
from draftproof.engine.request import Output, SameText
from draftproof.engine.stats import Seconds
from draftproof.sampling import MODEL_DEFAULTS, SamplingParams

_SURE = [SameText.BY_DRAFTS, SameText.BUT_FOR_ROUNDING, SameText.YES]  # the least sure first


def summary(outputs: Sequence[Output], seconds: float) -> str:
    """One line: speed, acceptance, the parts in effect, whether the run was lossless, and the shares of time."""
    tokens = sum(output.stats.num_tokens for output in outputs)
    parts = [
        f"{tokens} tokens in {seconds:.2f} s",
        f"{tokens / seconds:.1f} tokens/s" if seconds > 0 else "",
        f"{block_efficiency(outputs):.2f} tokens per target call",
        _acceptance(outputs),
        _composition(outputs[0]),
        "lossless"
        if all(output.lossless for output in outputs)
        else "LOSSY: the output distribution is not the target's",
        f"same text for a seed: {min((output.same_text for output in outputs), key=_SURE.index)}",
        _time_split(outputs),
    ]
    return " | ".join(part for part in parts if part)


def inherited(params: SamplingParams, given: Collection[str]) -> str:
    """One line on the parameters that the model's generation config has changed, but for those in `given`."""
    usual = SamplingParams()
    values = {name: getattr(params, name) for name in MODEL_DEFAULTS if name not in given}
    shown = [
        f"{name} {value:g}" for name, value in values.items() if value is not None and value != getattr(usual, name)
    ]
    return f"sampling: {', '.join(shown)} (from the model's generation config)" if shown else ""


def _acceptance(outputs: Sequence[Output]) -> str:
    drafted = sum(output.stats.num_draft_tokens for output in outputs)
    accepted = sum(output.stats.num_accepted_tokens for output in outputs)
    return f"accepted {accepted} of {drafted} drafted ({accepted / drafted:.0%})" if drafted else "nothing drafted"


def _composition(output: Output) -> str:
    """The parts in effect; without a drafter the others have nothing to do."""
    if output.drafter == "none":
        return "drafter none"
    return f"drafter {output.drafter}, stopper {output.stopper or 'none'}, verifier {output.verifier}"


def _time_split(outputs: Sequence[Output]) -> str:
    whole = Seconds()
    for output in outputs:
        whole.add(output.stats.seconds)
    if whole.total <= 0:
        return ""
    shares = {part: spent / whole.total for part, spent in whole.to_dict().items() if part != "total"}
    return "time: " + ", ".join(f"{part} {share:.0%}" for part, share in shares.items())


def comparison(found: Comparison) -> list[str]:
    """The speed-up with its interval and a verdict, its upper bound, and at temperature 0 whether the tokens agree."""
    values = found.to_dict()
    rates = f"{values['speculative_tokens_per_second']:.1f} against {values['plain_tokens_per_second']:.1f} tokens/s"
    bound = "if drafting cost nothing and a verifying call as much as a plain one"
    lines = [_speed_up(found, rates)]
    if found.drafted:
        lines.append(f"at best {found.block_efficiency:.2f}x with these drafts: {bound}")
    lines += [] if found.identical is None else [_agreement(found)]
    return [f"compare: {line}" for line in lines]


def _speed_up(found: Comparison, rates: str) -> str:
    """The verdict in words, with the figures that it rests on."""
    if found.verdict is None:
        return f"nothing was drafted, so this was plain decoding twice; there is no speed-up to measure ({rates})"
    verdict = {
        "faster": "faster than plain decoding",
        "slower": "SLOWER than plain decoding",
        "no clear difference": "no clear difference to plain decoding",
    }[found.verdict]
    speed = found.speed_up
    interval = f"95% interval {speed.low:.2f}x to {speed.high:.2f}x, {speed.count} pairs in alternating order"
    return f"{verdict}: {speed.value:.2f}x its speed ({interval}), {rates}"


def _agreement(found: Comparison) -> str:
    if found.identical:
        return f"tokens identical to plain decoding (temperature 0, {found.dtype})"
    cause = "this should not be" if found.dtype == "float32" else f"near ties round differently in {found.dtype}"
    return f"tokens DIFFER from plain decoding at temperature 0: {cause}; try --dtype float32"
