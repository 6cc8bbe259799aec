"""Measure models in GGUF files in their own numbers, in turns with llama.cpp where the package xllamacpp is installed.

    python scripts/measure_gguf.py [FILE ...] [--shape 1.5b ...] [--repeats 5] [--python OTHER] [--out OUT] [--resume]

With --python, the environment variable LLAMA_SERVER may name a program of llama.cpp that was built for this processor.
--llama-bench names its program for passes of several rows. With --resume, files whose figures stand in OUT.json are
not measured again.

A shape is written with random blocks of the types that stand in a Q4_K_M file: what a pass costs does not depend on
what weights say, but for mixtures, whose tokens choose experts by chance here. Tokens a second after the prompt are
those of 64 tokens less those of one, with the same prompt.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import common
import numpy as np
import torch

from draftproof.backends import base
from draftproof.backends.base import Backend, Feed, Session
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean.backend import LeanForward
from draftproof.backends.lean.layers import Lean
from draftproof.backends.lean.mixture import Mixture
from draftproof.backends.loading.gguf_model import in_own_numbers
from draftproof.backends.loading.options import LoadOptions
from draftproof.engine.engine import Engine
from draftproof.models.gguf_file import GGUFFile
from draftproof.native.ggml import TYPES
from draftproof.provenance import run_facts
from draftproof.results import Results, median_and_range, table
from draftproof.sampling import SamplingParams
from draftproof.tree import TokenTree

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support.gguf_files import SCALES, random_blocks

# layers, width, inner width, heads, key heads, head size, experts, experts of a token
SHAPES = {
    "0.5b": (24, 896, 4864, 14, 2, 64, 0, 0),
    "1.5b": (28, 1536, 8960, 12, 2, 128, 0, 0),
    "3b": (36, 2048, 11008, 16, 2, 128, 0, 0),
    "7b": (28, 3584, 18944, 28, 4, 128, 0, 0),
    "30b-a3b": (8, 2048, 768, 32, 4, 128, 128, 8),  # of 48 layers
}
ON_MODULES = ("lfm2-1.2b", "qwen3.5-0.8b", "gemma4-e2b")
VOCAB = 151936
ROWS, PROMPTS, TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12), (128, 2048), 64
Q5_0, Q8_0, Q4_K, Q5_K, Q6_K = 6, 8, 12, 13, 14


def write_tokens(writer: Any, vocab: int, pre: str) -> None:
    """A tokenizer of bytes and of tokens without a use."""
    from tokenizers.pre_tokenizers import ByteLevel

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, letters[0] + letters[1]]
    writer.add_token_list(tokens + [f"token {number}" for number in range(len(tokens), vocab)])
    writer.add_token_types([1] * vocab)
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_eos_token_id(vocab - 1)


class Written:
    """A file that is being written.

    Args:
        path: of it.
        architecture: in GGUF.
        vocab: number of tokens.
        pre: name of the pre-tokenizer.
        numbers: of the metadata, by key.
    """

    def __init__(self, path: Path, architecture: str, vocab: int, pre: str, **numbers: Any) -> None:
        import gguf

        self._types = gguf.GGMLQuantizationType
        self._blocks = functools.cache(random_blocks)  # layers may have the same numbers
        self._writer = gguf.GGUFWriter(path, architecture)
        for key, value in numbers.items():
            add: Any = {int: self._writer.add_uint32, float: self._writer.add_float32, list: self._writer.add_array}
            add[type(value)](f"{architecture}.{key}", value)
        write_tokens(self._writer, vocab, pre)

    def matrix(self, name: str, outs: int, ins: int, kind: int, count: int = 0) -> None:
        """Random blocks; of a related type where rows are not whole blocks."""
        kind = kind if ins % TYPES[kind].elements == 0 else {Q4_K: Q5_0, Q6_K: Q8_0}[kind]
        made = self._blocks(kind, max(count, 1) * outs, ins, seed=outs + ins, scale=SCALES[kind])
        shaped = made.reshape(*([count] if count else []), outs, -1)
        self._writer.add_tensor(f"{name}.weight", shaped, raw_dtype=self._types(kind))

    def floats(self, name: str, content: Any, dtype: Any = np.float32) -> None:
        """A tensor of floats."""
        self._writer.add_tensor(name, np.asarray(content, dtype))

    def end(self) -> None:
        """Write everything."""
        self._writer.write_header_to_file()
        self._writer.write_kv_data_to_file()
        self._writer.write_tensors_to_file()
        self._writer.close()


def more_bits(layer: int, layers: int) -> int:
    """The type of a layer's values and last feed-forward matrices in a Q4_K_M file."""
    eighth = layers // 8
    return Q6_K if layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2 else Q4_K


