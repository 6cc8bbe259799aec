"""Measure what published draft heads cost on a CPU, and the speed-up that follows at given acceptance rates.

    python scripts/measure_heads.py [--head NAME ...] [--tokens 64] [--length 4] [--out docs/results/heads] [--resume]

Target and heads have random weights and the shapes of real ones, since costs do not depend on what weights say. Each
head drafts at its full cost; then its tokens are replaced by the target's own, each made wrong with a given
probability, so that the acceptance rate is what it should be. Beside it stands a round with the same drafts for
nothing. Requests without drafts, with free ones and with the head's are decoded in turns, one thread, processor time.

With `--resume`, heads that OUT.json has are not measured again, so one head after another may be measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import common
import torch
import transformers
from measure_snapshots import (
    RATES,
    Oracle,
    calm,
    prediction_layer_target,
    qwen3_5,
    read_figures,
    replacing,
    run,
    turns,
)

from draftproof.backends.base import rounding
from draftproof.backends.loading.by_name import load_backend
from draftproof.backends.loading.in_memory import backend_in_memory
from draftproof.backends.loading.options import LoadOptions
from draftproof.drafters.base import Drafter
from draftproof.drafters.none import NoDrafter
from draftproof.engine.drafter_parts import make_drafter
from draftproof.provenance import run_facts
from draftproof.results import Results, median_and_range, table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support import published

QWEN, QWEN35 = "qwen3-1.7b", "qwen3.5-0.8b"
GEMMA = "gemma-4-e2b (10 of 35 layers, 5 of which share keys)"
INTRO = (
    "One request, greedy, one thread, processor time, bfloat16; {length} drafted tokens in a round. Target and heads "
    "have random weights and the shapes of real ones. A head drafts at its full cost; then its tokens are replaced by "
    "the target's own, each wrong with a probability. A round over a plain step, with the same drafts for nothing "
    "(verification, and restoring of states) and with the head's drafting, and the speed-up (tokens a round over "
    "that): median [least, greatest] of {repeats} requests of each kind, in turns."
)
DRAFTED_IDS = 32000  # tokens that EAGLE-3's heads draft of the target's
SLIDING, FULL = "sliding_attention", "full_attention"
ASSISTANT = [*[(SLIDING, 256)] * 3, (FULL, 512)]
"""The layers of E2B's assistant. Its sizes below make the 78 million weights that its publisher names."""


def configs() -> dict[str, Any]:
    """The targets: whole, but for Gemma 4, of which a layer's own embeddings take 134 MB."""
    kinds = [*[SLIDING] * 4, FULL] * 2
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
        QWEN35: qwen3_5(24, 248320),
        GEMMA: transformers.Gemma4TextConfig(
            vocab_size=262144,
            vocab_size_per_layer_input=262144,
            hidden_size=1536,
            hidden_size_per_layer_input=256,
            intermediate_size=6144,
            num_hidden_layers=len(kinds),
            layer_types=kinds,
            num_kv_shared_layers=5,
            use_double_wide_mlp=True,
            num_attention_heads=8,
            num_key_value_heads=1,
            final_logit_softcapping=30.0,
            tie_word_embeddings=True,
        ),
    }


def written(name: str, folder: Path, target: Any, length: int) -> Path:
    """A head of so many drafted tokens for the target, in its published layout."""
    if name == "assistant":
        sizes = {"size": 256, "inner": 2048, "heads": 4, "clusters": 2048, "kept": 32}
        own: Path = published.assistant(folder, target, layers=ASSISTANT, **sizes)
        return own
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


def target_of(name: str, config: Any, folder: Path) -> Any:
    """The target, with random weights."""
    if name == QWEN35:
        return prediction_layer_target(config, folder)
    model = calm(common.random_model(config, torch.bfloat16))
    if name == QWEN:
        return backend_in_memory(model, name=name)
    model.save_pretrained(folder)  # packed only when it is loaded by name
    del model
    return load_backend(str(folder), LoadOptions(dtype="bfloat16"))


