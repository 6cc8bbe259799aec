"""Draft heads of several formats for one target: acceptance of each place, tokens per target call, time per round.

    python scripts/head_formats.py smollm2-135m --dtype bfloat16 --head one=feature_head:DIR --head other=eagle3:DIR
        --texts TEST.txt --prompts INSTRUCTIONS.jsonl --out docs/results/head_formats

Acceptance is exact at each measured place: 1 - TV of the target's and the head's distributions at temperature 1, along
known tokens, computed by the code that drafts. Times are measured in turns: one request by every head, in an order that
rotates, then the next request.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import common
import torch

from draftproof import Engine, SamplingParams, models
from draftproof.backends.base import Feed, unread
from draftproof.backends.heads.base import HeadSession, TargetHead
from draftproof.backends.heads.feature_head import FeatureBackend
from draftproof.backends.heads.feature_net import load_net
from draftproof.backends.heads.published.eagle3 import eagle3_backend
from draftproof.backends.heads.published.peagle import PEagleBackend
from draftproof.backends.loading.by_name import Loaded, load_backend
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.loading.tokenization import load_tokenizer
from draftproof.bench.estimate import Estimate, bootstrap, geometric_mean
from draftproof.embedded import feature_head_dir
from draftproof.provenance import FILE, run_facts
from draftproof.results import Results, table
from draftproof.training.evaluation.drafter import ANSWERS, TEXT, held_out_text, own_answers
from draftproof.training.feature_rows import TrainingRow
from draftproof.tree import TokenTree

PLACES = 4
PLAIN = "plain decoding"
TEMPERATURES = (0.0, 1.0)
READERS: dict[str, Callable[[str, Loaded], TargetHead]] = {
    "feature_head": lambda where, target: FeatureBackend(target, load_net(Path(where))),
    "eagle3": eagle3_backend,
    "peagle": PEagleBackend,
}


def main() -> None:
    """Measure, and write the page."""
    given = _arguments()
    facts = run_facts()
    heads = dict(each.split("=", 1) for each in given.head)
    found: dict[str, Any] = {
        "heads": {name: _origin(drafter) for name, drafter in heads.items()},
        "acceptance": [],
        "runs": [],
    }
    tokenizer = load_tokenizer(models.resolve(given.target))
    target = load_backend(given.target, LoadOptions(dtype=given.dtype))
    kinds = {
        TEXT: held_out_text(given.texts, given.form, tokenizer, given.seed, given.trials),
        ANSWERS: own_answers(given.prompts, target, tokenizer, given.seed, given.trials),
    }
    readers = {name: _reader(drafter, target) for name, drafter in heads.items()}
    for kind, (rows, _) in kinds.items():
        for window, row in enumerate(rows):
            made = along(target, readers, row, given.every)
            found["acceptance"] += [{"kind": kind, "window": window, **each} for each in _by_head(made)]
        common.say(given, f"{kind}: acceptance of {len(rows)} windows")
    engines = {name: _engine(given, drafter) for name, drafter in {PLAIN: None, **heads}.items()}
    names = list(engines)
    for turn in range(given.turns + 1):  # the first one warms up
        for kind, (_, prompts) in kinds.items():
            for number, prompt in enumerate(prompts if turn else prompts[:1]):
                for temperature in TEMPERATURES:
                    shift = (turn + number) % len(names)
                    for name in names[shift:] + names[:shift]:
                        run = _run(engines[name], prompt, temperature, given.tokens, 1000 * given.seed + number)
                        at = {"kind": kind, "prompt": number, "temperature": temperature, "turn": turn, "head": name}
                        found["runs"] += [{**at, **run}] if turn else []
        common.say(given, f"runs: turn {turn} of {given.turns}")
    title = f"Formats of draft heads for {given.target}"
    common.deliver(given, Results(title, _lines(given, found), found, facts))


def _arguments() -> argparse.Namespace:
    parser = common.parser(__doc__, out=True)
    parser.add_argument("target")
    parser.add_argument("--head", action="append", required=True, help="NAME=DRAFTER:DIR; the first one is compared to")
    parser.add_argument("--texts", type=Path, action="append", required=True)
    parser.add_argument("--prompts", type=Path, action="append", required=True)
    parser.add_argument("--form", default="paragraphs", help="how texts are separated in .txt files")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--every", type=int, default=16, help="tokens from one measured position to the next")
    parser.add_argument("--trials", type=int, default=6, help="requests of each kind")
    parser.add_argument("--tokens", type=int, default=64, help="of a request")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _where(drafter: str) -> tuple[str, str]:
    """The kind of a drafter and the directory of its head; that of the package where none is named."""
    kind, _, where = drafter.partition(":")
    if kind not in READERS:
        raise SystemExit(f"drafter: expected one of {', '.join(READERS)}, got {kind!r}")
    return kind, where or str(feature_head_dir())


def _origin(drafter: str) -> dict[str, Any]:
    """What a head's directory says of its training."""
    _, _, where = drafter.partition(":")
    file = Path(where) / FILE
    if not where or not file.is_file():
        return {}
    kept = json.loads(file.read_text(encoding="utf-8"))
    return {name: kept[name] for name in ("options", "rows", "seconds", "metrics", "history") if name in kept}