def write_lfm2(path: Path) -> None:
    """A file with the shape of LFM2-1.2B."""
    layers, width, inner, attends = 16, 2048, 8192, (2, 5, 8, 10, 12, 14)
    numbers: dict[str, Any] = {
        "block_count": layers,
        "context_length": 128000,
        "embedding_length": width,
        "feed_forward_length": inner,
        "attention.head_count": 32,
        "attention.head_count_kv": [8 if layer in attends else 0 for layer in range(layers)],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e6,
        "shortconv.l_cache": 3,
        "vocab_size": 65536,
    }
    file = Written(path, "lfm2", 65536, "lfm2", **numbers)
    file.matrix("token_embd", 65536, width, Q6_K)
    file.floats("token_embd_norm.weight", np.ones(width))
    for layer in range(layers):
        at = f"blk.{layer}."
        for norm in ("attn_norm", "ffn_norm"):
            file.floats(f"{at}{norm}.weight", np.ones(width))
        if layer in attends:
            for part, outs, kind in (("q", width, Q4_K), ("k", 512, Q4_K), ("v", 512, more_bits(layer, layers))):
                file.matrix(f"{at}attn_{part}", outs, width, kind)
            for part in ("q", "k"):
                file.floats(f"{at}attn_{part}_norm.weight", np.ones(64))
            file.matrix(f"{at}attn_output", width, width, Q4_K)
        else:
            file.matrix(f"{at}shortconv.in_proj", 3 * width, width, Q4_K)
            file.matrix(f"{at}shortconv.out_proj", width, width, Q4_K)
            file.floats(f"{at}shortconv.conv.weight", np.random.default_rng(layer).standard_normal((width, 3)) / 2)
        for part in ("gate", "up"):
            file.matrix(f"{at}ffn_{part}", inner, width, Q4_K)
        file.matrix(f"{at}ffn_down", width, inner, more_bits(layer, layers))
    file.end()


def write_qwen35(path: Path) -> None:
    """A file with the shape of Qwen3.5-0.8B."""
    layers, width, inner, vocab, heads, keys, dim, linear = 24, 1024, 3584, 248320, 8, 2, 256, 2048
    numbers: dict[str, Any] = {
        "block_count": layers,
        "context_length": 262144,
        "embedding_length": width,
        "feed_forward_length": inner,
        "attention.head_count": heads,
        "attention.head_count_kv": keys,
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e7,
        "rope.dimension_count": 64,
        "rope.dimension_sections": [11, 11, 10, 0],
        "ssm.conv_kernel": 4,
        "ssm.state_size": 128,
        "ssm.group_count": 16,
        "ssm.time_step_rank": 16,
        "ssm.inner_size": linear,
        "full_attention_interval": 4,
    }
    file = Written(path, "qwen35", vocab, "qwen35", **numbers)
    file.matrix("token_embd", vocab, width, Q6_K)
    file.floats("output_norm.weight", np.ones(width))
    for layer in range(layers):
        at, more = f"blk.{layer}.", more_bits(layer, layers)
        for norm in ("attn_norm", "post_attention_norm"):
            file.floats(f"{at}{norm}.weight", np.ones(width))
        if layer % 4 == 3:
            for part, outs, kind in (("q", 2 * heads * dim, Q4_K), ("k", keys * dim, Q4_K), ("v", keys * dim, more)):
                file.matrix(f"{at}attn_{part}", outs, width, kind)
            for part in ("q", "k"):
                file.floats(f"{at}attn_{part}_norm.weight", np.ones(dim))
            file.matrix(f"{at}attn_output", width, heads * dim, Q4_K)
        else:
            source = np.random.default_rng(layer)
            file.matrix(f"{at}attn_qkv", 3 * linear, width, Q5_K)
            file.matrix(f"{at}attn_gate", linear, width, Q4_K)
            for part in ("alpha", "beta"):
                file.matrix(f"{at}ssm_{part}", 16, width, Q4_K)
            file.matrix(f"{at}ssm_out", width, linear, Q4_K)
            file.floats(f"{at}ssm_conv1d.weight", source.standard_normal((3 * linear, 4)) / 2)
            file.floats(f"{at}ssm_norm.weight", np.ones(128))
            file.floats(f"{at}ssm_a", -source.uniform(0.1, 2.0, 16))
            file.floats(f"{at}ssm_dt.bias", np.zeros(16))
        for part in ("gate", "up"):
            file.matrix(f"{at}ffn_{part}", inner, width, Q4_K)
        file.matrix(f"{at}ffn_down", width, inner, more)
    file.end()


