"""Faults found and false alarms of `draftproof audit server` over 200 runs on the small embedded pair.

    python scripts/audit_table.py --out docs/results/audit_server

Each run audits our own server, in this process, in one check. Runs that are done are kept beside the results, so an
interrupted measurement goes on. The audits send seeds, so every run can be repeated.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import common
import httpx
import torch

from draftproof import Engine
from draftproof.audit.server.checks import PROMPTS
from draftproof.audit.server.client import Client
from draftproof.audit.server.run import ServerAudit, ServerAuditOptions
from draftproof.audit.server.scoring import Reference
from draftproof.provenance import run_facts
from draftproof.results import Results, table
from draftproof.server.app import Server, make_app
from draftproof.server.settings import Settings

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support.faulty_engines import FAULTS, faulty_engine

TARGET, DRAFT = "embedded:target", "embedded:fast-draft"
CHECKS = ("plain", "temperature", "top_p", "min_p", "presence", "repetition", "logit_bias", "top_k")
HONEST, FAULTY = 88, 20
SUBTLE, WRONG = 12, 8  # audits of the subtlest fault, which take longest; and with the arithmetic stated wrongly
BUDGETS = {"token residual in block verification": 30_000, "penalty forgets drafted tokens": 12_000}
SETTINGS = {  # name: (dtype of the server, whether the draft model is known, numerics of the audit)
    "float32, draft model known": ("float32", True, "float32"),
    "float32, draft model not known": ("float32", False, "float32"),
    "bfloat16, audited as bfloat16": ("bfloat16", True, "bfloat16"),
    "bfloat16, audited as float32 (wrong)": ("bfloat16", True, "float32"),
}


def runs() -> Iterator[tuple[str, str, str, int, int]]:
    """What is served, the setting, the check, the seed, the budget."""
    names = list(SETTINGS)
    for number in range(HONEST):
        yield "none", names[number % 4 if number % 4 < 3 else 0], CHECKS[number // 4 % len(CHECKS)], number, 3000
    for fault, (_, _, check) in FAULTS.items():
        for number in range(SUBTLE if fault.startswith("token residual") else FAULTY):
            yield fault, names[0], check, number, BUDGETS.get(fault, 3000)
    for number in range(WRONG):  # beside the 200: what happens where the arithmetic is not stated
        yield "none", names[3], CHECKS[number % len(CHECKS)], 1000 + number, 3000


class Bench:
    """Loaded engines and references, shared by all runs."""

    def __init__(self) -> None:
        self._engines = {dtype: self._engine(dtype) for dtype in ("float32", "bfloat16")}
        self._right = Reference.load(TARGET, DRAFT)
        self._rounded = Reference.load(TARGET, DRAFT, dtype="bfloat16")

    @staticmethod
    def _engine(dtype: str) -> Engine:
        return Engine.load(
            TARGET,
            DRAFT,
            drafter="model",
            stopper="fixed:8",
            verifier="block",
            max_batch=64,
            dtype=dtype,
            generation_config="none",
        )

    async def run(self, served: str, setting: str, check: str, seed: int, budget: int) -> dict[str, Any]:
        """One audit."""
        dtype, known, numerics = SETTINGS[setting]
        engine = self._engines[dtype]
        if served != "none":
            engine = faulty_engine(served, engine)
        right = (
            self._right
            if known
            else Reference(self._right.target, self._right.tokenizer, eos_token_ids=self._right.ends)
        )
        options = ServerAuditOptions(
            checks=(check,),
            numerics=numerics,
            seeds=True,
            seed=seed,
            parallel=64 if budget > 3000 else 16,
            budget=budget,
        )
        app = make_app(Server(engine, Settings(), "story"))
        async with app.router.lifespan_context(app):
            client = Client("http://server", transport=httpx.ASGITransport(app))
            rounded = self._rounded if numerics == "bfloat16" else None
            (finding,) = await ServerAudit(client, right, options, PROMPTS, rounded=rounded).run()
        likely = max(finding.evidence["kinds"], key=lambda one: one["e_value"])["kind"]
        return {
            "verdict": finding.verdict,
            "tokens": finding.tokens,
            "p": finding.evidence["p_value"],
            "likely": likely,
        }


def measured(path: Path, part: tuple[int, int], commit: str | None) -> list[dict[str, Any]]:
    """Every run, those from the files first; only runs of this part are made, by code of this commit."""
    files = sorted(path.parent.glob(f"{path.name}.runs*.jsonl"))
    done = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    kept = {tuple(each["run"]): each for each in done}
    bench = None
    wanted = sorted(enumerate(runs()), key=lambda each: (each[1][4] > 3000, each[1][0] == "none"))
    for number, run in wanted:
        if run not in kept and number % part[1] == part[0]:
            bench = bench or Bench()
            kept[run] = {"run": run, **asyncio.run(bench.run(*run)), "commit": commit}
            with path.with_name(f"{path.name}.runs{part[0]}.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(kept[run]) + "\n")
            print(number, kept[run], flush=True)
    return [kept[run] for run in runs() if run in kept]


def page(found: list[dict[str, Any]]) -> list[str]:
    """The tables."""
    rows = []
    for fault, (_, _, check) in FAULTS.items():
        own = [each for each in found if each["run"][0] == fault]
        caught = [each for each in own if each["verdict"] == "FAIL"]
        missed = [sum(each["verdict"] == verdict for each in own) for verdict in ("open", "ok")]
        if not own:
            continue
        tokens = [each["tokens"] for each in caught]
        names = sorted({each["likely"] for each in caught})
        shown = f"{median(tokens):.0f} [{min(tokens)}, {max(tokens)}]" if tokens else "-"
        rows.append((fault, check, len(own), len(caught), *missed, shown, "; ".join(names)))
    honest = []
    for setting in SETTINGS:
        own = [each for each in found if each["run"][0] == "none" and each["run"][1] == setting]
        if not own:
            continue
        counts = [sum(each["verdict"] == verdict for each in own) for verdict in ("FAIL", "ok", "open")]
        honest.append((setting, len(own), *counts))
    total = sum(each["run"][1] != list(SETTINGS)[3] for each in found)
    planned = HONEST + 5 * FAULTY + SUBTLE
    heads = ("fault", "check", "audits", "found", "open", "ok", "tokens until found, median and range", "looks like")
    commits = Counter(each["commit"] for each in found)
    return [
        f"{total} audits of our own server (of {planned} planned), right and faulty on purpose, each in one check",
        f"with a false-alarm rate of 0.01; {TARGET} with {DRAFT}, 8 drafted tokens. The budget of an audit",
        "was 3000 tokens; 30000 for the token residual and 12000 for the penalties; an audit ends before, once it is",
        "sure.",
        "",
        *table(heads, rows),
        "",
        *table(("right server", "audits", "false alarms", "ok", "open"), honest),
        "",
        "ok: the kinds of faults that 3000 tokens are enough for were excluded, in 10% of the tokens. open: the budget",
        "ended before. Audits of a bfloat16 server as if it had float32 are not counted among them.",
        "",
        f"Audits by the commit they ran at: {', '.join(f'{name} {count}' for name, count in commits.most_common())}.",
    ]


def main() -> None:
    """Measure, and write the page."""
    parser = common.parser(__doc__, out=True)
    parser.add_argument("--part", default="0/1", help="only runs with this number modulo that one; writes no page")
    parser.add_argument("--page", action="store_true", help="write the page from the runs that are kept; run nothing")
    options = parser.parse_args()
    out, part = options.out, tuple(int(each) for each in options.part.split("/"))
    torch.set_num_threads(1)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    facts = run_facts()
    found = measured(out, (1, 1) if options.page else (part[0], part[1]), facts["commit"])
    common.say(options, f"{len(found)} of {len(list(runs()))} runs are done")
    if part[1] > 1 and not options.page:
        return
    title = "Audits of servers: faults found and false alarms"
    common.deliver(options, Results(title, page(found), {"runs": found}, facts))


if __name__ == "__main__":
    main()
