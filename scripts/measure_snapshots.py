"""Measure what rounds cost on models with recurrent layers, and the speed-up that follows at given acceptance rates.

    python scripts/measure_snapshots.py [--model NAME ...] [--dtype float32 bfloat16 int4] [--tokens 48] [--out NAME]
        [--resume] [--before FILE]

The models have 100 to 530 million random weights, and Gemma 4 has no recurrent layers. The drafter knows the target's
greedy tokens and makes each of them wrong with a given probability, so that the acceptance rate is what it should be,
and drafts cost no time. Requests with and without drafts are decoded in turns. Passes are measured alone, too: what it
costs to verify drafts, and to restore the states of accepted tokens. Model `mtp` is Qwen3.5-0.8B with its prediction
layer, whose drafting is in its rounds.

A model in one dtype is a part of the page, and takes a minute or two. With `--resume`, parts that OUT.json has are not
measured again, so one part after another may be measured. `--before` names figures that this script wrote with another
state of the code (`PYTHONPATH=OTHER/src`), for a column beside those of now. `--out docs/results/snapshots` writes the
page and its figures.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import common
import torch
import transformers
from typing_extensions import override

from draftproof import Engine, SamplingParams
from draftproof.backends.base import Feed, FeedOutput, rounding
from draftproof.backends.loading.by_name import load_backend
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.loading.stored_backends import rounded
from draftproof.draft import Draft
from draftproof.drafters.base import Drafter, DraftRequest
from draftproof.drafters.ngram import point_chain, with_probabilities
from draftproof.drafters.none import NoDrafter
from draftproof.engine.drafter_parts import make_drafter
from draftproof.engine.verifier_parts import make_verifier
from draftproof.provenance import KEY, run_facts
from draftproof.results import Results, median_and_range, table
from draftproof.rng import RoundRng
from draftproof.tree import TokenTree

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support import qwen_mtp

RATES = (0.6, 0.8, 0.95)
PROMPT = 64
PASSES = 9  # of which the median counts
LINEAR, FULL = "linear_attention", "full_attention"
FLOATS = ("float32", "bfloat16")
DTYPES = (*FLOATS, "int4")  # 4-bit weights, made from bfloat16
MTP = "mtp (qwen3.5-0.8b, whole, with its prediction layer)"


def qwen3_5(layers: int, vocab: int) -> Any:
    """The shapes of Qwen3.5-0.8B."""
    return transformers.Qwen3_5TextConfig(
        vocab_size=vocab,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        tie_word_embeddings=True,
    )


def configs() -> dict[str, Any]:
    """A configuration of each kind of recurrent layer."""
    wide: dict[str, Any] = {
        "vocab_size": 32000,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    }
    falcon: dict[str, Any] = {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "mamba_d_ssm": 1536,
        "mamba_n_heads": 24,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
    }
    granite: dict[str, Any] = {
        "vocab_size": 32000,
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "shared_intermediate_size": 4096,
        "num_hidden_layers": 8,
        "layer_types": [*["mamba"] * 4, FULL, *["mamba"] * 3],
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "mamba_n_heads": 48,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "position_embedding_type": "nope",
        "tie_word_embeddings": True,
    }
    return {
        "qwen3_5_text (linear attention)": transformers.Qwen3_5TextConfig(
            **wide,
            num_hidden_layers=12,
            intermediate_size=2048,
            head_dim=64,
            linear_num_key_heads=8,
            linear_num_value_heads=16,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            tie_word_embeddings=True,
        ),
        "qwen3.5-0.8b (its shapes, 8 of 24 layers, a small vocabulary)": qwen3_5(8, 32000),
        "qwen3.5-wide (2560 hidden numbers as 4B has, 4 layers, a small vocabulary)": transformers.Qwen3_5TextConfig(
            vocab_size=32000,
            hidden_size=2560,
            intermediate_size=9216,
            num_hidden_layers=4,
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=256,
            linear_num_key_heads=16,
            linear_num_value_heads=32,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            tie_word_embeddings=True,
        ),
        "lfm2 (convolutions)": transformers.Lfm2Config(
            **wide,
            num_hidden_layers=12,
            intermediate_size=3072,
            layer_types=["conv", "conv", FULL] * 4,
            tie_word_embeddings=True,
        ),
        "granite4-1b (its hybrid's shapes, 8 of 40 layers: Mamba 2, a small vocabulary)": (
            transformers.GraniteMoeHybridConfig(**granite)
        ),
        "falcon-h1-0.5b (its shapes, 8 of 36 layers: Mamba 2 beside attention, a small vocabulary)": (
            transformers.FalconH1Config(**falcon)
        ),
        "jamba (state space)": transformers.JambaConfig(
            **wide,
            num_hidden_layers=12,
            intermediate_size=2048,
            num_experts=1,
            num_experts_per_tok=1,
            attn_layer_period=4,
            attn_layer_offset=3,
            tie_word_embeddings=True,
        ),
        "gemma4 (1536 hidden numbers as E2B has, 6 layers, a small vocabulary)": transformers.Gemma4TextConfig(
            vocab_size=32000,
            vocab_size_per_layer_input=32000,
            hidden_size=1536,
            intermediate_size=6144,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        ),
        MTP: qwen3_5(24, 248320),
    }


def short(name: str) -> str:
    """The name of a model on the command line."""
    return name.split(maxsplit=1)[0]


class Oracle(NoDrafter):
    """Drafts known tokens, each of them wrong with a probability."""

    name, point_masses = "oracle", True

    def __init__(self, known: Sequence[int], length: int, rate: float) -> None:
        self.limit = length
        self._known, self._rate, self._source = known, rate, random.Random(0)

    @override
    def propose(self, requests: Sequence[DraftRequest], rng: RoundRng) -> list[Draft]:
        (request,) = requests
        start = len(request.tokens) - request.prompt_length
        right = self._known[start : start + max(min(self.limit, request.limit), 0)]
        return [point_chain([each if self._source.random() < self._rate else each ^ 1 for each in right])]


@dataclass
class Run:
    """One request: processor time of a round in ms, tokens of a round, and tokens that a round read again."""

    tokens: list[int]
    round_ms: float
    per_round: float
    read_again: float


class Counted:
    """A target that counts the tokens that it reads."""

    def __init__(self, target: Any) -> None:
        self.forward, self.read = target.forward, 0
        target.forward = self

    def __call__(self, feeds: Sequence[Feed], **options: Any) -> list[FeedOutput]:
        """The target's forward pass."""
        self.read += sum(len(feed) for feed in feeds)
        made: list[FeedOutput] = self.forward(feeds, **options)
        return made