def _reader(drafter: str, target: Loaded) -> TargetHead:
    kind, where = _where(drafter)
    return READERS[kind](where, target)


def _engine(given: argparse.Namespace, drafter: str | None) -> Engine:
    """A target of its own, so that no other head's states are recorded, with a drafter of four tokens."""
    if drafter is None:
        return Engine.load(given.target, drafter="none", dtype=given.dtype, max_batch=1)
    more: dict[str, Any] = {"drafter": drafter, "stopper": f"fixed:{PLACES}", "verifier": "block"}
    return Engine.load(given.target, dtype=given.dtype, max_batch=1, **more)


@torch.inference_mode()
def along(target: Loaded, readers: dict[str, TargetHead], row: TrainingRow, every: int) -> list[dict[str, Any]]:
    """Acceptance of each place of a draft, from positions of one window."""
    tokens = list(row.tokens)
    whole, owner = target.open(), target.open()
    sessions = {name: head.follow(owner) for name, head in readers.items()}
    made: list[dict[str, Any]] = []
    try:
        tree = TokenTree.chain(torch.tensor(tokens[1:], device=target.device))
        p = target.forward([Feed(whole, tokens[:1], tree)])[0].logits.float().softmax(-1)
        for anchor in range(max(row.start, 1), len(tokens) - PLACES + 1, every):
            target.forward([Feed(owner, tokens[owner.stem : anchor])])
            for name, head in readers.items():
                session = sessions[name]
                assert isinstance(session, HeadSession), "made by a head"
                session.rewind()
                fed, accepted = unread(session, tokens[1 - head.back : anchor + 1]), []
                for place in range(PLACES):
                    out = head.forward([Feed(session, fed)])[0]
                    q, best = out.logits[-1].float().softmax(-1), p[anchor + place]
                    accepted.append(float(torch.minimum(q, best if out.ids is None else best[out.ids]).sum()))
                    fed = tokens[anchor + place + 1 : anchor + place + 2]
                made.append({"head": name, "anchor": anchor, "accepted": accepted})
    finally:
        for opened in (*sessions.values(), whole, owner):
            opened.close()
    return made


