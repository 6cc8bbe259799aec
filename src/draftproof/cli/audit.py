"""`draftproof audit`: checks of verification rules (ours, yours, other packages') and of running servers."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import methodcaller
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer.core import TyperGroup

from draftproof.audit.check import Candidate, CheckLine, Kind, RuleCheckOptions, load_rule, shapes
from draftproof.audit.check import check as lines_of
from draftproof.cli import _audit_server
from draftproof.cli._options import Options, with_options
from draftproof.cli._output import print_table
from draftproof.progress import bar, silent

if TYPE_CHECKING:
    from draftproof.audit.adapters import Report
    from draftproof.audit.rules import Line, RuleLine


class Audits(TyperGroup):
    """A group in which `package.module:function` is short for `check package.module:function`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """The command; `check` if the first word is a target."""
        named = args[0] in self.commands or ":" not in args[0]
        return super().resolve_command(ctx, args if named else ["check", *args])


app = typer.Typer(cls=Audits, add_completion=False, no_args_is_help=True)
app.command()(_audit_server.server)
_log = logging.getLogger(__name__)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on each line.")]
Full = Annotated[bool, typer.Option("--full/--quick", help="More models (minutes), or fewer (half a minute).")]
EXACT = 1e-12
RULE_HEADS = ("rule", "drafts", "lossless", "total variation", "worst on", "accepted", "x token", "of optimum", "")
CLAIM_HEADS = ("identity", "total variation", "worst on", "")
CHECK_HEADS = ("model", "drafts", "total variation", "p-value", "detectable", "")
OTHER_HEADS = ("model", "drafts", "total variation", "worst outcome", "")
ORDER_HEADS = ("ordering", "smallest margin", "worst on", "")
SPRINTER_HEADS = ("pair", "verifier", "accepts", "distance", "eta TV", "drift", "eta_FP", "eta_FP TV", "")
SPRINTER_NOTE = (
    "After every context of two tokens. accepts: mass of the draft that the verifier accepts. distance: total\n"
    "variation between the enumerated distribution of the first token and the one that follows from the verifier's\n"
    "decisions.\n"
    "eta TV: |drift - eta TV(p, q)|, where eta is the accepted share of the excess (q - p)+ in each context, as in\n"
    "Theorem 3.1 of SPRINTER, arXiv 2502.04557. Both are the largest over the contexts. drift: total variation from\n"
    "the target, mean over contexts. eta_FP TV: the theorem with one rate for all contexts. It differs from the drift\n"
    "where the verifier's error rate depends on the context."
)
NOTE = (
    "Exact, by enumeration of every draft and every choice on toy models of three tokens. total variation: from the\n"
    "target's distribution, the largest over the suite. accepted: expected accepted tokens of a round, mean over\n"
    "the suite. x token: divided by that of token verification on one chain of the same length. of optimum: divided\n"
    "by the full-information bound (one chain) or by alpha_k (several chains, first token). greedy_block and\n"
    "gumbel, whose rounds depend on each other, are enumerated in the engine (by --quick on four of the models)."
)


@app.callback()
def _group() -> None:
    """Check verification rules (ours, yours and those of other packages) and running servers.

    `draftproof audit package.module:function` is short for `draftproof audit check package.module:function`.
    """


@app.command()
def rules(
    *,
    rule: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this rule; can be repeated.")] = None,
    full: Full = False,
    as_json: Json = False,
) -> None:
    """Enumerate our own rules on adversarial toy models; exit code 1 if a distribution is wrong."""
    from draftproof.audit.rules import audit_rules, count_lines

    names = rule or []
    lines = _collected(audit_rules(names, full=full), count_lines(names), "auditing", as_json=as_json)
    if not as_json:
        _print_lines(lines)
    _exit_unless(all(line.verdict != "FAIL" for line in lines))


@app.command()
def compositions(
    *,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print docs/compositions.md instead of enumerating.")
    ] = False,
    full: Full = False,
    as_json: Json = False,
) -> None:
    """Enumerate every lossless drafter with every stopper and rule; exit code 1 if one is not exact."""
    from draftproof.audit.compositions import compositions as all_of_them
    from draftproof.audit.compositions import markdown as page

    made = list(all_of_them())
    if markdown:
        typer.echo(page(made), nl=False)
        return

    def distances() -> Iterator[tuple[Any, float | None]]:
        for one in made:
            yield one, one.distance() if one.lossless and not one.refused and (full or not one.slow) else None

    def shown(found: Any) -> dict[str, Any]:
        one, distance = found
        return {**one.to_dict(), "total_variation": distance}

    found = _collected(distances(), len(made), "enumerating", as_json=as_json, shown=shown)
    enumerated = [(one, distance) for one, distance in found if distance is not None]
    if not as_json:
        rows = [(one.drafter, one.stopper, one.rule, f"{far:.1e}", _verdict(far < EXACT)) for one, far in enumerated]
        print_table(("drafter", "stopper", "rule", "total variation", ""), rows)
    _exit_unless(all(distance < EXACT for _, distance in enumerated))