def write_gemma4(path: Path) -> None:
    """A file with the shape of Gemma 4 E2B."""
    layers, shared, width, inner, heads, vocab, part = 35, 20, 1536, 6144, 8, 262144, 256
    windowed = [(layer + 1) % 5 != 0 for layer in range(layers)]
    numbers: dict[str, Any] = {
        "block_count": layers,
        "context_length": 131072,
        "embedding_length": width,
        "feed_forward_length": [inner * (1 + (layer >= layers - shared)) for layer in range(layers)],
        "attention.head_count": heads,
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.key_length": 512,
        "attention.value_length": 512,
        "attention.key_length_swa": 256,
        "attention.value_length_swa": 256,
        "attention.sliding_window": 512,
        "attention.sliding_window_pattern": windowed,
        "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": part,
        "final_logit_softcapping": 30.0,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "rope.dimension_count": 512,
        "rope.dimension_count_swa": 256,
    }
    file = Written(path, "gemma4", vocab, "qwen2", **numbers)
    file.matrix("token_embd", vocab, width, Q6_K)
    file.matrix("per_layer_token_embd", vocab, layers * part, Q6_K)
    projection = np.random.default_rng(0).standard_normal((layers * part, width)) / width**0.5
    file.floats("per_layer_model_proj.weight", projection, np.float16)
    file.floats("per_layer_proj_norm.weight", np.ones(part))
    file.floats("output_norm.weight", np.ones(width))
    file.floats("rope_freqs.weight", [1.0] * 64 + [1e30] * 192)
    for layer in range(layers):
        at, more, dim = f"blk.{layer}.", more_bits(layer, layers), 256 if windowed[layer] else 512
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "post_norm"):
            file.floats(f"{at}{norm}.weight", np.ones(width))
        file.floats(f"{at}layer_output_scale.weight", np.ones(1))
        file.matrix(f"{at}attn_q", heads * dim, width, Q4_K)
        file.floats(f"{at}attn_q_norm.weight", np.ones(dim))
        if layer < layers - shared:
            file.matrix(f"{at}attn_k", dim, width, Q4_K)
            file.matrix(f"{at}attn_v", dim, width, more)
            file.floats(f"{at}attn_k_norm.weight", np.ones(dim))
        file.matrix(f"{at}attn_output", width, heads * dim, Q4_K)
        wide = inner * (1 + (layer >= layers - shared))
        for name in ("gate", "up"):
            file.matrix(f"{at}ffn_{name}", wide, width, Q4_K)
        file.matrix(f"{at}ffn_down", width, wide, more)
        file.matrix(f"{at}inp_gate", part, width, Q4_K)
        file.matrix(f"{at}proj", width, part, Q4_K)
    file.end()