def _by_head(made: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each head the number of positions of a window, and the mean of each place."""
    rows = []
    for head in dict.fromkeys(each["head"] for each in made):
        mine = [each["accepted"] for each in made if each["head"] == head]
        rows.append(
            {"head": head, "positions": len(mine), "accepted": [fmean(place) for place in zip(*mine, strict=True)]}
        )
    return rows


def _run(engine: Engine, prompt: list[int], temperature: float, tokens: int, seed: int) -> dict[str, Any]:
    """Counts and seconds of one request."""
    params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=seed, ignore_eos=True)
    output = engine.generate([prompt], params)[0]
    stats = output.stats
    return {
        "tokens": stats.num_tokens,
        "calls": stats.num_target_calls,
        "drafts": stats.num_drafts,
        "per_place": stats.num_accepted_tokens_per_pos,
        "seconds": asdict(stats.seconds),
        "text": list(output.token_ids) if not temperature else None,
    }


def _lines(given: argparse.Namespace, found: dict[str, Any]) -> list[str]:
    heads = list(found["heads"])
    lines = ["## How they were trained", "", *_training(found["heads"])]
    for kind in (TEXT, ANSWERS):
        rows = [row for row in found["acceptance"] if row["kind"] == kind]
        cells = [(name, *(_accepted(rows, name, place) for place in range(PLACES))) for name in heads]
        lines += ["", f"## Acceptance, {kind}", ""]
        lines += table(("head", *(f"place {place}" for place in range(1, PLACES + 1))), cells)
    for kind in (TEXT, ANSWERS):
        lines += ["", f"## Runs, {kind}", ""]
        lines += table(
            ("head", "temperature", "tokens per target call", "draft / target call", "draft, ms a round",
             f"speed / {PLAIN}", f"speed / {heads[0]}"),
            [_row(found["runs"], kind, name, temperature, heads[0]) for temperature in TEMPERATURES for name in heads],
        )  # fmt: skip
    same = _same(found["runs"])
    return [
        *lines,
        "",
        f"Acceptance: 1 - TV at temperature 1 along known tokens, at every {given.every}th token of windows of",
        f"{given.texts[0].name} and of the target's answers to held-out instructions; intervals of 95% over windows.",
        f"Runs: {given.trials} requests of each kind, {given.tokens} tokens, {PLACES} drafted tokens, rule block, one",
        f"request at a time, in {given.turns} turns; ratios are geometric means over requests and turns, with t",
        "intervals. The time of a draft is that of all drafted tokens of a round.",
        "",
        f"At temperature 0, {same} outputs equal plain decoding's. In bfloat16 a pass over several tokens rounds",
        "differently from a pass over one, so that the other of two nearly equal logits can be the highest.",
    ]


def _training(heads: dict[str, Any]) -> list[str]:
    """One row for each head that says how it was trained."""
    rows = []
    for name, origin in heads.items():
        if not origin:
            rows.append((name, *["see its README"] * 2, "", "", ""))
            continue
        options, kinds = origin["options"], origin["rows"]
        plan = options["plan"]
        last = [record["loss"] for record in origin["history"] if "loss" in record][-1]
        size = f"{kinds['text']} windows, {kinds['answers']} answers"
        rows.append((name, size, plan["steps"], options["batch"], options["unroll"], f"{last:.2f}"))
    return table(("head", "rows", "steps", "batch", "unroll", "last loss"), rows)


def _accepted(rows: Sequence[dict[str, Any]], head: str, place: int) -> str:
    """The mean over positions, with an interval over windows."""
    windows = [(row["positions"], row["accepted"][place]) for row in rows if row["head"] == head]
    mean = bootstrap(windows, lambda some: sum(n * mean for n, mean in some) / sum(n for n, _ in some))
    return _shown(mean, 3)


def _row(runs: Sequence[dict[str, Any]], kind: str, head: str, temperature: float, first: str) -> tuple[str, ...]:
    def of(name: str) -> list[dict[str, Any]]:
        return [run for run in runs if (run["kind"], run["head"], run["temperature"]) == (kind, name, temperature)]

    mine = of(head)
    per_call = [(sum(run["tokens"] for run in mine if run["prompt"] == number),
                 sum(run["calls"] for run in mine if run["prompt"] == number))
                for number in sorted({run["prompt"] for run in mine})]  # fmt: skip
    calls = bootstrap(per_call, lambda some: sum(one for one, _ in some) / sum(other for _, other in some))
    draft = [run["seconds"]["draft"] / max(run["drafts"], 1) for run in mine]
    share = [each / (run["seconds"]["target"] / run["calls"]) for each, run in zip(draft, mine, strict=True)]
    return (
        head,
        f"{temperature:g}",
        _shown(calls, 2),
        _shown(geometric_mean(share), 2),
        f"{1000 * fmean(draft):.1f}",
        _shown(_speed(mine, of(PLAIN)), 2),
        "" if head == first else _shown(_speed(mine, of(first)), 2),
    )


def _speed(mine: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> Estimate:
    """Tokens a second over those of others, for the same request in the same turn."""
    rates = [[run["tokens"] / run["seconds"]["total"] for run in runs] for runs in (mine, others)]
    return geometric_mean([one / other for one, other in zip(*rates, strict=True)])


def _shown(estimate: Estimate, digits: int) -> str:
    value, low, high = (f"{each:.{digits}f}" for each in (estimate.value, estimate.low, estimate.high))
    return value if math.isnan(estimate.low) else f"{value} [{low}, {high}]"


def _same(runs: Sequence[dict[str, Any]]) -> str:
    """How many greedy outputs are those of plain decoding."""
    plain = {(run["kind"], run["prompt"]): run["text"] for run in runs if run["head"] == PLAIN and run["text"]}
    equal = [run["text"] == plain[run["kind"], run["prompt"]] for run in runs if run["text"] and run["head"] != PLAIN]
    return f"{sum(equal)} of {len(equal)}"


if __name__ == "__main__":
    main()
