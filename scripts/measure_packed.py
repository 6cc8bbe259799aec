"""Measure checkpoints of GPTQ, AWQ, compressed-tensors and bitsandbytes, in turns with transformers' own reading.

    python scripts/measure_packed.py [METHOD ...] [--shape 135m] [--turns 3] [--python OTHER] [--out OUT] [--resume]

OTHER is an interpreter with transformers and the packages of the methods (gptqmodel and optimum, compressed-tensors,
bitsandbytes); without it draftproof is measured alone. With --resume, methods whose figures stand in OUT.json are not
measured again.

A checkpoint is written with random weights, the same in all layers: what a pass costs does not depend on what weights
say. Its embedding is the output layer, too, and is not packed. Tokens a second after the prompt are those of some
tokens less those of one, with the same prompt; nothing is drafted, except in the passes over several rows.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import common
import torch
import transformers
from measure_gguf import Worker, ids_of, measured, seconds_of
from safetensors.torch import save_file

from draftproof.backends.base import Feed
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.loading.packed_checkpoint import read_packed
from draftproof.engine.engine import Engine
from draftproof.provenance import run_facts
from draftproof.results import Results, median_and_range, table

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support.packed_checkpoints import fields_of, tensors_of

# layers, width, inner width, heads, key heads, vocabulary, inputs of a group
SHAPES = {
    "135m": (30, 576, 1536, 9, 3, 49152, 64),
    "0.5b": (24, 896, 4864, 14, 2, 151936, 128),
}
HEAD = 64
METHODS = {
    "gptq": ("GPTQ", "gptqmodel"),
    "awq": ("AWQ", "gptqmodel"),
    "compressed-tensors": ("compressed-tensors, W4A16", "compressed-tensors"),
    "w8a8": ("compressed-tensors, W8A8", "compressed-tensors"),
    "nf4": ("bitsandbytes, NF4", "bitsandbytes"),
    "int8": ("bitsandbytes, 8 bits", "bitsandbytes"),
}
"""Methods by their names in `tests/support`: what a page calls them, and the package that reads them."""
ROWS, PROMPT, TOKENS = (1, 2, 3, 5, 8), 128, 24
BLOCK = 64  # weights of bitsandbytes that share a scale


def write(folder: Path, method: str, shape: str) -> None:
    """A checkpoint of a method."""
    layers, width, inner, heads, keys, vocab, group = SHAPES[shape]
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=inner, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=keys, head_dim=HEAD, max_position_embeddings=4096,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=vocab - 1, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.dtype = "bfloat16"
    torch.manual_seed(0)
    scale = width**-0.5
    sizes = {
        "self_attn.q_proj": (heads * HEAD, width),
        "self_attn.k_proj": (keys * HEAD, width),
        "self_attn.v_proj": (keys * HEAD, width),
        "self_attn.o_proj": (width, heads * HEAD),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    grouping = BLOCK if method == "nf4" else group
    layer = {
        f"{name}.{each}": content
        for name, size in sizes.items()
        for each, content in tensors_of(method, torch.randn(size) * scale, grouping)[0].items()
    }
    norm = torch.ones(width, dtype=torch.bfloat16)
    layer |= {f"{name}.weight": norm for name in ("input_layernorm", "post_attention_layernorm")}
    tensors = {
        "model.embed_tokens.weight": (torch.randn(vocab, width) * scale).bfloat16(),
        "model.norm.weight": norm.clone(),
    }
    for number in range(layers):
        tensors |= {f"model.layers.{number}.{name}": content.clone() for name, content in layer.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fields = fields_of(method, grouping)
    if method == "gptq":
        fields |= {"sym": False}
    if method in ("awq", "gptq"):
        fields |= {"zero_point": True}
    if fields["quant_method"] == "compressed-tensors":
        fields |= {"quantization_status": "compressed", "ignore": ["lm_head"]}
        fields["config_groups"]["group_0"]["targets"] = ["Linear"]
    if method == "nf4":
        fields |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}
    written = {**config.to_dict(), "quantization_config": fields}
    (folder / "config.json").write_text(json.dumps(written), encoding="utf-8")


def serve(path: str) -> None:
    """Load a checkpoint, and time what is asked for on stdin: a pass of some rows, or a text."""
    start = time.perf_counter()
    backend = read_packed(path, "the checkpoint", LoadOptions())
    assert backend is not None, "it is read in its own numbers"
    session = backend.open()
    backend.forward([Feed(session, ids_of(PROMPT))])
    loaded = time.perf_counter() - start
    engine = Engine(backend, prefix_reuse=False)
    print(json.dumps({"load": loaded, "backend": backend.kind}), flush=True)
    for line in sys.stdin:
        print(json.dumps(seconds_of(json.loads(line), engine, session)), flush=True)


def speeds(worker: Worker) -> dict[str, float]:
    """Tokens a second of a prompt, and after it."""
    one = worker.ask(prompts=[ids_of(PROMPT)], tokens=1, temperature=0.0)
    more = worker.ask(prompts=[ids_of(PROMPT)], tokens=TOKENS + 1, temperature=0.0)
    return {"prompt": PROMPT / one, "after it": TOKENS / (more - one)}


def measure(folder: Path, options: Any) -> dict[str, Any]:
    """All figures of one checkpoint."""
    ours = Worker([sys.executable, __file__, "--serve", str(folder)])
    found: dict[str, Any] = {
        **json.loads(ours.first),
        "bytes": (folder / "model.safetensors").stat().st_size,
        "ours": [],
        "transformers": [],
    }
    other = None
    if options.python:
        start = time.perf_counter()
        other = Worker([options.python, "-m", "draftproof.bench.worker", "transformers", str(folder), "auto", "1"])
        other.ask(prompts=[ids_of(PROMPT)], tokens=1, temperature=0.0)
        found["other load"] = time.perf_counter() - start
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(options.turns):
        ours.ask(rows=ROWS[-1])  # the other engine was at work
        for rows in ROWS:
            times[rows].append(ours.ask(rows=rows))
        found["ours"].append(speeds(ours))
        if other is not None:
            found["transformers"].append(speeds(other))
    found["rows"] = {str(rows): [1000 * each for each in taken] for rows, taken in times.items()}
    found["peak"] = ours.peak()
    ours.end()
    if other is not None:
        found["other peak"] = other.peak()
        other.end()
    return found


def page(rows: dict[str, Any], options: Any) -> Results:
    """The results as a page."""
    speed, passes, memory = [], [], []
    for name, found in rows.items():
        for engine in ("transformers", "ours"):
            if each := found[engine]:
                parts = (median_and_range([turn[part] for turn in each], 1) for part in ("prompt", "after it"))
                times = [
                    mine["after it"] / theirs["after it"]
                    for mine, theirs in zip(found["ours"], found["transformers"], strict=False)
                ]
                beside = median_and_range(times, 1) if times and engine == "ours" else ""
                speed.append([name, engine, *parts, beside])
        taken = {count: median(each) for count, each in found["rows"].items()}
        cells = (f"{taken[str(count)] / taken['1']:.2f}" for count in ROWS[1:])
        passes.append([name, f"{taken['1']:.1f}", *cells])
        others = [f"{found['other peak']}", f"{found['other load']:.1f}"] if "other peak" in found else ["", ""]
        memory.append([name, f"{found['bytes'] / 2**20:.0f}", f"{found['peak']}", f"{found['load']:.1f}", *others])
    heads = ["checkpoint", "read by", f"prompt of {PROMPT} tokens", "after the prompt", "ours / transformers"]
    lines = [
        f"Random weights, {torch.get_num_threads()} threads; nothing is drafted. Tokens a second, median of",
        f"{options.turns} turns [least, greatest]; the last column is the ratio of the same turns after the prompt.",
        "The other reading is `generate` of transformers with the package of the method, in the dtype of the",
        "checkpoint (bfloat16).",
        "",
        *table(heads, speed),
        "",
        f"A pass of ours over several rows, as a multiple of one (context {PROMPT}):",
        "",
        *table(["checkpoint", "one row, ms", *(f"{n} rows" for n in ROWS[1:])], passes),
        "",
        f"Memory, and seconds until a prompt of {PROMPT} tokens is read: ours in a process that has imported the",
        "library, transformers' from the start of its process. What is mapped of the file counts in both.",
        "",
        *table(["checkpoint", "file, MiB", "peak, MiB", "load, s", "transformers, peak, MiB", "load, s"], memory),
    ]
    return Results("Quantized checkpoints beside transformers", lines, rows, run_facts())


def main() -> None:
    """Measure methods."""
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
        return
    parser = common.parser(__doc__)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=f"of {', '.join(METHODS)}; all without any")
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--python", help="an interpreter with transformers and the packages of the methods")
    parser.add_argument("--resume", action="store_true", help="keeps the methods whose figures stand in OUT.json")
    options = parser.parse_args()
    if unknown := [name for name in options.methods if name not in METHODS]:
        parser.error(f"unknown methods {', '.join(unknown)}: expected some of {', '.join(METHODS)}")
    rows = measured(options.out) if options.resume and options.out is not None else {}
    for method in options.methods or METHODS:
        title = f"{METHODS[method][0]}, {options.shape}"
        if title in rows:
            continue
        common.say(options, "measuring", title)
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), method, options.shape)
            rows[title] = measure(Path(folder), options)
        if options.out is not None:  # after each method: the next one may be interrupted
            page(rows, options).write(options.out)
    common.deliver(options, page(rows, options))


if __name__ == "__main__":
    main()
