"""How well stoppers choose lengths: discard and verification rates against every fixed length (SpecDec++, figure 4).

    python benchmarks/stoppers.py --out docs/results/stoppers_embedded

All stoppers draft for the same prompts with the same seeds under block verification. Writes OUT.jsonl (a line a
setting and seed), OUT.md and OUT.png. Rates do not depend on the machine; the costs derived from them use the ratio of
the two passes' times that is given.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from pathlib import Path

import torch

from draftproof import Engine, SamplingParams, models
from draftproof.backends.loading import load_backend
from draftproof.engine.registry import make_drafter, make_verifier
from draftproof.stoppers.history import Oracle
from draftproof.theory.cost import PassCosts, latency
from draftproof.tokenization import load_tokenizer

TEXTS = (
    "Once upon a time there was a",
    "The old man opened the door and",
    "One day, a little girl named",
    "In the morning they walked to the",
    "Tom had a red ball. He",
    "The cat looked at the bird and said",
    "It was raining, so Lily and her mom",
    "At the park, a big dog",
)


def settings(args: argparse.Namespace) -> dict[str, list[str]]:
    """Stoppers to measure, by family."""
    made = {
        "fixed": [f"fixed:{n}" for n in args.fixed],
        "schedule": ["schedule:3", "schedule:5"],
        "confidence": [f"confidence:{t}" for t in args.confidence],
        "entropy": [f"entropy:{t}" for t in args.entropy],
    }
    for name, path in (("acceptance", args.acceptance), ("ratio", args.ratio), ("approximate", args.approximate)):
        if path:
            made[name] = [f"{name}:{path}:{h}" if path != "shipped" else f"{name}:{h}" for h in args.thresholds]
    return made


def measure(args: argparse.Namespace) -> list[dict]:
    """A row for each setting and seed."""
    target, draft = load_backend(args.target, dtype=args.dtype), load_backend(args.draft, dtype=args.dtype)
    tokenizer = load_tokenizer(models.resolve(args.target))
    prompts = [[int(token) for token in tokenizer(text)["input_ids"]] for text in texts(args)]
    rows = []
    families = settings(args)
    for temperature in args.temperature:
        for family, specs in families.items():
            for spec in specs:
                part = make_drafter("model", target=target, draft=draft, stopper=spec)
                engine = Engine(target, part, make_verifier(args.verifier), max_batch=args.batch)
                seeds = range(args.seeds if temperature > 0 else 1)  # greedy answers have no seed
                rows += [row(engine, prompts, args, family, spec, temperature, seed) for seed in seeds]
                print(f"T={temperature:g} {short(spec)}: {rows[-1]['verification']:.3f}", file=sys.stderr)
        if temperature == 0:
            rows.append(oracle(args, target, draft, prompts))
    return rows


def texts(args: argparse.Namespace) -> list[str]:
    """The prompts: a line each of a file, or short beginnings of stories."""
    if args.prompts is None:
        return list(TEXTS)
    return [json.loads(line)["prompt"] for line in args.prompts.read_text(encoding="utf-8").splitlines()]


def row(
    engine: Engine, prompts: list[list[int]], args: argparse.Namespace, family: str, spec: str, heat: float, seed: int
) -> dict:
    """Rates of all prompts together."""
    params = SamplingParams(max_tokens=args.length, temperature=heat, seed=seed, ignore_eos=True)
    stats = [out.stats for out in engine.generate(prompts, params)]
    tokens = sum(s.num_tokens for s in stats)
    wasted = sum(s.num_draft_tokens - s.num_accepted_tokens for s in stats)
    calls = sum(s.num_target_calls for s in stats)
    rates = {"discard": wasted / tokens, "verification": calls / tokens}
    return {"T": heat, "family": family, "stopper": short(spec), "seed": seed, "tokens": tokens} | rates


def oracle(args: argparse.Namespace, target: object, draft: object, prompts: list[list[int]]) -> dict:
    """Lemma 2.1's oracle on the recorded greedy run."""
    params = SamplingParams(max_tokens=args.length, temperature=0, ignore_eos=True)
    outs = Engine(target, max_batch=args.batch).generate(prompts, params)
    agreements = {}
    for place, (prompt, out) in enumerate(zip(prompts, outs, strict=True)):
        ids = torch.tensor([[*prompt, *out.token_ids]])
        with torch.inference_mode():
            best = draft.model(input_ids=ids, use_cache=False).logits[0].argmax(-1).tolist()
        agreements[place] = [best[len(prompt) - 1 + i] == token for i, token in enumerate(out.token_ids)]
    part = make_drafter("model", target=target, draft=draft, stopper="fixed:1")
    part.stopper = Oracle(agreements)
    engine = Engine(target, part, make_verifier(args.verifier), max_batch=args.batch)
    return row(engine, prompts, args, "oracle", "oracle", 0.0, 0)


