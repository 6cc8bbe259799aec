"""What the trained parts are worth on texts they were not trained on, over three seeds, beside simple baselines.

    python benchmarks/trained.py pair --texts tiny_stories.txt --form stories --out docs/results/trained_stories
    python benchmarks/trained.py drafter --head artefacts/smollm2-135m-feature-head --texts test.txt.xz
        --prompts seed_tasks.jsonl --out docs/results/trained_drafter
    python benchmarks/trained.py heads --target embedded:stories --draft embedded:stories-draft --heads DIR
        --texts tiny_stories.txt --form stories --out docs/results/trained_heads

`pair`: bits per byte, expected acceptance, block efficiency of an embedded pair. `drafter`: a feature head beside the
untrained one, the target's first layers and lookup of the last two tokens. `heads`: heads and a verifier for a pair
beside constant and max-probability baselines, stopping against every fixed length, SPRINTER's quality against calls.

Texts are split by hash as in training: only the tenth that is for tests is read (a file that was named `--held-out`
there is read whole). A seed decides windows, answers and draws. Writes OUT.json and OUT.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import draftproof
from draftproof import Engine, SamplingParams, models
from draftproof.backends.early_exit import first_layers
from draftproof.backends.feature_net import FeatureNet, load_net, save_net
from draftproof.backends.loading import load_backend, load_model
from draftproof.engine.registry import SHIPPED_HEADS, make_drafter, make_verifier
from draftproof.heads import load_head
from draftproof.provenance import without_folders
from draftproof.stoppers.fixed import FixedLength
from draftproof.stoppers.trained import Approximate
from draftproof.tokenization import load_tokenizer
from draftproof.training import distil, sprinter, sweep
from draftproof.training.corpus import held_out
from draftproof.training.data import read_examples, split
from draftproof.training.feature_loss import Frame, acceptance, target_rows
from draftproof.training.feature_rows import Row, StateRows, Store, windows
from draftproof.training.features import ModelPair
from draftproof.training.heads import Labels, evaluate_head
from draftproof.training.pair_data import Material, PairData
from draftproof.training.sweep import Trial, rates

PROMPT = 32  # tokens of a window that the target continues by itself
LENGTHS = (4, 8)


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


# --- a pair ---------------------------------------------------------------------------------------------------------


def pair(args: argparse.Namespace) -> dict[str, Any]:
    """Bits per byte, acceptance and block efficiency of a target and its draft."""
    tokenizer = load_tokenizer(models.resolve(args.target))
    examples = split(read_examples(args.texts, form=args.form)[0])["test"]
    ids = [tokenizer(example.text, add_special_tokens=False)["input_ids"] for example in examples]
    end = int(tokenizer.eos_token_id)
    whole, taken = held_out(ids, end, length=256, tokens=args.tokens)
    size = sum(len(example.text.encode()) for example in examples[:taken])
    target, draft = (load_model(models.resolve(name), dtype="float32").eval() for name in (args.target, args.draft))
    found: dict[str, Any] = {
        "bytes": size,
        "parameters": {name: sum(p.numel() for p in m.parameters()) for name, m in named(args, target, draft).items()},
        "bits_per_byte": {n: distil.bits_per_byte(m, whole, size) for n, m in named(args, target, draft).items()},
        "acceptance, held-out text": distil.agreement(target, draft, whole)["acceptance"],
        "seeds": [],
    }
    backends = [load_backend(name, dtype="float32") for name in (args.target, args.draft)]
    prompts = [tokenizer(example.prompt)["input_ids"] for example in examples]
    prompts = [row for row in prompts if 0 < len(row) <= 64][: args.trials]
    full = whole[(whole >= 0).all(-1)][:32, :PROMPT]
    for seed in args.seeds:
        torch.manual_seed(seed)
        own = distil.sampled(target, full, 256)
        row = {"acceptance, own samples": distil.agreement(target, draft, own, skip=PROMPT)["acceptance"]}
        trial = Trial(ModelPair(*backends, SamplingParams()), prompts, (end,), 128, seed)
        for length in LENGTHS:
            row[f"tokens a call, n = {length}"] = trial.rates(FixedLength(length), "block")["block_efficiency"]
        say(f"seed {seed}: {row}")
        found["seeds"].append(row)
    return found


def named(args: argparse.Namespace, target: Any, draft: Any) -> dict[str, Any]:
    """Models by name."""
    return {args.target: target, args.draft: draft}


def pair_lines(args: argparse.Namespace, found: dict[str, Any]) -> list[str]:
    """The pair's table."""
    sizes, bits = found["parameters"], found["bits_per_byte"]
    lines = [f"# {args.target} and {args.draft} on held-out text", "", about(args), ""]
    lines += [f"| | {' | '.join(sizes)} |", "|---|---|---|"]
    lines += [f"| parameters | {' | '.join(f'{size:,}'.replace(',', ' ') for size in sizes.values())} |"]
    lines += [f"| bits per byte ({found['bytes']} bytes) | {' | '.join(f'{value:.3f}' for value in bits.values())} |"]
    lines += ["", "| measure | value |", "|---|---|"]
    lines += [f"| expected acceptance at temperature 1, held-out text | {found['acceptance, held-out text']:.3f} |"]
    lines += [f"| {name} | {spread([row[name] for row in found['seeds']])} |" for name in found["seeds"][0]]
    return [*lines, "", "Tokens a call: block verification, temperature 1, openings of held-out texts."]


