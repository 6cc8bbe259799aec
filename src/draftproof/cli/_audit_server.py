"""`draftproof audit server`: is a running server lossless? Against the target's weights, or against a second server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from draftproof.audit.served.run import Options as Audited
from draftproof.cli._options import Options, with_options
from draftproof.cli._prompts import read_prompts
from draftproof.cli._results import print_table

if TYPE_CHECKING:
    from draftproof.audit.served.report import ServerReport

_HELP_KEY = "The server's API key; better in the variable DRAFTPROOF_AUDIT_KEY, which no list of processes shows."
_HELP_REFERENCE_KEY = "That of the second server, or DRAFTPROOF_REFERENCE_KEY."


@with_options(options=[Options(Audited, names={"checks": "check"}, metavars={"checks": "NAME"}, repeatable=True)])
def server(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server, for example http://127.0.0.1:8000.")],
    *,
    options: Any,
    target: Annotated[str | None, typer.Option(help="The weights it serves: a name, hub id or directory.")] = None,
    draft: Annotated[str | None, typer.Option(help="Its draft model, if known: finds subtler faults.")] = None,
    reference_url: Annotated[str | None, typer.Option(help="A second server without speculation, instead.")] = None,
    api_key: Annotated[str | None, typer.Option(metavar="KEY", help=_HELP_KEY)] = None,
    reference_api_key: Annotated[str | None, typer.Option(metavar="KEY", help=_HELP_REFERENCE_KEY)] = None,
    model: Annotated[str | None, typer.Option(help="Name of the served model; default the first listed.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A file with a prompt on each line, or .jsonl.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that one request may take.")] = 120.0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for answers and report; the same command goes on there.")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the report for the server's maintainers.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on each line.")] = False,
) -> None:
    """Is the server you run lossless? Draw answers, and test every sampled token under the target; exit code 1 if not.

    OPENAI_API_KEY is read too, and goes to https://api.openai.com only.
    """
    from draftproof.audit.served.checks import PROMPTS
    from draftproof.errors import UserError

    if (target is None) == (reference_url is None):
        raise UserError("give either --target (the weights that the server serves) or --reference-url")
    chosen = Audited(**options)
    texts = list(PROMPTS) if prompts is None else [each.text for each in read_prompts(prompts)]
    with _shown() as progress:
        made = {"model": model, "timeout": timeout, "key": api_key}
        if target is not None:
            report = _against_weights(url, target, draft, chosen, texts, out, made, progress)
        else:
            assert reference_url is not None, "one of them is given"
            other = {**made, "key": reference_api_key, "key_name": "DRAFTPROOF_REFERENCE_KEY"}
            report = _against_server(url, reference_url, chosen, texts, made, other, progress)
    _write(report, out)
    if as_json:
        for finding in report.findings:
            typer.echo(json.dumps(finding.to_dict()))
        typer.echo(json.dumps(report.to_dict()))
    elif markdown:
        typer.echo(report.markdown(), nl=False)
    else:
        from draftproof.audit.served.report import HEADS

        print_table(HEADS, report.rows())
        typer.echo(f"\n{report.conclusion()}")
    if report.verdict == "FAIL":
        raise typer.Exit(1)


def _against_weights(
    url: str,
    target: str,
    draft: str | None,
    options: Audited,
    texts: Sequence[str],
    out: Path | None,
    made: dict[str, Any],
    progress: Callable[[str, int, int], None],
) -> ServerReport:
    from draftproof.audit.served.client import Client
    from draftproof.audit.served.report import ServerReport
    from draftproof.audit.served.run import Audit, settle
    from draftproof.audit.served.scoring import Reference
    from draftproof.provenance import run_facts

    facts = run_facts()
    client = Client(url, **made)
    dtype = settle(options)
    right = Reference.load(target, draft)
    rounded = None if dtype is None else Reference.load(target, draft, dtype=dtype)
    audit = Audit(client, right, options, texts, rounded=rounded, folder=out, progress=progress)
    findings = asyncio.run(audit.run())
    named = f"{target} in float32" + (f", with the draft model {draft}" if draft else "")
    return ServerReport(audit.server, named, options, texts, findings, facts)


def _against_server(
    url: str,
    reference_url: str,
    options: Audited,
    texts: Sequence[str],
    made: dict[str, Any],
    other: dict[str, Any],
    progress: Callable[[str, int, int], None],
) -> ServerReport:
    from draftproof.audit.served.client import Client
    from draftproof.audit.served.pairs import audit_pair, words
    from draftproof.audit.served.report import ServerReport
    from draftproof.provenance import run_facts

    facts = run_facts()
    clients = Client(url, **made), Client(reference_url, **other)
    found, findings = asyncio.run(audit_pair(*clients, options, texts, words, progress=progress))
    return ServerReport(found, f"the server at {reference_url}", options, texts, findings, facts)


def _write(report: ServerReport, out: Path | None) -> None:
    if out is None:
        return
    from draftproof.files import whole_file

    out.mkdir(parents=True, exist_ok=True)
    with whole_file(out / "report.md") as path:
        path.write_text(report.markdown(), encoding="utf-8")
    with whole_file(out / "report.json") as path:
        whole = {**report.to_dict(), "findings": [finding.to_dict() for finding in report.findings]}
        path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


@contextmanager
def _shown() -> Iterator[Callable[[str, int, int], None]]:
    """Shows the progress of each check on stderr, where that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console, tasks = Console(stderr=True), dict[str, Any]()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:

        def advance(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done)

        yield advance