def short(spec: str) -> str:
    """A stopper's name without the path of its head."""
    parts = spec.split(":")
    return f"{parts[0]}:{parts[-1]}" if len(parts) > 1 else spec


def means(rows: list[dict], temperature: float) -> list[dict]:
    """Each setting's mean rates with their standard errors."""
    made = []
    at = [row for row in rows if row["T"] == temperature]
    for stopper in dict.fromkeys(row["stopper"] for row in at):
        own = [row for row in at if row["stopper"] == stopper]
        entry = {"stopper": stopper, "family": own[0]["family"]}
        for rate in ("discard", "verification"):
            values = [row[rate] for row in own]
            entry[rate] = statistics.mean(values)
            spread = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
            entry[f"{rate}_error"] = spread
        made.append(entry)
    return made


def excess(entry: dict, fixed: list[dict]) -> float:
    """Verification rate above the fixed lengths' frontier at the same discard rate; negative is better."""
    known = sorted((point["discard"], point["verification"]) for point in fixed)
    if not known[0][0] <= entry["discard"] <= known[-1][0]:
        return math.nan
    for (x0, y0), (x1, y1) in itertools.pairwise(known):
        if x0 <= entry["discard"] <= x1:
            at = y0 + (y1 - y0) * (entry["discard"] - x0) / max(x1 - x0, 1e-9)
            return entry["verification"] - at
    return math.nan


def report(args: argparse.Namespace, rows: list[dict]) -> str:
    """Tables as Markdown."""
    lines = [
        "# Discard and verification rates by stopper",
        "",
        (
            f"Target {args.target}, draft {args.draft}, rule {args.verifier}, {len(texts(args))} prompts of "
            f"{args.length} tokens, {args.seeds} seeds; mean and standard error over seeds."
        ),
        "",
        "Discard rate: drafted tokens thrown away per emitted token. Verification rate: target calls per emitted",
        "token. Against fixed: verification rate less that of fixed lengths at the same discard rate (interpolated;",
        "below 0 is better). Cost: time per token in units of a target pass, by equation (2.3) of SpecDec++, when a",
        "draft pass takes that fraction of a target pass.",
    ]
    for temperature in args.temperature:
        made = means(rows, temperature)
        fixed = [entry for entry in made if entry["family"] == "fixed"]
        lines += ["", f"## Temperature {temperature:g}", ""]
        heads = [
            "stopper",
            "discard rate",
            "verification rate",
            "against fixed",
            *(f"cost at {c:g}" for c in args.costs),
        ]
        lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for entry in made:
            rates = [with_error(entry, rate) for rate in ("discard", "verification")]
            gap = "" if entry["family"] == "fixed" else against(excess(entry, fixed))
            costs = [f"{cost(entry, c):.3f}" for c in args.costs]
            lines.append(f"| {' | '.join([entry['stopper'], *rates, gap, *costs])} |")
        lines += ["", *best_lines(args, made)]
    return "\n".join(lines) + "\n"