# --- a drafter ------------------------------------------------------------------------------------------------------


def drafter(args: argparse.Namespace) -> dict[str, Any]:
    """A trained feature head beside what needs no training."""
    target = load_backend(args.target, dtype=args.dtype)
    tokenizer = load_tokenizer(models.resolve(args.target))
    net = load_net(args.head)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        fresh = FeatureNet(net.config).requires_grad_(requires_grad=False).eval()
    fresh.ids.copy_(net.ids)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary) / "untrained"
        place.mkdir()
        save_net(fresh, place)
        specs = {
            "feature head": f"feature_head:{args.head}",
            "the same, untrained": f"feature_head:{place}",
            f"first {args.layers} layers": f"early_exit:{args.layers}",
            "lookup": "ngram:4",
        }
        engines = {name: engine(target, tokenizer, spec) for name, spec in specs.items()}
        found: dict[str, Any] = {"acceptance": [], "runs": []}
        for seed in args.seeds:
            kinds = {"fiction": fiction(args, tokenizer, seed), "own answers": answers(args, target, tokenizer, seed)}
            for kind, (rows, prompts) in kinds.items():
                store = Store(target, [rows], length=256, cache=Path(temporary), key="trained")
                made = along(args, target, store.shard(0), {"feature head": net, "the same, untrained": fresh})
                found["acceptance"].append({"kind": kind, "seed": seed, **made})
                for name, each in engines.items():
                    found["runs"].append({"kind": kind, "seed": seed, "drafter": name, **run(each, prompts, seed)})
                    say(f"seed {seed}, {kind}, {name}: {found['runs'][-1]['tokens a call']:.2f} tokens a call")
    return found


def engine(target: Any, tokenizer: Any, spec: str | None) -> Engine:
    """The target with a drafter of four tokens."""
    made = None if spec is None else make_drafter(spec, target=target, draft=None, stopper="fixed:4")
    ends = tuple(dict.fromkeys((*target.eos_token_ids, tokenizer.eos_token_id)))
    return Engine(target, made, make_verifier("block"), tokenizer=tokenizer, eos_token_ids=ends, max_batch=8)


def fiction(args: argparse.Namespace, tokenizer: Any, seed: int) -> tuple[list[Row], list[list[int]]]:
    """Windows of held-out text, and beginnings of some of them."""
    texts = [example.text for example in read_examples(args.texts, form=args.form, opening=0)[0]]
    rows = windows(texts, tokenizer, length=256, most=32, seed=100 + seed)
    return rows, [list(row.tokens[:64]) for row in rows[: args.trials]]