@app.command()
def sprinter(
    *,
    pairs: Annotated[int, typer.Option(min=1, max=50, help="Toy pairs to train verifiers on.")] = 4,
    as_json: Json = False,
) -> None:
    """Train small verifiers on toy pairs and enumerate SPRINTER's output; exit code 1 if Theorem 3.1 does not hold."""
    from draftproof.audit.sprinter import audit_sprinter

    lines = _collected(audit_sprinter(pairs), 2 * pairs, "training and enumerating", as_json=as_json)
    if not as_json:
        rows = [
            (
                *(line.pair, line.verifier, f"{line.passed:.0%}", f"{line.distance:.1e}", f"{line.excess:.1e}"),
                *(f"{line.drift:.4f}", f"{line.eta_fp:.3f}", f"{line.predicted:.4f}", _verdict(line.exact)),
            )
            for line in lines
        ]
        print_table(SPRINTER_HEADS, rows)
        typer.echo(SPRINTER_NOTE)
    _exit_unless(all(line.exact for line in lines))


@app.command()
@with_options(options=[Options(RuleCheckOptions)])
def check(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The rule, as package.module:function.")],
    *,
    kind: Annotated[str | None, typer.Option(help="chain or path; by default a trial call decides.")] = None,
    options: dict[str, Any],
    full: Full = False,
    as_json: Json = False,
) -> None:
    """Check a rule of your own against the target's distribution; exit code 1 if it fails.

    The rule has the signature of token_verify (chain) or of spectr_verify (path).
    If all its randomness comes from a keyword rng, its output distribution is enumerated.
    Without this keyword it is sampled, and the result says which differences the test can detect.

    TARGET is imported and run: only name code that you trust.
    """
    if kind not in {None, "chain", "path"}:
        raise typer.BadParameter(f"--kind: expected chain or path, got {kind!r}")
    candidate = load_rule(target, cast(Kind | None, kind))
    chosen = RuleCheckOptions(**options)
    found = lines_of(candidate, chosen, full=full)
    lines: list[CheckLine] = _collected(found, len(shapes(candidate, full=full)), target, as_json=as_json)
    passed = all(line.verdict == "ok" for line in lines)
    if as_json:
        typer.echo(json.dumps(_conclusion(candidate, lines, chosen, passed=passed)))
    else:
        typer.echo(f"{target}: a {candidate.kind} rule, {_method(candidate, chosen.samples)}\n")
        _print_checks(lines)
        typer.echo(f"\n{_in_words(candidate, lines, chosen, passed=passed)}")
    _exit_unless(passed)


@app.command()
def packages(
    *,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only audits whose names start with NAME; can be repeated.")
    ] = None,
    full: Full = False,
    as_json: Json = False,
) -> None:
    """Check the rules of other installed packages; exit code 1 if one is not lossless.

    transformers is enumerated: its rule, and the output of `generate` with each of its draft generators.
    vLLM and SGLang are tested by statistics, in an environment where they are installed.
    """
    from draftproof.audit.adapters import chosen

    audits = chosen(only or [])
    reports = _collected((run(full=full) for run in audits), len(audits), "auditing", as_json=as_json)
    if not as_json:
        for report in reports:
            _print_report(report)
    _exit_unless(all(report.status != "FAIL" for report in reports))


@app.command(hidden=True)
def others(*, full: Full = False, as_json: Json = False) -> None:
    """Check the rules of other packages: the old name of `packages`."""
    _log.warning("audit others is now audit packages: the old name will be removed in the next version")
    packages(full=full, as_json=as_json)


def _method(candidate: Candidate, samples: int) -> str:
    if candidate.takes_rng:
        return "enumerated: every draft, and every outcome of its rng"
    return f"sampled {samples} times on each model: it has no keyword rng"


def _print_checks(lines: Sequence[CheckLine]) -> None:
    print_table(CHECK_HEADS, [_check_row(line) for line in lines])
    first = {why: (line.model, chance) for line in reversed(lines) for why, chance in line.failures.items()}
    for why, (model, chance) in first.items():
        typer.echo(f"on {model} it {why}" + (f" (probability {chance:.2g})" if chance else ""))