def with_error(entry: dict, rate: str) -> str:
    """A rate with its standard error, where there are several seeds."""
    error = entry[f"{rate}_error"]
    return f"{entry[rate]:.3f}" + ("" if math.isnan(error) else f" ± {error:.3f}")


def against(gap: float) -> str:
    """A difference to fixed lengths, which have no such discard rate at all beyond their ends."""
    return "beyond" if math.isnan(gap) else f"{gap:+.3f}"


def cost(entry: dict, ratio: float) -> float:
    """Seconds a token when a target pass takes one and a draft pass `ratio`."""
    return latency(PassCosts(ratio, 1.0), entry["discard"], entry["verification"])


def best_lines(args: argparse.Namespace, made: list[dict]) -> list[str]:
    """The best setting of each family under each cost, as a ratio to the best fixed length."""
    heads = ["family", *(f"best at {c:g}" for c in args.costs)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for family in dict.fromkeys(entry["family"] for entry in made):
        cells = []
        for ratio in args.costs:
            best = min((e for e in made if e["family"] == family), key=lambda e: cost(e, ratio))
            base = min(cost(e, ratio) for e in made if e["family"] == "fixed")
            cells.append(f"{best['stopper']}: {cost(best, ratio) / base:.3f}")
        lines.append(f"| {' | '.join([family, *cells])} |")
    return [*lines, "", "Each cell: the family's best setting, and its cost over that of the best fixed length."]


def plot(args: argparse.Namespace, rows: list[dict], out: Path) -> None:
    """Verification rate over discard rate, a curve a family, a panel a temperature."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(args.temperature), figsize=(6 * len(args.temperature), 4.5), squeeze=False)
    for panel, temperature in zip(panels[0], args.temperature, strict=True):
        made = means(rows, temperature)
        for family in dict.fromkeys(entry["family"] for entry in made):
            own = sorted((e for e in made if e["family"] == family), key=lambda e: e["discard"])
            xs, ys = [e["discard"] for e in own], [e["verification"] for e in own]
            panel.plot(xs, ys, marker="o", markersize=4, label=family, linewidth=2 if family == "fixed" else 1)
        panel.set_xlabel("discard rate (drafted tokens thrown away per emitted token)")
        panel.set_ylabel("verification rate (target calls per emitted token)")
        panel.set_title(f"{args.target} / {args.draft}, T = {temperature:g}", fontsize=10)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default="embedded:target")
    parser.add_argument("--draft", default="embedded:draft")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--verifier", default="block")
    parser.add_argument("--prompts", type=Path, help="jsonl with a field prompt; default beginnings of stories")
    parser.add_argument("--temperature", type=float, nargs="+", default=[1.0, 0.0])
    parser.add_argument("--fixed", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8, 10, 12, 14])
    parser.add_argument("--confidence", type=float, nargs="+", default=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    parser.add_argument("--entropy", type=float, nargs="+", default=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    parser.add_argument("--thresholds", type=float, nargs="+", default=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
    parser.add_argument("--acceptance", default="shipped", help="directory of an acceptance head, shipped, or empty")
    parser.add_argument("--ratio", default="shipped", help="of a log_ratio head, likewise")
    parser.add_argument("--approximate", default="shipped", help="of a verifier head, likewise")
    parser.add_argument("--costs", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.4])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--replot", action="store_true", help="use OUT.jsonl as it is")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    data = args.out.with_suffix(".jsonl")
    if args.replot:
        rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    else:
        rows = measure(args)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        data.write_text("".join(json.dumps(entry) + "\n" for entry in rows), encoding="utf-8")
    args.out.with_suffix(".md").write_text(report(args, rows), encoding="utf-8")
    plot(args, rows, args.out.with_suffix(".png"))
    print(report(args, rows))


if __name__ == "__main__":
    main()