def prompt_ids(count: int = PROMPT) -> list[int]:
    """The tokens of a text."""
    return [(place * 7919 + 11) % 31000 for place in range(count)]


def run(target: Any, drafter: Any, tokens: int) -> Run:
    """Decode one request."""
    counted = Counted(target)
    try:
        engine = Engine(target, drafter, make_verifier("block"), max_batch=1)
        (request,) = engine.add(prompt_ids(), SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
        engine.step()
        first, before = time.process_time(), len(request.output_ids)
        while not request.finished:
            engine.step()
        seconds = time.process_time() - first
    finally:
        target.forward = counted.forward
    rounds, stats = request.round, request.stats
    needed = PROMPT + rounds - 1 + stats.num_draft_tokens  # every round reads one token that the last one drew
    return Run(
        tokens=request.output_ids,
        round_ms=1e3 * seconds / (rounds - 1),
        per_round=(len(request.output_ids) - before) / (rounds - 1),
        read_again=(counted.read - needed) / (rounds - 1),
    )


def transformers_ms(model: Any, tokens: int) -> float:
    """Processor time of a token of transformers' own generation, in ms."""
    ids = torch.tensor([prompt_ids()])
    mask = torch.ones_like(ids)

    def seconds(count: int) -> float:
        start = time.process_time()
        model.generate(
            ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
        return time.process_time() - start

    first = seconds(1)
    return 1e3 * (seconds(tokens + 1) - first) / tokens


@torch.inference_mode()
def passes(target: Any, lengths: Sequence[int]) -> dict[str, list[float]]:
    """Processor times of single passes in turns, in ms.

    "1": a plain step. For each number of drafts, "N": the last token and the drafts; "N restored": the same after a
    round in which all drafts but the last one were accepted, so that states are restored.
    """
    found: dict[str, list[float]] = {}
    known, session = prompt_ids(), target.open()
    target.forward([Feed(session, known)])

    def measured(name: str, accepted: int, drafts: int) -> None:
        mine, text = session.fork(PROMPT), [*known, 7]
        tree = TokenTree.chain(torch.arange(5, 5 + drafts)) if drafts else None
        if accepted:
            target.forward([Feed(mine, [7], tree)])
            text += [*range(5, 5 + accepted), 9]
        start = time.process_time()
        mine.keep(mine.stem, range(accepted))
        target.forward([Feed(mine, text[mine.length :], tree)])
        found.setdefault(name, []).append(1e3 * (time.process_time() - start))
        mine.close()

    for _ in range(PASSES):
        measured("1", 0, 0)
        for length in lengths:
            measured(f"{length}", 0, length)
            measured(f"{length} restored", length - 1, length)
    session.close()
    return found


def replacing(drafter: Drafter, oracle: Oracle, target: Any) -> Callable[..., list[Draft]]:
    """A drafter's `propose` whose tokens are replaced by known ones after they were drafted."""
    own = type(drafter).propose

    def propose(requests: Sequence[DraftRequest], rng: RoundRng) -> list[Draft]:
        own(drafter, requests, rng)
        drafted = oracle.propose(requests, rng)
        return [with_probabilities(each, target.vocab_size, torch.float32) for each in drafted]

    return propose


def turns(
    target: Any, drafters: Mapping[Any, Callable[[], Any]], known: Sequence[int], options: argparse.Namespace
) -> dict[Any, dict[str, Any]]:
    """Requests without drafts and with each drafter, in turns: figures of a round, and raw times."""
    found: dict[Any, dict[str, Any]] = {
        name: {"round_ms": [], "plain_ms": [], "costs": [], "speed_ups": []} for name in drafters
    }
    every: dict[Any, Callable[[], Any]] = {None: NoDrafter, **drafters}
    for number in range(options.repeats):
        order = list(every.items())[:: -1 if number % 2 else 1]
        made = {name: run(target, make(), options.tokens) for name, make in order}
        assert all(each.tokens == known for each in made.values()), "the same tokens"
        plain = made[None].round_ms
        for name, into in found.items():
            one = made[name]
            into["round_ms"].append(one.round_ms)
            into["plain_ms"].append(plain)
            into["costs"].append(one.round_ms / plain)
            into["speed_ups"].append(one.per_round * plain / one.round_ms)
            into |= {"tokens_a_round": one.per_round, "read_again": one.read_again}
    return found


@torch.no_grad()
def calm(model: Any) -> Any:
    """Norms of queries and keys get small weights: Gemma's scores are not divided by anything.

    With ones a head sees a single key, and rounding decides which.
    """
    for name, weight in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")) and "gemma" in model.config.model_type:
            weight.mul_(0.25)
    return model


def loaded(config: Any, dtype: str, folder: Path, options: argparse.Namespace) -> tuple[Any, float | None, int]:
    """A random model as it is loaded by name, ms of a token of transformers' own generation, and its weights."""
    model = calm(common.random_model(config, torch.bfloat16 if dtype == "int4" else getattr(torch, dtype)))
    weights = sum(each.numel() for each in model.parameters())
    own = transformers_ms(model, min(options.tokens, 24)) if dtype in FLOATS else None
    model.save_pretrained(folder)
    del model
    target: Any = load_backend(str(folder), LoadOptions(dtype=dtype if dtype in FLOATS else "bfloat16"))
    return target if dtype in FLOATS else rounded(target, 4), own, weights


def measure(name: str, config: Any, dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of a part."""
    with tempfile.TemporaryDirectory() as place:
        if name == MTP:
            return measure_prediction_layer(config, Path(place), options)
        target, own, weights = loaded(config, dtype, Path(place), options)
        if dtype != "float32" and (why := rounding(target)):
            return {"weights": weights, "unmeasured": why}
        run(target, NoDrafter(), 8)
        known = run(target, NoDrafter(), options.tokens).tokens
        rounds = []
        for length in options.lengths:
            oracles = {rate: partial(Oracle, known, length, rate) for rate in RATES}
            made = turns(target, oracles, known, options)
            rounds += [{"drafted": length, "acceptance": rate, **each} for rate, each in made.items()]
        return {
            "backend": target.kind,
            "lean": getattr(target, "lean", None) is not None,
            "weights": weights,
            "transformers_ms": own,
            "passes_ms": passes(target, options.lengths),
            "rounds": rounds,
        }


def prediction_layer_target(config: Any, folder: Path) -> Any:
    """A random Qwen3.5 in bfloat16 with a prediction layer, as it is loaded by name."""
    model = common.random_model(config, torch.bfloat16)
    own = {key: each.bfloat16() for key, each in qwen_mtp.tensors_of(model.config).items()}
    qwen_mtp.written_with(folder, model, own)
    del model
    return load_backend(str(folder), LoadOptions(dtype="bfloat16"))


def measure_prediction_layer(config: Any, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Rounds with the layer's own drafting, and with the same drafts for nothing."""
    target = prediction_layer_target(config, folder)
    run(target, NoDrafter(), 8)
    known = run(target, NoDrafter(), options.tokens).tokens
    drafter = make_drafter("mtp", target=target, draft=None, stopper=f"fixed:{PREDICTED}")

    def own(rate: float) -> Drafter:
        drafter.propose = replacing(drafter, Oracle(known, PREDICTED, rate), target)  # type: ignore[method-assign]
        return drafter

    rounds = []
    for rate in RATES:
        free = partial(Oracle, known, PREDICTED, rate)
        made = turns(target, {"free": free, "own": partial(own, rate)}, known, options)
        rounds.append({"drafted": PREDICTED, "acceptance": rate, **made})
    return {"backend": target.kind, "rounds": rounds}


PREDICTED = 4  # tokens that the prediction layer drafts
HEADS = ("drafted", "acceptance", "tokens a round", "read again", "round / plain step", "speed-up")
PASS_HEADS = ("drafted", "verification / plain pass", "restoring / plain pass")
MTP_HEADS = ("drafted", "acceptance", "tokens a round", "verification alone", "round with drafting", "speed-up")
INTRO = (
    "One request, greedy, one thread, processor time; a prompt of {prompt} tokens and {tokens} new ones. Drafts cost "
    "no time but in the last part, and each drafted token is right with the probability in the second column. Read "
    "again: tokens a round that the target had read before. A round over a plain step, and the speed-up (tokens a "
    "round over that): median [least, greatest] of {repeats} requests with drafts, each over the request without them "
    "in the same turn. Such a round is verification and restoring: the aim for four drafts is at most 1.5 plain steps. "
    "Single passes: that over the last token and the drafts, and what it takes more after a round in which all drafts "
    "but the last one were accepted; medians of {passes} in turns. int4: weights of 4 bits made when a bfloat16 model "
    "is loaded."
)
MTP_INTRO = (
    "Here the drafts are those of the prediction layer. Verification alone is a round with the same drafts for "
    "nothing, verification and restoring, for which the aim is at most 1.5 plain steps. A round with drafting has the "
    "layer's own {drafted} passes in it, each with the output layer of {vocab:,} tokens in few bits."
)
BEFORE = " Before: the same ratio in another state of the code (commit {commit}), by the same command."


def section(name: str, dtype: str, figures: Mapping[str, Any], before: Mapping[str, Any] | None) -> list[str]:
    """The part of the page for a model in one dtype."""
    if name == MTP:
        return mtp_section(figures)
    title = f"## {name}: {figures['weights'] / 1e6:.0f} M weights, {dtype}"
    if why := figures.get("unmeasured"):
        return [title, "", f"Not measured, since texts with and without drafts may differ here: {why}.", ""]
    plain = median(ms for each in figures["rounds"] for ms in each["plain_ms"])
    own, passes_ms = figures["transformers_ms"], figures["passes_ms"]
    backend = figures["backend"] + (", lean forward" if figures["lean"] else ", transformers' modules")
    of_own = "" if own is None else f" Of transformers' generation: {own:.1f} ms."
    single = {key: median(each) for key, each in passes_ms.items()}
    lengths = sorted({each["drafted"] for each in figures["rounds"]})
    alone = [
        (
            length,
            f"{single[f'{length}'] / single['1']:.2f}",
            f"{round((single[f'{length} restored'] - single[f'{length}']) / single['1'], 2) + 0:.2f}",
        )
        for length in lengths
    ]
    known = {(each["drafted"], each["acceptance"]): each for each in (before or {}).get("rounds", ())}
    rows = []
    for each in figures["rounds"]:
        earlier = known.get((each["drafted"], each["acceptance"]))
        row = [each["drafted"], each["acceptance"], f"{each['tokens_a_round']:.2f}", f"{each['read_again']:.2f}"]
        row += [median_and_range(each["costs"]), median_and_range(each["speed_ups"])]
        rows.append(row if not known else [*row, "" if earlier is None else median_and_range(earlier["costs"])])
    unmeasured = (before or {}).get("unmeasured")
    of_before = [f"Before: not measured, since texts with and without drafts could differ: {unmeasured}.", ""]
    return [
        title,
        "",
        f"Backend {backend}. A plain step: {plain:.1f} ms.{of_own}",
        "",
        *table(PASS_HEADS, alone),
        "",
        *table((*HEADS, "before") if known else HEADS, rows),
        "",
        *(of_before if unmeasured else []),
    ]


def mtp_section(figures: Mapping[str, Any]) -> list[str]:
    """The part with a drafter that costs time."""
    plain = median(ms for each in figures["rounds"] for ms in each["own"]["plain_ms"])
    rows = [
        (
            each["drafted"],
            each["acceptance"],
            f"{each['own']['tokens_a_round']:.2f}",
            median_and_range(each["free"]["costs"]),
            median_and_range(each["own"]["costs"]),
            median_and_range(each["own"]["speed_ups"]),
        )
        for each in figures["rounds"]
    ]
    vocab = int(configs()[MTP].vocab_size)
    intro = MTP_INTRO.format(drafted=PREDICTED, vocab=vocab)
    return [f"## {MTP}, bfloat16", "", f"{intro} A plain step: {plain:.1f} ms.", "", *table(MTP_HEADS, rows), ""]


def read_figures(path: Path) -> dict[str, Any]:
    """Figures that a run wrote, also compressed; none where there is no such file."""
    for each, opened in ((path, open), (path.with_name(f"{path.name}.gz"), gzip.open)):
        if each.is_file():
            with opened(each, "rt") as file:
                found: dict[str, Any] = json.load(file)
                return found
    return {}


def page(parts: Mapping[str, Any], facts: Mapping[str, Any], options: argparse.Namespace) -> Results:
    """The page of all parts that have been measured."""
    before = read_figures(options.before) if options.before else {}
    intro = INTRO.format(prompt=PROMPT, tokens=options.tokens, repeats=options.repeats, passes=PASSES)
    if before:
        intro += BEFORE.format(commit=before[KEY]["commit"])
    lines = [intro, ""]
    for name in configs():
        for dtype in DTYPES:
            figures = parts.get(f"{short(name)} {dtype}")
            if figures is None:
                continue
            earlier = before.get("parts", {}).get(f"{short(name)} {dtype}")
            lines += section(name, dtype, figures, (earlier or {}) if before else None)
            if figures["commit"] != facts["commit"]:
                lines += [f"Measured at commit {figures['commit']}.", ""]
    return Results("Costs of a round on models with recurrent layers", lines, {"parts": parts}, facts)


def main() -> None:
    """Measure and print a table for each model in each dtype."""
    every = configs()
    parser = common.parser(__doc__)
    parser.add_argument("--model", nargs="+", choices=[short(name) for name in every], help="by default all")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--resume", action="store_true", help="goes on with OUT.json, and leaves its parts out")
    parser.add_argument("--before", type=Path, metavar="FILE", help="figures of another state of the code")
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts, parts = run_facts("cpu"), dict[str, Any]()
    if options.resume and options.out is not None:
        parts |= read_figures(options.out.with_name(f"{options.out.name}.json")).get("parts", {})
    for name, config in every.items():
        if options.model and short(name) not in options.model:
            continue
        for dtype in options.dtype if name != MTP else ["bfloat16"]:
            part = f"{short(name)} {dtype}"
            if part in parts:
                continue
            start = time.monotonic()
            parts[part] = {"commit": facts["commit"], **measure(name, config, dtype, options)}
            common.say(options, f"{part}: {time.monotonic() - start:.0f} s")
            if options.out is not None:  # after each part: the next one may be interrupted
                page(parts, facts, options).write(options.out)
    common.deliver(options, page(parts, facts, options))


if __name__ == "__main__":
    main()
