"""Measure what published draft heads cost on a CPU, and the speed-up that follows at given acceptance rates.

    python scripts/measure_heads.py [--head NAME ...] [--tokens 64] [--length 4] [--out docs/results/heads]

Target and heads have random weights and the shapes of real ones, since costs do not depend on what weights say. Each
head drafts at its full cost; then its tokens are replaced by the target's own, each made wrong with a given
probability, so that the acceptance rate is what it should be. Requests with and without drafts are decoded in turns,
one thread, processor time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import common
import torch
import transformers
from measure_snapshots import RATES, Oracle, Run, run

from draftproof.backends.base import rounding
from draftproof.backends.loading.by_name import load_backend
from draftproof.backends.loading.in_memory import backend_in_memory
from draftproof.backends.loading.options import LoadOptions
from draftproof.draft import Draft
from draftproof.drafters.base import Drafter, DraftRequest
from draftproof.drafters.ngram import with_probabilities
from draftproof.drafters.none import NoDrafter
from draftproof.engine.drafter_parts import make_drafter
from draftproof.provenance import run_facts
from draftproof.results import Results, median_and_range, table
from draftproof.rng import RoundRng

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support import published, qwen_mtp

QWEN = "qwen3-1.7b"
QWEN35 = "qwen3.5-0.8b"
INTRO = (
    "One request, greedy, one thread, processor time, bfloat16; {length} drafted tokens in a round. Target and heads "
    "have random weights and the shapes of real ones. A head drafts at its full cost; then its tokens are replaced by "
    "the target's own, each wrong with a probability. A round over a plain step, and the speed-up (tokens a round over "
    "that): median [least, greatest] of {repeats} pairs of requests with and without drafts, in turns."
)
DRAFTED_IDS = 32000  # tokens that EAGLE-3's heads draft of the target's


def configs() -> dict[str, Any]:
    """The targets, whole."""
    return {
        QWEN: transformers.Qwen3Config(
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=True,
        ),
        QWEN35: transformers.Qwen3_5TextConfig(
            vocab_size=248320,
            hidden_size=1024,
            intermediate_size=3584,
            num_hidden_layers=24,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=256,
            linear_num_key_heads=16,
            linear_num_value_heads=16,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            tie_word_embeddings=True,
        ),
    }


def written(name: str, folder: Path, target: Any, length: int) -> Path:
    """A head of so many drafted tokens for the target, in its published layout."""
    shape, layers = published.LayerShape(16, 8, 128, 6144), (2, 14, 25)
    if name in ("eagle3", "peagle"):
        more: dict[str, Any] = {"ids": list(range(DRAFTED_IDS)), "layers": layers, "shape": shape}
    elif name.startswith(("dflash", "dspark")):
        more = {"layers": layers, "shape": shape, "block": length + (name != "dspark")}
        if name != "dflash":
            more["rank"] = 256
    else:
        more = {"heads": length} if name == "medusa" else {"shape": shape}
    made: Path = published.WRITERS[name](folder, target, **more)
    config = json.loads((made / "config.json").read_text())
    for part in (config, config.get("transformer_layer_config", {})):
        if "max_position_embeddings" in part:
            part["max_position_embeddings"] = 4096
    (made / "config.json").write_text(json.dumps(config))
    return made


def turns(target: Any, drafter: Drafter, known: list[int], rate: float, options: Any) -> dict[str, Any]:
    """Requests with drafts, whose tokens are replaced by known ones after they were drafted, and without, in turns."""
    own, pairs = drafter.propose, []
    for number in range(options.repeats):
        made: dict[bool, Run] = {}
        for drafts in (True, False) if number % 2 else (False, True):
            oracle = Oracle(known, options.length, rate)

            def replaced(requests: Sequence[DraftRequest], rng: RoundRng, oracle: Oracle = oracle) -> list[Draft]:
                own(requests, rng)
                drafted = oracle.propose(requests, rng)
                return [with_probabilities(each, target.vocab_size, torch.float32) for each in drafted]

            drafter.propose = replaced  # type: ignore[method-assign] # of this one drafter
            made[drafts] = run(target, drafter if drafts else NoDrafter(), options.tokens)
        assert made[True].tokens == made[False].tokens == known, "the same tokens"
        pairs.append(made)
    drafter.propose = own  # type: ignore[method-assign]
    costs = [made[True].round_ms / made[False].round_ms for made in pairs]
    tokens = pairs[-1][True].per_round
    return {
        "tokens_a_round": tokens,
        "round_ms": [made[True].round_ms for made in pairs],
        "plain_ms": [made[False].round_ms for made in pairs],
        "costs": costs,
        "speed_ups": [tokens / cost for cost in costs],
    }


def measure(name: str, target: Any, heads: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Figures of heads of one target; without heads, of its own prediction layer."""
    run(target, NoDrafter(), 8)
    known = run(target, NoDrafter(), options.tokens).tokens
    found: dict[str, Any] = {}
    for kind in heads:
        common.say(options, "measuring", kind, "for", name)
        with tempfile.TemporaryDirectory() as place:
            head = None if kind == "mtp" else written(kind, Path(place) / "head", target, options.length)
            spec = kind if head is None else f"{kind}:{head}"
            drafter = make_drafter(spec, target=target, draft=None, stopper=f"fixed:{options.length}")
            found[kind] = {rate: turns(target, drafter, known, rate, options) for rate in RATES}
        del drafter  # the next one may need the memory
    return found


def main() -> None:
    """Measure, and print a table for each target."""
    parser = common.parser(__doc__)
    parser.add_argument("--head", nargs="+", choices=[*published.WRITERS, "mtp"], default=[*published.WRITERS, "mtp"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--length", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts, figures = run_facts("cpu"), dict[str, Any]()
    lines = [INTRO.format(length=options.length, repeats=options.repeats), ""]
    results = Results("Costs of published draft heads", lines, figures, facts)  # of what has been measured so far
    config = configs()
    for name, heads in ((QWEN, [each for each in options.head if each != "mtp"]), (QWEN35, ["mtp"])):
        if not set(heads) & set(options.head):
            continue
        with tempfile.TemporaryDirectory() as place:
            model = common.random_model(config[name], torch.bfloat16)
            if "mtp" in heads:
                own = {key: each.bfloat16() for key, each in qwen_mtp.tensors_of(model.config).items()}
                qwen_mtp.written_with(Path(place), model, own)
                target: Any = load_backend(place, LoadOptions(dtype="bfloat16"))
            else:
                target = backend_in_memory(model, name=name)
            if why := rounding(target):
                lines += [f"## {name}: not measured", "", f"Texts with and without drafts may differ here: {why}.", ""]
                common.say(options, *lines[-4:])
                continue
            found = measure(name, target, heads, options)
        figures[name] = found
        plain = median(ms for kind in found.values() for each in kind.values() for ms in each["plain_ms"])
        rows = [
            (
                kind,
                rate,
                f"{each['tokens_a_round']:.2f}",
                *(median_and_range(each[figure]) for figure in ("costs", "speed_ups")),
            )
            for kind, rates in found.items()
            for rate, each in rates.items()
        ]
        heads_of_table = ("head", "acceptance", "tokens a round", "round / plain step", "speed-up")
        lines += [f"## {name}: a plain step {plain:.1f} ms", "", *table(heads_of_table, rows), ""]
        common.say(options, *lines[-len(rows) - 5 :])
        if options.out is not None:
            results.write(options.out)
    common.deliver(options, results)


if __name__ == "__main__":
    main()