def measure(kind: str, target: Any, known: list[int], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Figures of a head; of `mtp`, of the target's own prediction layer."""
    found = []
    with tempfile.TemporaryDirectory() as place:
        head = None if kind == "mtp" else written(kind, Path(place) / "head", target, options.length)
        spec = kind if head is None else f"{kind}:{head}"
        drafter = make_drafter(spec, target=target, draft=None, stopper=f"fixed:{options.length}")

        def own(rate: float) -> Drafter:
            drafter.propose = replacing(drafter, Oracle(known, options.length, rate), target)  # type: ignore[method-assign]
            return drafter

        for rate in RATES:
            free = partial(Oracle, known, options.length, rate)
            made = turns(target, {"free": free, "own": partial(own, rate)}, known, options)
            found.append({"acceptance": rate, **made})
    return found


HEADS = ("head", "acceptance", "tokens a round", "verification alone", "round with drafting", "speed-up")


def page(parts: Mapping[str, Any], facts: Mapping[str, Any], options: argparse.Namespace) -> Results:
    """The page of all heads that have been measured."""
    lines = [INTRO.format(length=options.length, repeats=options.repeats), ""]
    for name, heads in parts.items():
        if why := heads.get("unmeasured"):
            lines += [f"## {name}: not measured", "", f"Texts with and without drafts may differ here: {why}.", ""]
            continue
        plain = median(ms for each in heads.values() for one in each["rounds"] for ms in one["own"]["plain_ms"])
        rows = [
            (
                kind,
                one["acceptance"],
                f"{one['own']['tokens_a_round']:.2f}",
                median_and_range(one["free"]["costs"]),
                *(median_and_range(one["own"][figure]) for figure in ("costs", "speed_ups")),
            )
            for kind, each in heads.items()
            for one in each["rounds"]
        ]
        lines += [f"## {name}: a plain step {plain:.1f} ms", "", *table(HEADS, rows), ""]
        others = {each["commit"]: kind for kind, each in heads.items() if each["commit"] != facts["commit"]}
        lines += [line for commit, kind in others.items() for line in (f"{kind} at commit {commit}.", "")]
    return Results("Costs of published draft heads", lines, {"parts": parts}, facts)


def main() -> None:
    """Measure, and print a table for each target."""
    every = [*published.WRITERS, "mtp", "assistant"]
    parser = common.parser(__doc__)
    parser.add_argument("--head", nargs="+", choices=every, default=every)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--length", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--resume", action="store_true", help="goes on with OUT.json, and leaves its heads out")
    options = parser.parse_args()
    torch.set_num_threads(1)
    facts, parts = run_facts("cpu"), dict[str, Any]()
    if options.resume and options.out is not None:
        parts |= read_figures(options.out.with_name(f"{options.out.name}.json")).get("parts", {})
    config = configs()
    for name, heads in ((QWEN, list(published.WRITERS)), (QWEN35, ["mtp"]), (GEMMA, ["assistant"])):
        missing = [each for each in heads if each in options.head and each not in parts.get(name, {})]
        if not missing:
            continue
        with tempfile.TemporaryDirectory() as place:
            target = target_of(name, config[name], Path(place))
            if why := rounding(target):
                parts[name] = {"unmeasured": why}
                continue
            run(target, NoDrafter(), 8)
            known = run(target, NoDrafter(), options.tokens).tokens
            for kind in missing:
                common.say(options, "measuring", kind, "for", name)
                made = {"commit": facts["commit"], "rounds": measure(kind, target, known, options)}
                parts.setdefault(name, {})[kind] = made
                if options.out is not None:
                    page(parts, facts, options).write(options.out)
            del target  # the next one may need the memory
    common.deliver(options, page(parts, facts, options))


if __name__ == "__main__":
    main()