def answers(args: argparse.Namespace, target: Any, tokenizer: Any, seed: int) -> tuple[list[Row], list[list[int]]]:
    """The target's answers to held-out instructions, and those instructions."""
    plain = engine(target, tokenizer, None)
    texts = [example.text for example in split(read_examples(args.prompts, opening=0)[0])["test"]]
    ids = [plain.encode([{"role": "user", "content": text}])[1] for text in texts]
    ids = [row for row in ids if len(row) < 128][:32]
    params = [SamplingParams(max_tokens=128, seed=1000 * seed + number) for number in range(len(ids))]
    outputs = plain.generate(ids, params)
    rows = [Row((*ask, *out.token_ids)[:256], len(ask) - 1) for ask, out in zip(ids, outputs, strict=True)]
    return rows, ids[: args.trials]


def along(args: argparse.Namespace, target: Any, rows: StateRows, nets: dict[str, FeatureNet]) -> dict[str, Any]:
    """Expected acceptance, 1 - TV, along known tokens: of the first four drafted ones, or of the first."""
    made: dict[str, Any] = {}
    for name, net in nets.items():
        frame = Frame(
            target.model.get_input_embeddings(), target.output_rows(net.ids), autocast=target.dtype != torch.float32
        )
        made[name] = acceptance(net, rows, frame)
    early = first_layers(target.model, args.layers, target.name)
    every = torch.arange(target.vocab_size)
    frame = Frame(None, target.model.get_output_embeddings().weight)
    shallow, guessed, tops = [], [], []
    for place in range(rows.ids.shape[0]):
        row = rows.pick([place])
        counts = row.counts[0].clone()
        counts[-1] = False  # what follows the last token is not known
        p = target_rows(row, frame)[counts]
        with torch.inference_mode():
            q = early(input_ids=row.ids, use_cache=False).logits[0][counts].float().softmax(-1)
        shallow.append(torch.minimum(p, q).sum(-1))
        tops.append((p.argmax(-1) == q.argmax(-1)).float())
        follow = torch.tensor(lookup(row.ids[0].tolist()))[counts]
        known = follow >= 0
        guessed.append(torch.where(known, p[torch.arange(len(p)), every[follow.clamp(min=0)]], torch.zeros(())))
    made[f"first {args.layers} layers"] = {"accept_1": mean(shallow), "top_1": mean(tops)}
    made["lookup"] = {"accept_1": mean(guessed)}
    return made


def lookup(ids: list[int]) -> list[int]:
    """For every position what followed its last two tokens most recently, or -1."""
    seen: dict[tuple[int, int], int] = {}
    found = []
    for place, token in enumerate(ids):
        if place >= 2:
            seen[ids[place - 2], ids[place - 1]] = token
        found.append(seen.get((ids[place - 1], token), -1) if place else -1)
    return found


def mean(parts: list[torch.Tensor]) -> float:
    """Over all positions."""
    return float(torch.cat(parts).mean())


def run(each: Engine, prompts: list[list[int]], seed: int) -> dict[str, float]:
    """Tokens a target call, and times, one request after another."""
    params = SamplingParams(max_tokens=96, seed=seed)
    stats = [each.generate([prompt], params)[0].stats for prompt in prompts]
    total = {name: sum(getattr(one, name) for one in stats) for name in ("num_tokens", "num_target_calls")}
    drafted = sum(one.num_draft_tokens for one in stats)
    call = sum(one.seconds.target for one in stats) / total["num_target_calls"]
    return {
        "tokens a call": total["num_tokens"] / total["num_target_calls"],
        "step": sum(one.seconds.draft for one in stats) / max(drafted, 1) / call,
    }


