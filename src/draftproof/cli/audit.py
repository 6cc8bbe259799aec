"""`draftproof audit`: check verification rules, ours, the user's own and other people's.

Knows: options, tables, exit codes. Does not know: how a law is found.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from draftproof.audit.rules import ClaimLine, Line, RuleLine


class Audits(TyperGroup):
    """A group that takes `package.module:function` for `check package.module:function`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command, `check` where a target stands in its place."""
        named = args[0] in self.commands or ":" not in args[0]
        return super().resolve_command(ctx, args if named else ["check", *args])


app = typer.Typer(
    cls=Audits,
    add_completion=False,
    no_args_is_help=True,
)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]
Full = Annotated[bool, typer.Option("--full/--quick", help="More models, minutes; or about half a minute.")]
RULE_HEADS = ("rule", "drafts", "lossless", "total variation", "worst on", "accepted", "x token", "of optimum", "")
CLAIM_HEADS = ("identity", "total variation", "worst on", "")
ORDER_HEADS = ("ordering", "smallest margin", "worst on", "")
NOTE = (
    "Exact, by enumeration of every draft and every choice on toy models of three tokens. total variation:\n"
    "from the target's law, the largest over the suite. accepted: expected tokens a round, mean over the suite.\n"
    "x token: against token verification of one chain as long. of optimum: of the full-information bound (one chain),\n"
    "of alpha_k (several chains, their first token). greedy_block, which has a state, is enumerated through the engine."
)


@app.callback()
def _group() -> None:
    """Check verification rules: ours, yours, other people's.

    `draftproof audit package.module:function` is short for `draftproof audit check package.module:function`.
    """


@app.command()
def rules(
    *,
    rule: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this rule; may be repeated.")] = None,
    full: Full = False,
    as_json: Json = False,
) -> None:
    """Enumerate the laws of our own rules on adversarial toy models; exit code 1 if one is not what it should be."""
    import torch

    from draftproof.audit.rules import audit_rules, count_lines

    torch.set_num_threads(1)  # tensors of three tokens
    names = rule or []
    lines = []
    for line in _counted(audit_rules(names, full=full), count_lines(names), "auditing"):
        lines.append(line)
        if as_json:
            typer.echo(json.dumps(line.to_dict()))
    if not as_json:
        _print_lines(lines)
    if any(line.verdict == "FAIL" for line in lines):
        raise typer.Exit(1)


def _print_lines(lines: Sequence[Line]) -> None:
    from draftproof.audit.rules import RuleLine

    _table(RULE_HEADS, [_rule_row(line) for line in lines if isinstance(line, RuleLine)])
    claims = [line for line in lines if not isinstance(line, RuleLine)]
    for heads, kind in ((CLAIM_HEADS, "identity"), (ORDER_HEADS, "ordering")):
        rows = [_claim_row(line) for line in claims if line.kind == kind]
        if rows:
            typer.echo("")
            _table(heads, rows)
    typer.echo("")
    typer.echo(NOTE)
    loose = [line for line in lines if isinstance(line, RuleLine) and (line.tolerance or 0) > 1e-12]
    for line in loose:
        typer.echo(f"{line.rule} is held to {line.tolerance:g}, the tolerance of its linear program; others to 1e-12.")


def _rule_row(line: RuleLine) -> tuple[str, ...]:
    return (
        line.rule,
        line.drafted,
        "yes" if line.lossless else "no",
        f"{line.total_variation:.1e}",
        line.worst_model,
        f"{line.accepted:.4f}",
        f"{line.against_token:.3f}",
        "" if line.of_optimum is None else f"{line.of_optimum:.1%}",
        line.verdict,
    )


def _claim_row(line: ClaimLine) -> tuple[str, ...]:
    return (line.claim, f"{line.value:.1e}", line.worst_model, line.verdict)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns two spaces apart, as wide as they must be: they are also read from files."""
    lines = [heads, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    for line in lines:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _counted(items: Iterable[Any], total: int, words: str) -> Iterator[Any]:
    """The items, counted on a bar on stderr where that is a terminal."""
    with _bar(total, words) as advance:
        for item in items:
            advance()
            yield item


@contextmanager
def _bar(total: int, words: str) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda: None
        return
    with Progress(console=console, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(words, total=total)
        yield lambda: bar.advance(task)
