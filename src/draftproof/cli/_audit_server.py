"""`draftproof audit server`: is a running server lossless? Against the target's weights, or against a second server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from draftproof.audit.server.checks import PROMPTS
from draftproof.audit.server.client import Client
from draftproof.audit.server.report import HEADS, ServerReport
from draftproof.audit.server.run import CheckResult, ServerAudit, ServerAuditOptions, settle
from draftproof.audit.server.scoring import Reference
from draftproof.audit.server.two_sample import audit_pair, words
from draftproof.cli._options import Options, with_options
from draftproof.cli._output import print_table
from draftproof.cli._prompts import read_prompts
from draftproof.errors import UserError
from draftproof.files import write_json, write_text
from draftproof.provenance import run_facts

_HELP_KEY = "The server's API key; better set the variable DRAFTPROOF_AUDIT_KEY, which process lists do not show."
_HELP_REFERENCE_KEY = "The second server's API key, or DRAFTPROOF_REFERENCE_KEY."


@with_options(
    options=[Options(ServerAuditOptions, names={"checks": "check"}, metavars={"checks": "NAME"}, repeatable=True)]
)
def server(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server, for example http://127.0.0.1:8000.")],
    *,
    options: Any,
    target: Annotated[str | None, typer.Option(help="The weights it serves: a name, hub id or directory.")] = None,
    draft: Annotated[str | None, typer.Option(help="Its draft model, if known, to find subtler faults.")] = None,
    reference_url: Annotated[
        str | None, typer.Option(help="Instead of --target: a second server, without speculation.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(metavar="KEY", help=_HELP_KEY)] = None,
    reference_api_key: Annotated[str | None, typer.Option(metavar="KEY", help=_HELP_REFERENCE_KEY)] = None,
    model: Annotated[str | None, typer.Option(help="Name of the served model; default the first listed.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A file with one prompt per line, or .jsonl.")] = None,
    timeout: Annotated[float, typer.Option(help="Time limit of one request, in seconds.")] = 120.0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for answers and report. Repeat the command to continue a stopped run.")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the report for the server's maintainers.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on each line.")] = False,
) -> None:
    """Check whether a running server is lossless: sample answers, and test every token; exit code 1 if it is not.

    OPENAI_API_KEY is also read, but only sent to https://api.openai.com.
    """
    if (target is None) == (reference_url is None):
        given = "neither" if target is None else "both"
        raise UserError(f"expected --target (the weights that the server serves) or --reference-url, got {given}")
    chosen = ServerAuditOptions(**options)
    texts = list(PROMPTS) if prompts is None else [each.text for each in read_prompts(prompts)]
    facts = run_facts()
    made: dict[str, Any] = {"model": model, "timeout": timeout}
    client = Client(url, key=api_key, **made)
    with _check_progress() as progress:
        if target is not None:
            how = {"folder": out, "progress": progress}
            found, reference, findings = _against_weights(client, (target, draft), chosen, texts, **how)
        else:
            assert reference_url is not None, "one of them is given"
            other = Client(reference_url, key=reference_api_key, key_name="DRAFTPROOF_REFERENCE_KEY", **made)
            reference = f"the server at {reference_url}"
            found, findings = asyncio.run(audit_pair(client, other, chosen, texts, words, progress=progress))
    report = ServerReport(found, reference, chosen, texts, findings, facts)
    _write(report, out)
    if as_json:
        for finding in report.findings:
            typer.echo(json.dumps(finding.to_dict()))
        typer.echo(json.dumps(report.to_dict()))
    elif markdown:
        typer.echo(report.markdown(), nl=False)
    else:
        print_table(HEADS, report.rows())
        typer.echo(f"\n{report.conclusion()}")
    if report.verdict == "FAIL":
        raise typer.Exit(1)


def _against_weights(
    client: Client, names: tuple[str, str | None], options: ServerAuditOptions, texts: Sequence[str], **how: Any
) -> tuple[dict[str, Any], str, list[CheckResult]]:
    """What the server reports about itself, what it was compared with, and the findings."""
    target, draft = names
    dtype = settle(options)
    right = Reference.load(target, draft)
    rounded = None if dtype is None else Reference.load(target, draft, dtype=dtype)
    audit = ServerAudit(client, right, options, texts, rounded=rounded, **how)
    findings = asyncio.run(audit.run())
    return audit.server, f"{target} in float32" + (f", with the draft model {draft}" if draft else ""), findings


def _write(report: ServerReport, out: Path | None) -> None:
    if out is None:
        return
    write_text(out / "report.md", report.markdown())
    findings = [finding.to_dict() for finding in report.findings]
    write_json(out / "report.json", {**report.to_dict(), "findings": findings})


@contextmanager
def _check_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show the progress of each check on stderr, if that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console, tasks = Console(stderr=True), dict[str, Any]()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:

        def advance(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done)

        yield advance
