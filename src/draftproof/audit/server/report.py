"""The report of a server's audit: for the terminal, as JSON, and as a page in Markdown for the server's maintainers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from draftproof.audit.server.run import FAIL, OK, REFUSED, CheckResult, ServerAuditOptions, worst
from draftproof.errors import printable
from draftproof.provenance import header
from draftproof.results import table

HEADS = ("check", "verdict", "answers", "tokens", "p-value", "excluded", "why")


@dataclass(frozen=True)
class ServerReport:
    """Everything that an audit found: what the server says of itself, what it was compared with, and the findings."""

    server: Mapping[str, Any]
    reference: str
    options: ServerAuditOptions
    prompts: Sequence[str]
    findings: Sequence[CheckResult]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Of the whole server: "ok", "FAIL" or "open"."""
        return worst(self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The last line of JSON."""
        return {
            "kind": "server",
            "verdict": self.verdict,
            "server": dict(self.server),
            "reference": self.reference,
            "options": asdict(self.options),
            "checks": {finding.check.name: finding.verdict for finding in self.findings},
            "provenance": dict(self.facts),
        }

    def rows(self) -> list[tuple[str, ...]]:
        """A row for each check."""
        return [_row(finding) for finding in self.findings]

    def conclusion(self) -> str:
        """The verdict in words."""
        failed = [finding.check.name for finding in self.findings if finding.verdict == FAIL]
        skipped = [finding.check.name for finding in self.findings if finding.verdict == REFUSED]
        alpha = self.options.alpha
        said = {
            FAIL: f"FAIL: {', '.join(failed)}. A right server fails in any check with probability {alpha:g} at most.",
            OK: f"ok: no fault found (a right server fails with probability {alpha:g} at most). Faults in "
            f"{self.options.share:.0%} of the tokens are excluded, each kind with error rate {self.options.beta:g}, "
            "except for kinds that the budget is too small for.",
        }.get(self.verdict, "open: no fault found, and some kinds are not excluded; a larger --budget tells more")
        return said + (f" Refused by the server: {', '.join(skipped)}." if skipped else "")

    def markdown(self) -> str:
        """A page for the server's maintainers."""
        lines = [f"# Audit of {self.server.get('model')} at {self.server.get('url')}", ""]
        lines += [f"**{self.conclusion()}**", ""]
        lines += header(self.facts) if self.facts else []
        served = ", ".join(f"{key} {value}" for key, value in self.server.items() if value and key != "url")
        lines += [f"- Server: {served}.", f"- Reference: {self.reference}, without speculation."]
        options = asdict(self.options)
        lines += [f"- Options: {', '.join(f'{name} {value}' for name, value in options.items() if value != ())}.", ""]
        lines += table(HEADS, [[cell.replace("|", "\\|") for cell in row] for row in self.rows()])
        lines += ["", "## How to read this", "", *_METHOD]
        for finding in self.findings:
            lines += _details(finding)
        lines += ["", "## Prompts", "", *[f"- `{json.dumps(text)}`" for text in self.prompts]]
        return "\n".join(printable(part) for line in lines for part in line.split("\n")) + "\n"


_METHOD = (
    "Each answer is read by the reference, which gives the distribution p of every token after the request's sampling",
    "parameters. Bets on kinds of faults multiply a wealth by 1 + e (r/p - 1) for each token, where r is what the",
    "fault would draw from. While the server is right, the mean wealth exceeds 1/a with probability a at most,",
    "whenever one looks; its inverse is the p-value. `excluded` is the smallest share of tokens that every kind of",
    "fault is known to stay below. The slack is how much the mean of r/p may exceed 1 because server and reference",
    "round differently: twice what the same weights in the server's arithmetic showed on the prompts. Smaller faults",
    "are not detected. `needed`: about how many tokens a fault in the stated share of the tokens takes.",
)


def _row(finding: CheckResult) -> tuple[str, ...]:
    evidence = finding.evidence
    kinds = evidence.get("kinds", [])
    shares = [one["excluded_share"] for one in kinds]
    excluded = "" if not shares or None in shares else f"{max(shares):.0%}"
    p_value = "" if not evidence else f"{evidence['p_value']:.2g}"
    counts = (str(finding.answers), str(finding.tokens))
    return (finding.check.name, finding.verdict, *counts, p_value, excluded, printable(finding.why))


def _details(finding: CheckResult) -> list[str]:
    lines = ["", f"## {finding.check.name}: {finding.verdict}", "", f"{finding.check.about}. {finding.why}."]
    if finding.left_out:
        lines += ["", f"{finding.left_out} answers were left out: their sampled tokens cannot be known."]
    kinds = finding.evidence.get("kinds", [])
    if kinds:
        rows = [
            (
                one["kind"],
                f"{one['e_value']:.3g}",
                "none" if one["excluded_share"] is None else f"{one['excluded_share']:.0%}",
                f"{finding.slack[one['kind']]:.2g}",
                finding.needed[one["kind"]] or "-",
            )
            for one in kinds
        ]
        lines += ["", *table(("kind of fault", "largest e-value", "excluded from", "slack", "needed"), rows)]
    if len(finding.broken) > 1:
        lines += ["", *[f"- {what}" for what in finding.broken[:10]]]
    if finding.examples:
        lines += ["", "Requests (POST /v1/completions) to reproduce it:", "", "```json"]
        lines += [json.dumps(example) for example in finding.examples]
        lines += ["```"]
    return lines