def write_shape(path: Path, name: str) -> None:
    """A file with the shape of a Qwen2.5 or Qwen3 model and the types of tensors that a Q4_K_M file of it has."""
    if name in ON_MODULES:
        {"lfm2-1.2b": write_lfm2, "qwen3.5-0.8b": write_qwen35, "gemma4-e2b": write_gemma4}[name](path)
        return
    layers, width, inner, heads, keys, dim, experts, chosen = SHAPES[name]
    numbers: dict[str, Any] = {
        "block_count": layers,
        "context_length": 32768,
        "embedding_length": width,
        "feed_forward_length": inner,
        "attention.head_count": heads,
        "attention.head_count_kv": keys,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e6,
    }
    if experts:
        numbers |= {"expert_count": experts, "expert_used_count": chosen, "expert_feed_forward_length": inner}
        numbers |= {"attention.key_length": dim, "attention.value_length": dim}
    file = Written(path, "qwen3moe" if experts else "qwen2", VOCAB, "qwen2", **numbers)
    file.matrix("output", VOCAB, width, Q6_K)
    file.matrix("token_embd", VOCAB, width, Q4_K)
    file.floats("output_norm.weight", np.ones(width))
    for layer in range(layers):
        at, more = f"blk.{layer}.", more_bits(layer, layers)
        for norm in ("attn_norm", "ffn_norm"):
            file.floats(f"{at}{norm}.weight", np.ones(width))
        for part, outs, kind in (("q", heads * dim, Q4_K), ("k", keys * dim, Q4_K), ("v", keys * dim, more)):
            file.matrix(f"{at}attn_{part}", outs, width, kind)
            if not experts:
                file.floats(f"{at}attn_{part}.bias", np.zeros(outs))
        file.matrix(f"{at}attn_output", width, heads * dim, Q4_K)
        of = "_exps" if experts else ""
        file.matrix(f"{at}ffn_gate{of}", inner, width, Q4_K, experts)
        file.matrix(f"{at}ffn_up{of}", inner, width, Q4_K, experts)
        file.matrix(f"{at}ffn_down{of}", width, inner, more, experts)
        if experts:
            file.floats(f"{at}attn_q_norm.weight", np.ones(dim))
            file.floats(f"{at}attn_k_norm.weight", np.ones(dim))
            router = np.random.default_rng(layer).standard_normal((experts, width)) / width**0.5
            file.floats(f"{at}ffn_gate_inp.weight", router)
    file.end()


# --- ours, in a process of its own ------------------------------------------------------------------------------------


def ids_of(count: int) -> list[int]:
    """A prompt that does not repeat itself."""
    return [1 + number * 7919 % 5000 for number in range(count)]


