"""What a person reads on stderr: the summary of a run, the outcome of a comparison, a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from draftproof.cli._compare import Comparison, block_efficiency
from draftproof.engine.request import Output
from draftproof.engine.stats import Seconds


def tell(line: str, *, dim: bool = False) -> None:
    """Print a line on stderr."""
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    console.print(line, style="dim" if dim else None)


def summary(outputs: Sequence[Output], seconds: float) -> str:
    """One line: speed, what was accepted, which parts ran, whether the law is the target's, where the time went."""
    tokens = sum(output.stats.num_tokens for output in outputs)
    parts = [
        f"{tokens} tokens in {seconds:.2f} s",
        f"{tokens / seconds:.1f} tokens/s" if seconds > 0 else "",
        f"{block_efficiency(outputs):.2f} tokens per target call",
        _acceptance(outputs),
        _composition(outputs[0]),
        "lossless" if all(output.lossless for output in outputs) else "LOSSY: the output law is not the target's",
        _time_split(outputs),
    ]
    return " | ".join(part for part in parts if part)


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


@contextmanager
def progress(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """Two functions: write a finished text to stdout, and count it on a bar on stderr where that is a terminal."""
    console = Console(stderr=True)
    if total == 1 or not console.is_terminal:
        yield write, lambda: None
        return
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Standard output is left alone: it may be a file, and rich would send it to the bar's console.
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("", total=total)
        yield lambda text: _write_above(bar, text), lambda: bar.advance(task)


def _write_above(bar: Progress, text: str) -> None:
    """Write with the bar out of the way: both may be on one terminal."""
    bar.stop()
    write(text)
    bar.start()


def write(text: str) -> None:
    """Write to stdout now: a closed pipe is noticed here, and not at exit."""
    sys.stdout.write(text)
    sys.stdout.flush()
