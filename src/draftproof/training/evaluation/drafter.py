"""A trained feature head beside drafters that need no training: the untrained head, early exit, and lookup."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftproof import models
from draftproof.backends.heads.feature_net import FeatureNet, load_net, save_net
from draftproof.backends.hf.truncate import first_layers
from draftproof.backends.loading.by_name import Loaded, load_backend, refuse_gguf
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.loading.tokenization import load_tokenizer
from draftproof.backends.model_info import end_tokens
from draftproof.engine.drafter_parts import make_drafter
from draftproof.engine.engine import Engine
from draftproof.engine.stats import total_stats
from draftproof.engine.verifier_parts import make_verifier
from draftproof.errors import UserError
from draftproof.progress import Watch, silent
from draftproof.provenance import run_facts, without_directory
from draftproof.results import Results, mean_and_deviation, table
from draftproof.sampling import SamplingParams
from draftproof.training.data import read_examples, split
from draftproof.training.evaluation.pair import about
from draftproof.training.feature_loss import Frame, acceptance, target_rows
from draftproof.training.feature_rows import FeatureStore, StateRows, TrainingRow, windows
from draftproof.training.responses import instruction_ids
from draftproof.training.sweep import pass_costs

HEAD, UNTRAINED, LOOKUP = "feature head", "the same, untrained", "lookup"
TEXT, ANSWERS = "held-out text", "own answers"
WINDOW, WINDOWS = 256, 32  # tokens of a window, and windows of each kind
ANSWER, RUN = 128, 96  # most tokens of an answer of the target, and of a run of the engine
Figures = dict[str, dict[str, float]]  # by drafter


@dataclass(frozen=True)
class DrafterOptions:
    """What is evaluated.

    Attributes:
        head: directory of the feature head.
        target, dtype: the model that it drafts for.
        texts: held-out text, read whole.
        form: how texts stand in .txt files.
        prompts: instructions; only the tenth that is for tests is read.
        layers: layers of the early exit that it is compared with.
        seeds: seed of windows, answers and draws.
        trials: prompts of each kind that the engine continues.
    """

    head: Path
    target: str
    texts: Sequence[Path]
    prompts: Sequence[Path]
    layers: int
    form: str = "paragraphs"
    dtype: str = "auto"
    seeds: Sequence[int] = (0, 1, 2)
    trials: int = 6


def evaluate_drafter(options: DrafterOptions, *, watch: Watch = silent) -> Results:
    """Acceptance along known tokens and tokens per target call, on held-out text and on the target's own answers."""
    facts = run_facts()
    refuse_gguf(options.target, "the evaluation of a feature head")
    target = load_backend(options.target, LoadOptions(dtype=options.dtype))
    tokenizer = load_tokenizer(models.resolve(options.target))
    trained = load_net(options.head)
    nets = {HEAD: trained, UNTRAINED: _untrained(trained)}
    found: dict[str, Any] = {"acceptance": [], "runs": []}
    with tempfile.TemporaryDirectory() as folder, watch("evaluating", 2 * len(options.seeds), 0) as tick:
        engines = _engines(options, target, tokenizer, nets[UNTRAINED], Path(folder))
        for number, seed in enumerate(options.seeds):
            kinds = {
                TEXT: held_out_text(options.texts, options.form, tokenizer, seed, options.trials),
                ANSWERS: own_answers(options.prompts, target, tokenizer, seed, options.trials),
            }
            for place, (kind, (rows, prompts)) in enumerate(kinds.items(), 1):
                states = FeatureStore(target, [rows], length=WINDOW, cache=Path(folder), key="trained").shard(0)
                found["acceptance"].append({"kind": kind, "seed": seed, **_along(options, target, states, nets)})
                found["runs"] += [
                    {"kind": kind, "seed": seed, "drafter": name, **_run(engine, prompts, seed)}
                    for name, engine in engines.items()
                ]
                tick(2 * number + place)
    title = f"Drafters for {without_directory(options.target)} on held-out text and answers"
    return Results(title, _lines(options, found), found, facts)


def _untrained(net: FeatureNet) -> FeatureNet:
    """A head of the same shape with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        fresh = FeatureNet(net.config).requires_grad_(requires_grad=False).eval()
    fresh.ids.copy_(net.ids)
    return fresh


def _engines(
    options: DrafterOptions, target: Loaded, tokenizer: Any, untrained: FeatureNet, folder: Path
) -> dict[str, Engine]:
    place = folder / "untrained"
    place.mkdir()
    save_net(untrained, place)
    drafters = {HEAD: f"feature_head:{options.head}", UNTRAINED: f"feature_head:{place}"}
    drafters |= {_exit(options): f"early_exit:{options.layers}", LOOKUP: "ngram:4"}
    return {name: _engine(target, tokenizer, drafter) for name, drafter in drafters.items()}


def _exit(options: DrafterOptions) -> str:
    return f"first {options.layers} layers"


def _engine(target: Loaded, tokenizer: Any, drafter: str | None) -> Engine:
    """The target with a drafter of four tokens."""
    part = None if drafter is None else make_drafter(drafter, target=target, draft=None, stopper="fixed:4")
    ends = end_tokens(target.eos_token_ids, tokenizer.eos_token_id)
    return Engine(target, part, make_verifier("block"), tokenizer=tokenizer, eos_token_ids=ends, max_batch=8)


def held_out_text(
    files: Sequence[Path], form: str, tokenizer: Any, seed: int, trials: int
) -> tuple[list[TrainingRow], list[list[int]]]:
    """Windows of held-out text, chosen by the seed, and openings of the first `trials` of them."""
    texts = [example.text for example in read_examples(files, form=form, opening=0)[0]]
    rows = windows(texts, tokenizer, length=WINDOW, most=WINDOWS, seed=100 + seed)
    return rows, [list(row.tokens[:64]) for row in rows[:trials]]


def own_answers(
    files: Sequence[Path], target: Loaded, tokenizer: Any, seed: int, trials: int
) -> tuple[list[TrainingRow], list[list[int]]]:
    """The target's answers to held-out instructions (the tenth for tests), and the first `trials` instructions."""
    plain = _engine(target, tokenizer, None)
    examples = split(read_examples(files, opening=0)[0])["test"]
    ids = [row for row in (instruction_ids(plain, each.text) for each in examples) if len(row) < 128][:WINDOWS]
    if not ids:
        raise UserError("no held-out instruction of less than 128 tokens: give more instructions with --prompts")
    params = [SamplingParams(max_tokens=ANSWER, seed=1000 * seed + number) for number in range(len(ids))]
    outputs = plain.generate(ids, params)
    rows = [
        TrainingRow((*prompt, *out.token_ids)[:WINDOW], len(prompt) - 1)
        for prompt, out in zip(ids, outputs, strict=True)
    ]
    return rows, ids[:trials]