class Counting(Mixture):
    """A mixture that counts the experts that rows choose.

    Args:
        mixture: of a layer.
    """

    def __init__(self, mixture: Mixture) -> None:
        vars(self).update(vars(mixture))
        self.found = 0

    def onto(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See `Mixture`."""
        self.found = len(set(self.router(x).topk(self.arguments.chosen).indices.flatten().tolist()))
        return super().onto(x, rows)

    @property
    def read(self) -> float:
        """Bytes of their weights."""
        return float(sum(each.weight.nbytes for each in self.experts) * self.found / self.arguments.experts)


def experts_read(lean: Lean, run: Callable[[], object]) -> tuple[float, float]:
    """Experts of a layer that a pass reads, on the mean, and bytes of weights that it reads in all."""
    whole, mixtures = lean.run_layers, [layer.mixture for layer in lean.layers if layer.mixture is not None]
    rest = [lean.head, *(product for layer in lean.layers for product in layer.products.values())]
    dense = sum(product.weight.nbytes for product in rest)
    if len(mixtures) < len(lean.layers):
        return 0.0, float(dense if not mixtures else 0)
    counting = [Counting(mixture) for mixture in mixtures]

    def one_by_one(x: torch.Tensor, at: Any, masks: Any) -> torch.Tensor:
        for layer, each in zip(lean.layers, counting, strict=True):
            twin = copy.copy(layer)
            twin.mixture = each
            x = twin(x, at, masks[layer.kind])
        return x

    lean.run_layers = one_by_one
    run()
    lean.run_layers = whole
    read = dense + sum(each.read for each in counting)
    return sum(each.found for each in counting) / len(counting), read


def reading() -> float:
    """Bytes a second that all threads read of numbers in memory, the best of five times."""
    numbers = torch.ones(128 << 20)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        numbers.sum()
        times.append(time.perf_counter() - start)
    return numbers.nbytes / min(times)


@contextmanager
def pass_of(rows: int, session: Session, backend: Backend) -> Iterator[Callable[[], object]]:
    """A pass over some rows after those of a session, which is left as it is."""
    tree = TokenTree.chain(torch.tensor(ids_of(rows)[1:])) if rows > 1 else None
    mine = session.fork(session.length)
    assert mine is not None, "the session was closed"
    yield functools.partial(backend.forward, [Feed(mine, [7], tree)])
    mine.close()


def seconds_of(asked: Mapping[str, Any], engine: Engine, session: Session) -> float:
    """How long a pass over some rows, or a text, takes."""
    if "rows" in asked:
        with pass_of(asked["rows"], session, engine.target) as run:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
    params = SamplingParams(max_tokens=asked["tokens"], temperature=0, ignore_eos=True)
    start = time.perf_counter()
    engine.generate(asked["prompts"][0], params)
    return time.perf_counter() - start


SHAPE = "shape.gguf"  # the name of a file of random weights
UNCHECKED = "unchecked"


def serve(path: str, *, check: bool) -> None:
    """Load a file, and time what is asked for on stdin: a pass of some rows, or a text."""
    start = time.perf_counter()
    backend = in_own_numbers(GGUFFile(Path(path)), "file", LoadOptions(check=check))
    if check and Path(path).name == SHAPE and backend is not None and base.kind(backend) == HFBackend.kind:
        arguments = [sys.executable, *sys.argv, UNCHECKED]
        os.execv(sys.executable, arguments)  # noqa: S606 - no shell; the peak is then that of one model
    assert backend is not None, "the file is read in its own numbers"
    session = backend.open()
    backend.forward([Feed(session, ids_of(128))])
    loaded = time.perf_counter() - start
    status = Path("/proc/self/status").read_text(encoding="utf-8")  # getrusage counts what the parent had, too
    peak = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) >> 10  # type: ignore[index] # Linux has it
    engine = Engine(backend, prefix_reuse=False)
    print(json.dumps({"load": loaded, "peak": peak}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "read" in asked:
            print(json.dumps(reading()), flush=True)
            continue
        if asked.get("count"):
            with pass_of(asked["rows"], session, backend) as run:
                found = experts_read(backend.lean, run) if isinstance(backend, LeanForward) else (0.0, 0.0)
            print(json.dumps(found), flush=True)
            continue
        print(json.dumps(seconds_of(asked, engine, session)), flush=True)


SPINNING = {"GOMP_SPINCOUNT": None}  # threads of llama.cpp meet often: it is a third slower without spinning


class Worker:
    """A process that loads an engine and answers with seconds.

    Args:
        command: that starts it; its first line says that it is ready.
        environment: variables in place of its own; None takes one away.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str | None] | None = None) -> None:
        changed: dict[str, str | None] = {**os.environ, **(environment or {})}
        kept = {name: value for name, value in changed.items() if value is not None}
        pipe = subprocess.PIPE
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._said, text=True, env=kept, start_new_session=True
        )
        self.first = self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None, "piped"
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._said.seek(0)
            raise SystemExit(f"an engine ended with code {code}:\n{self._said.read().decode(errors='replace')[-2000:]}")
        return line

    def peak(self) -> int:
        """MiB of memory that its largest process had at most; with what it maps of files."""
        most = 0
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                group = os.getpgid(int(folder.name))
                status = (folder / "status").read_text(encoding="utf-8")
            except OSError:  # it has ended
                continue
            if group == self._process.pid and (mark := re.search(r"VmHWM:\s+(\d+) kB", status)):
                most = max(most, int(mark[1]) >> 10)
        return most

    def ask(self, **asked: Any) -> Any:
        """What it answers: as a rule how many seconds it took."""
        assert self._process.stdin is not None, "piped"
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        return json.loads(self._line())

    def end(self) -> None:
        """Stop it, and what it started."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def speeds(seconds: Callable[..., float]) -> dict[str, float]:
    """Tokens a second of prompts, and after one."""
    made: dict[str, float] = {}
    for size in PROMPTS:
        one = seconds(prompts=[ids_of(size)], tokens=1, temperature=0.0)
        made[f"prompt {size}"] = size / one
        if size == PROMPTS[0]:
            made["after it"] = TOKENS / (seconds(prompts=[ids_of(size)], tokens=TOKENS + 1, temperature=0.0) - one)
    return made


def passes_of_other(program: str, path: Path) -> dict[int, float]:
    """Milliseconds of llama.cpp's passes by rows, after 128 tokens, each the mean of three."""
    command = [program, "-m", str(path), "-t", str(torch.get_num_threads()), "-n", "0", "-d", "128", "-r", "3"]
    command += ["-p", ",".join(map(str, ROWS)), "-o", "json"]
    environment = {name: value for name, value in os.environ.items() if name not in SPINNING}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return {each["n_prompt"]: each["avg_ns"] / 1e6 for each in json.loads(done.stdout)}