def _check_row(line: CheckLine) -> tuple[str, ...]:
    return (
        line.model,
        line.drafts,
        f"{line.total_variation:.1e}",
        "" if line.p_value is None else f"{line.p_value:.2g}",
        "" if line.detectable is None else f"{line.detectable:.4f}",
        line.verdict,
    )


def _conclusion(
    candidate: Candidate, lines: Sequence[CheckLine], options: RuleCheckOptions, *, passed: bool
) -> dict[str, Any]:
    worst = max(lines, key=lambda line: (line.verdict == "FAIL", line.total_variation))
    detectable = [line.detectable for line in lines if line.detectable is not None]
    return {
        "kind": "rule",
        "target": candidate.name,
        "signature": candidate.kind,
        "method": worst.method,
        "verdict": "ok" if passed else "FAIL",
        "worst_model": worst.model,
        "worst_cell": worst.worst_cell._asdict(),
        "total_variation": worst.total_variation,
        "tolerance": options.tolerance if candidate.takes_rng else None,
        "false_alarm_rate": None if candidate.takes_rng else options.alpha,
        "detectable": max(detectable) if detectable else None,
        "power": 0.99 if detectable else None,
    }


def _in_words(candidate: Candidate, lines: Sequence[CheckLine], options: RuleCheckOptions, *, passed: bool) -> str:
    """The verdict on the rule, and the power of the test."""
    result = _conclusion(candidate, lines, options, passed=passed)
    power = (
        ""
        if result["detectable"] is None
        else f" A right rule fails with probability {options.alpha:g} at most; a rule with a total variation of "
        f"{result['detectable']:.4f} on one of these models is detected with probability 0.99."
    )
    if passed:
        below = "" if power else f", to a total variation below {options.tolerance:g}"
        return f"ok: the target's distribution{below}.{power}"
    cell = result["worst_cell"]
    return (
        f"FAIL: total variation {result['total_variation']:.2g} on {result['worst_model']}; worst outcome "
        f"{' '.join(map(str, cell['outcome']))}: {cell['found']:.6g} instead of {cell['expected']:.6g}.{power}"
    )


def _print_report(report: Report) -> None:
    version = f" {report.version}" if report.version else ""
    typer.echo(f"{report.package}{version}: {report.rule}: {report.status}")
    for lines, width, limit in ((report.lines, "float64", "1e-12"), (report.rounded, "float32", "1e-06")):
        if lines:
            typer.echo(f"\nin {width}, with a total variation below {limit} required:")
            print_table(OTHER_HEADS, [_other_row(line) for line in lines])
    if report.sampled:
        typer.echo("\nby statistics, in float32:")
        print_table(CHECK_HEADS, [_check_row(line) for line in report.sampled])
    for note in report.notes:
        typer.echo(f"\nnote: {note}")


def _other_row(line: CheckLine) -> tuple[str, ...]:
    cell = line.worst_cell
    worst = f"{' '.join(map(str, cell.outcome))}: {cell.found:.6g} instead of {cell.expected:.6g}"
    return (line.model, line.drafts, f"{line.total_variation:.1e}", worst, line.verdict)


def _print_lines(lines: Sequence[Line]) -> None:
    from draftproof.audit.rules import RuleLine

    print_table(RULE_HEADS, [_rule_row(line) for line in lines if isinstance(line, RuleLine)])
    claims = [line for line in lines if not isinstance(line, RuleLine)]
    for heads, kind in ((CLAIM_HEADS, "identity"), (ORDER_HEADS, "ordering")):
        own = [line for line in claims if line.kind == kind]
        rows = [(line.claim, f"{line.value:.1e}", line.worst_model, line.verdict) for line in own]
        if rows:
            typer.echo("")
            print_table(heads, rows)
    typer.echo("")
    typer.echo(NOTE)


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


def _verdict(good: bool) -> str:
    return "ok" if good else "FAIL"


def _exit_unless(good: bool) -> None:
    if not good:
        raise typer.Exit(1)


def _collected(
    lines: Iterable[Any],
    total: int,
    words: str,
    *,
    as_json: bool,
    shown: Callable[[Any], dict[str, Any]] = methodcaller("to_dict"),
) -> list[Any]:
    """The lines of an audit, made with progress on stderr if that is a terminal; as JSON each is printed at once."""
    import torch

    torch.set_num_threads(1)  # tensors of three tokens
    made = []
    with (bar if sys.stderr.isatty() else silent)(words, total, 0) as tick:
        for line in lines:
            made.append(line)
            tick(len(made))
            if as_json:
                typer.echo(json.dumps(shown(line)))
    return made