def _along(options: DrafterOptions, target: Loaded, rows: StateRows, nets: dict[str, FeatureNet]) -> Figures:
    """Expected acceptance, 1 - TV, along known tokens: of the first four drafted ones, or of the first only."""
    made: Figures = {}
    for name, net in nets.items():
        embedding, mixed = target.model.get_input_embeddings(), target.dtype != torch.float32
        made[name] = acceptance(net, rows, Frame(embedding, target.output_rows(net.ids), autocast=mixed))
    early = first_layers(target.model, options.layers, target.name)
    frame = Frame(None, target.model.get_output_embeddings().weight)
    of_exit, agree, of_lookup = [], [], []
    for place in range(rows.ids.shape[0]):
        row = rows.pick([place])
        counts = row.counts[0].clone()
        counts[-1] = False  # the token after the last one is not known
        p = target_rows(row, frame)[counts]
        with torch.inference_mode():
            q = early(input_ids=row.ids, use_cache=False).logits[0][counts].float().softmax(-1)
        of_exit.append(torch.minimum(p, q).sum(-1))
        agree.append((p.argmax(-1) == q.argmax(-1)).float())
        follow = torch.tensor(_lookup(row.ids[0].tolist()))[counts]
        chosen = p[torch.arange(len(p)), follow.clamp(min=0)]
        of_lookup.append(torch.where(follow >= 0, chosen, torch.zeros(())))
    made[_exit(options)] = {"accept_1": _mean(of_exit), "top_1": _mean(agree)}
    made[LOOKUP] = {"accept_1": _mean(of_lookup)}
    return made


def _lookup(ids: list[int]) -> list[int]:
    """For every position the token that followed its last two tokens most recently, or -1."""
    latest: dict[tuple[int, int], int] = {}
    found = []
    for place, token in enumerate(ids):
        if place >= 2:
            latest[ids[place - 2], ids[place - 1]] = token
        found.append(latest.get((ids[place - 1], token), -1) if place else -1)
    return found


def _mean(parts: list[torch.Tensor]) -> float:
    return float(torch.cat(parts).mean())


def _run(engine: Engine, prompts: list[list[int]], seed: int) -> dict[str, float]:
    """Tokens per target call, and the time of a drafted token in target calls, one request after another."""
    params = SamplingParams(max_tokens=RUN, seed=seed)
    total = total_stats(engine.generate([prompt], params)[0].stats for prompt in prompts)
    costs = pass_costs(total)
    return {"tokens_per_call": total.block_efficiency, "step": costs.draft / costs.target}


def _lines(options: DrafterOptions, found: dict[str, Any]) -> list[str]:
    lines = [about([*options.texts, *options.prompts], options.seeds)]
    keys = ("accept_1", "accept_2", "accept_3", "accept_4", "covered")
    heads = ("drafter", "accepted, drafted token 1", "token 2", "token 3", "token 4", "covered")
    for kind in (TEXT, ANSWERS):
        mine = [row for row in found["acceptance"] if row["kind"] == kind]
        rows = []
        for name in (HEAD, UNTRAINED, _exit(options), LOOKUP):
            runs = [row for row in found["runs"] if (row["kind"], row["drafter"]) == (kind, name)]
            cells = [
                mean_and_deviation([row[name][key] for row in mine]) if key in mine[0][name] else "" for key in keys
            ]
            calls = mean_and_deviation([row["tokens_per_call"] for row in runs], 2)
            rows.append((name, *cells, calls, mean_and_deviation([row["step"] for row in runs])))
        title = f"## {kind[:1].upper()}{kind[1:]}"
        lines += ["", title, "", *table((*heads, "tokens per target call", "step / target call"), rows)]
    return [
        *lines,
        "",
        "Accepted: 1 - TV at temperature 1 along known tokens; for token 2 to 4 a feature head reads its own states.",
        "Covered: the target's mass on the tokens that the head can draft. Lookup: the token that followed the last",
        "two tokens most recently; in runs `ngram:4`. Tokens per target call: four drafted tokens, block verification,",
        "temperature 1.",
    ]