def drafter_lines(args: argparse.Namespace, found: dict[str, Any]) -> list[str]:
    """The drafters' tables."""
    lines = [f"# Drafters for {args.target} on held-out text and answers", "", about(args)]
    for kind in ("fiction", "own answers"):
        mine = [row for row in found["acceptance"] if row["kind"] == kind]
        heads = ("drafter", "accepted, drafted token 1", "token 2", "token 3", "token 4", "covered")
        lines += ["", f"## {kind.capitalize()}", "", *table_head(*heads, "tokens a call", "step / target call")]
        for name in [key for key in mine[0] if key not in ("kind", "seed")]:
            runs = [row for row in found["runs"] if (row["kind"], row["drafter"]) == (kind, name)]
            cells = [name]
            keys = ("accept_1", "accept_2", "accept_3", "accept_4", "covered")
            cells += [spread([row[name][key] for row in mine]) if key in mine[0][name] else "" for key in keys]
            cells += [spread([row["tokens a call"] for row in runs], 2), spread([row["step"] for row in runs])]
            lines.append(f"| {' | '.join(cells)} |")
    return [
        *lines,
        "",
        "Accepted: 1 - TV at temperature 1 along known tokens; of a feature head's token 2 to 4 on its own states.",
        "Covered: the target's mass on the tokens that the head speaks of. Lookup: the token that followed the last",
        "two tokens most recently; in runs `ngram:4`. Tokens a call: four drafted tokens, block verification,",
        "temperature 1.",
    ]


# --- heads ----------------------------------------------------------------------------------------------------------


def heads(args: argparse.Namespace) -> dict[str, Any]:
    """Heads and a verifier for a pair, on held-out prompts."""
    where = args.heads or SHIPPED_HEADS[args.draft]
    every = {name: load_head(where / name).eval() for name in args.kinds if (where / name).is_dir()}
    found: dict[str, Any] = {"judged": [], "stopping": [], "sprinter": [], "predicted": []}
    for seed in args.seeds:
        params = SamplingParams(max_tokens=args.length)
        options: dict[str, Any] = {"form": args.form, "prompts": args.texts_used, "dtype": args.dtype}
        material = Material(args.target, args.draft, tuple(args.texts), params=params, seed=seed, **options)
        shop = PairData(material)
        known, rows = (shop.head_rows(part, None) for part in ("valid", "test"))
        trial = shop.trial(args.trials, 64, part="test")
        fixed = {rule: sweep.fixed_table(trial, rule) for rule in ("token", "block")}
        for name, head in every.items():
            if head.config.kind == "verifier":
                test, valid = shop.verifier_rows("test")[0], shop.verifier_rows("valid")[0]
                found["judged"].append(
                    {"seed": seed, "head": name, **plain(evaluate_head(head, test, valid, Labels()))}
                )
                found["predicted"].append(sprinter.predict(head, shop.draft_rows_above("test"), Labels()))
                found["sprinter"] += [{"seed": seed, **row} for row in tradeoff(trial, head, shop.tokenizer)]
            else:
                rule = "token" if head.config.kind == "acceptance" else "block"
                found["judged"].append(
                    {"seed": seed, "head": name, **plain(evaluate_head(head, rows, known, Labels()))}
                )
                mine = sweep.head_table(trial, head, rule)
                facts = {"seed": seed, "head": name, "rule": rule, "fixed": fixed[rule]}
                facts["dominated"] = sweep.dominated(fixed[rule], mine)
                facts["costs"] = sweep.compare_latency(fixed[rule], mine)
                found["stopping"].append({**facts, "heads": sweep.beside_fixed(fixed[rule], mine)})
            say(f"seed {seed}: {name}")
    return found


def plain(judged: dict[str, Any]) -> dict[str, Any]:
    """Figures without curves."""
    return {name: value for name, value in judged.items() if not isinstance(value, list)}