def measure(path: Path, options: Any) -> dict[str, Any]:
    """All figures of one file."""
    ours = Worker([sys.executable, __file__, "--serve", str(path)])
    found: dict[str, Any] = {
        **json.loads(ours.first),
        "bytes": path.stat().st_size,
        "rows": {},
        "reading": [],
        "ours": [],
        "llama.cpp": [],
    }
    other = None
    if options.python:
        command = [options.python, "-m", "draftproof.bench.worker", "llama.cpp", str(path), "auto", "1"]
        start = time.perf_counter()
        other = Worker(command, SPINNING)
        other.ask(prompts=[ids_of(128)], tokens=1, temperature=0.0)
        found |= {"other load": time.perf_counter() - start, "other peak": other.peak()}
    found["experts"] = {str(rows): ours.ask(rows=rows, count=True) for rows in ROWS}
    times: dict[int, list[float]] = {rows: [] for rows in ROWS}
    others: dict[int, list[float]] = {rows: [] for rows in ROWS}
    for _ in range(options.repeats):
        ours.ask(rows=ROWS[-1])  # the other engine was at work
        for rows in ROWS:
            times[rows].append(ours.ask(rows=rows))
        found["reading"].append(ours.ask(read=True))
        found["ours"].append(speeds(ours.ask))
        if other is not None:
            found["llama.cpp"].append(speeds(other.ask))
        if options.llama_bench:
            for rows, taken in passes_of_other(options.llama_bench, path).items():
                others[rows].append(taken)
    if options.llama_bench:
        found["other rows"] = {str(rows): median(each) for rows, each in others.items()}
    found["rows"] = {str(rows): 1000 * median(each) for rows, each in times.items()}
    found["least"] = {str(rows): 1000 * min(each) for rows, each in times.items()}
    ours.end()
    if other is not None:
        other.end()
    return found


def mixture_lines(rows: dict[str, Any]) -> list[str]:
    """What passes of mixtures read."""
    made = []
    for name, found in rows.items():
        (_, fewest), one = found["experts"]["1"], found["least"]["1"]
        for count, (experts, read) in found["experts"].items():
            time = found["least"][count]
            if experts:
                shares = f"{time / one:.2f}", f"{experts:.1f}", f"{read / 1e6:.0f}", f"{read / fewest:.2f}"
                made.append([name, count, f"{time:.1f}", *shares, f"{read / time / 1e6:.1f}"])
    heads = ["file", "rows", "least ms", "of one row", "experts of a layer", "MB read", "of one row", "GB/s"]
    return (
        [
            "Mixtures of experts whose tokens choose by chance; the least of all turns, as the machine may be shared:",
            "",
            *table(heads, made),
            "",
        ]
        if made
        else []
    )


def share(found: dict[str, Any]) -> tuple[str, str]:
    """GB/s of a pass of one row, and how much that is of reading alone; nothing for what runs on modules."""
    bytes_read = found["experts"]["1"][1]
    if not bytes_read:
        return "", ""
    speed = bytes_read / found["rows"]["1"] * 1000
    return f"{speed / 1e9:.1f}", f"{speed / median(found['reading']):.0%}"


def other_engine() -> str:
    """Which llama.cpp the worker starts."""
    program = os.environ.get("LLAMA_SERVER")
    return "its own server, built for this processor" if program else "that of the package xllamacpp"