def tradeoff(trial: Trial, head: Any, tokenizer: Any) -> list[dict[str, Any]]:
    """SPRINTER at several thresholds: target calls a token against quality."""
    reference, second = (trial.run(FixedLength(4), "block", shift=shift) for shift in (0, 1))

    def row(name: str, outputs: Any) -> dict[str, Any]:
        scores = sprinter.rouge(outputs, second, tokenizer) or {}
        likely = sprinter.log_likelihood(trial.pair, outputs, trial.prompts)
        return {"setting": name, **rates(outputs), "log_likelihood": likely, **scores}

    made = [row("lossless, fixed:4", reference)]
    for tau in (0.9, 0.7, 0.5, 0.3, 0.1):
        head.config = replace(head.config, threshold=tau)
        made.append(row(f"tau {tau:g}", trial.run(Approximate(head), "last_token")))
    return made


def heads_lines(args: argparse.Namespace, found: dict[str, Any]) -> list[str]:
    """The heads' tables."""
    lines = [f"# Heads for {without_folders(args.draft)} under {args.target} on held-out prompts", "", about(args)]
    names = {"rows": "rows", "kl_unweighted": "binary KL", "kl": "binary KL as trained", "kl_constant": "KL, constant"}
    names |= {
        "kl_max_probability": "KL, max probability",
        "kl_max_probability_fitted": "the same through a fitted curve",
    }
    names |= {"ece_unweighted": "ECE", "huber": "Huber loss", "huber_constant": "Huber, constant", "auc": "AUC"}
    names |= {"auc_max_probability": "AUC, max probability", "eta_tp": "eta_TP", "eta_fp": "eta_FP"}
    kinds = list(dict.fromkeys(row["head"] for row in found["judged"]))
    lines += ["", *table_head("measure", *kinds)]
    for key, name in names.items():
        values = [[row[key] for row in found["judged"] if row["head"] == kind and key in row] for kind in kinds]
        if any(values):
            lines.append(f"| {name} | {' | '.join(spread(part) if part else '' for part in values)} |")
    for kind in kinds:
        mine = [row for row in found["stopping"] if row["head"] == kind]
        if mine:
            lines += ["", *stopping_lines(kind, mine)]
    if found["sprinter"]:
        lines += ["", *sprinter_lines(found)]
    return lines


def stopping_lines(kind: str, mine: list[dict[str, Any]]) -> list[str]:
    """A head's stopper against every fixed length."""
    rule = mine[0]["rule"]
    lines = [f"## `{kind}` against fixed lengths ({rule} verification)", ""]
    lines += table_head("setting", "discard rate", "verification rate", "less than fixed at that discard rate")
    for place, row in enumerate(mine[0]["fixed"]):
        each = [part["fixed"][place] for part in mine]
        rate = [spread([one[name] for one in each]) for name in ("discard_rate", "verification_rate")]
        lines.append(f"| fixed:{row['length']} | {' | '.join(rate)} | |")
    for place, row in enumerate(mine[0]["heads"]):
        each = [part["heads"][place] for part in mine]
        rate = [spread([one[name] for one in each]) for name in ("discard_rate", "verification_rate")]
        beside = [
            one["verification_rate"] - one["fixed_verification_rate"] for one in each if one["fixed_verification_rate"]
        ]
        lines.append(f"| {kind}:{row['threshold']:g} | {' | '.join(rate)} | {spread(beside) if beside else 'beyond'} |")
    dominated = ["; ".join(str(n) for n in part["dominated"]) or "none" for part in mine]
    lines += ["", f"Fixed lengths that some threshold beats at both rates, by seed: {', '.join(dominated)}.", ""]
    lines += table_head("a draft pass costs", "best threshold over best fixed length")
    for place, row in enumerate(mine[0]["costs"]):
        ratios = [part["costs"][place]["head"] / part["costs"][place]["fixed"] for part in mine]
        lines.append(f"| {row['cost_ratio']:g} of a target pass | {spread(ratios)} |")
    return lines


def sprinter_lines(found: dict[str, Any]) -> list[str]:
    """Quality against target calls."""
    wanted = {"verification_rate": "target calls a token", "block_efficiency": "tokens a call"}
    wanted |= {"log_likelihood": "target's log-likelihood a token"}
    wanted |= {f"rouge{n}": f"ROUGE-{n}" for n in ("1", "2", "L") if f"rouge{n}" in found["sprinter"][0]}
    lines = ["## SPRINTER: quality against target calls", "", *table_head("setting", *wanted.values())]
    for name in dict.fromkeys(row["setting"] for row in found["sprinter"]):
        mine = [row for row in found["sprinter"] if row["setting"] == name]
        lines.append(f"| {name} | {' | '.join(spread([row[key] for row in mine]) for key in wanted)} |")
    guess = spread([row["block_efficiency"] for row in found["predicted"]], 2)
    lines += ["", f"Theorem 3.3 predicts {guess} tokens a call at the verifier's own threshold. ROUGE is against"]
    return [*lines, "a second lossless sample, so the first line is what chance alone gives."]


# --- all ------------------------------------------------------------------------------------------------------------


def table_head(*cells: str) -> list[str]:
    """The first two lines of a table."""
    return [f"| {' | '.join(cells)} |", "|---" * len(cells) + "|"]


def spread(values: list[float], digits: int = 3) -> str:
    """Mean and standard deviation over seeds."""
    if all(float(value).is_integer() and abs(value) > 10 for value in values):
        return f"{statistics.fmean(values):.0f}"
    shown = f"{statistics.fmean(values):.{digits}f}"
    return shown if len(values) < 2 else f"{shown} ± {statistics.stdev(values):.{digits}f}"


def about(args: argparse.Namespace) -> str:
    """One line on how it was made."""
    files = ", ".join(path.name for path in [*args.texts, *(getattr(args, "prompts", None) or [])])
    seeds = ", ".join(map(str, args.seeds))
    versions = f"draftproof {draftproof.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads"
    return f"Texts: {files}. Seeds {seeds}: mean and standard deviation. {versions}."


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    made = parser.add_subparsers(dest="what", required=True)
    for name, target, draft in (
        ("pair", "embedded:stories", "embedded:stories-draft"),
        ("drafter", "smollm2-135m", None),
        ("heads", "embedded:stories", "embedded:stories-draft"),
    ):
        own = made.add_parser(name)
        own.add_argument("--target", default=target)
        own.add_argument("--texts", type=Path, nargs="+", required=True)
        own.add_argument("--form", default="paragraphs" if name == "drafter" else "stories")
        own.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
        own.add_argument("--trials", type=int, default=6 if name == "drafter" else 16, help="prompts of engine runs")
        own.add_argument("--dtype", default="bfloat16" if name == "drafter" else "float32")
        own.add_argument("--out", type=Path, required=True)
        if draft:
            own.add_argument("--draft", default=draft)
        if name == "pair":
            own.add_argument("--tokens", type=int, default=20000, help="of held-out text")
        if name == "drafter":
            own.add_argument("--prompts", type=Path, nargs="+", required=True)
            own.add_argument("--head", type=Path, required=True)
            own.add_argument("--layers", type=int, default=20)
        if name == "heads":
            own.add_argument("--heads", type=Path, help="directory of heads; default those that ship for the draft")
            own.add_argument("--kinds", nargs="+", default=["acceptance", "ratio", "approximate"])
            own.add_argument("--texts-used", type=int, help="as --prompts of `draftproof train head`; default all")
            own.add_argument("--length", type=int, default=128, help="most tokens of a response")
    return parser.parse_args()


MEASURES: dict[str, tuple[Callable[..., dict[str, Any]], Callable[..., list[str]]]] = {
    "pair": (pair, pair_lines),
    "drafter": (drafter, drafter_lines),
    "heads": (heads, heads_lines),
}


def main() -> None:
    """Measure and write."""
    args = parse()
    measure, lines_of = MEASURES[args.what]
    found = measure(args)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    text = "\n".join(lines_of(args, found)) + "\n"
    args.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