def page(rows: dict[str, Any], options: Any) -> Results:
    """The results as a page."""
    parts = (*(f"prompt {size}" for size in PROMPTS), "after it")
    speed = [
        [name, engine, *(median_and_range([each[part] for each in found[engine]], 1) for part in parts)]
        for name, found in rows.items()
        for engine in ("llama.cpp", "ours")
        if found[engine]
    ]
    passes = [
        [
            name,
            f"{found['rows']['1']:.1f}",
            *share(found),
            *(f"{found['rows'][str(n)] / found['rows']['1']:.2f}" for n in ROWS[1:]),
        ]
        for name, found in rows.items()
    ]
    beside = [
        [name, f"{each['1']:.1f}", *(f"{each[str(n)] / each['1']:.2f}" for n in ROWS[1:])]
        for name, found in rows.items()
        if (each := found.get("other rows"))
    ]
    memory = [
        [
            name,
            f"{found['bytes'] / 2**20:.0f}",
            *(f"{found['peak']}", f"{found['load']:.1f}"),
            *([f"{found['other peak']}", f"{found['other load']:.1f}"] if "other peak" in found else ["", ""]),
        ]
        for name, found in rows.items()
    ]
    heads = ["file", "engine", *(f"{part} tokens" if "prompt" in part else "after the prompt" for part in parts)]
    lines = [
        f"Tokens a second, median of {options.repeats} turns [least, greatest], {torch.get_num_threads()} threads;",
        f"nothing is drafted. llama.cpp is {other_engine()}:",
        "",
        *table(heads, speed),
        "",
        "A pass over several rows, as a multiple of one (context 128). GB/s: bytes of the weights that a pass of one",
        "row reads, over its time. Share of reading: of what all threads read when they only add numbers, in the same",
        "turns.",
        "",
        *table(["file", "one row, ms", "GB/s", "share of reading", *(f"{n} rows" for n in ROWS[1:])], passes),
        "",
        *(
            [
                "The same of llama.cpp's `llama-bench`, whose passes compute the logits of their last row only:",
                "",
                *table(["file", "one row, ms", *(f"{n} rows" for n in ROWS[1:])], beside),
                "",
            ]
            if beside
            else []
        ),
        *mixture_lines(rows),
        "Memory, and seconds until a prompt of 128 tokens is read: ours in a process that has imported the library,",
        "llama.cpp's from the start of its process, which maps the file and counts it in its peak. A shape that the",
        "check at load leaves to transformers' modules, since random weights of many layers are rounded far apart, is",
        "loaded without it:",
        "",
        *table(["file", "file, MiB", "peak, MiB", "load, s", "llama.cpp, peak, MiB", "load, s"], memory),
    ]
    return Results("Models in GGUF files, in their own numbers", lines, rows, run_facts())


def measured(out: Path) -> dict[str, Any]:
    """The files that an earlier call measured; an error where it had another state of the code or machine."""
    path = Path(f"{out}.json")
    if not path.exists():
        return {}
    kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    facts, _ = kept.pop("provenance"), kept.pop("title")
    for name in ("commit", "machine"):
        if facts[name] != run_facts()[name]:
            raise SystemExit(f"{path}: expected figures of this {name}, got those of {facts[name]}")
    return kept


def main() -> None:
    """Measure files and shapes."""
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], check=UNCHECKED not in sys.argv[3:])
        return
    parser = common.parser(__doc__)
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--shape", nargs="*", choices=(*SHAPES, *ON_MODULES), default=[])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--python", help="an interpreter with xllamacpp, for llama.cpp in turns")
    parser.add_argument("--llama-bench", help="llama.cpp's program, for its passes of several rows")
    parser.add_argument("--resume", action="store_true", help="keeps the files whose figures stand in OUT.json")
    options = parser.parse_args()
    rows = measured(options.out) if options.resume and options.out is not None else {}
    with tempfile.TemporaryDirectory() as folder:
        for each in (*options.shape, *options.files):
            if isinstance(each, Path):
                path, title = each, each.name
            else:
                path, title = Path(folder) / SHAPE, f"random {each}, Q4_K_M's types"
                if title not in rows:
                    write_shape(path, each)
            if title in rows:
                continue
            common.say(options, "measuring", title)
            rows[title] = measure(path, options)
            if options.out is not None:  # after each file: the next one may be interrupted
                page(rows, options).write(options.out)
    common.deliver(options, page(rows, options))


if __name__ == "__main__":
    main()
