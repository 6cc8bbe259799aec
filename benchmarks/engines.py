"""Throughput beside another engine in a process, and if need be an environment, of its own: in turns, same prompts.

    python benchmarks/engines.py --other vllm --python OTHER/bin/python --batch 1 8
        --drafter feature_head:artefacts/smollm2-135m-feature-head --out docs/results/engines
    python benchmarks/engines.py --other transformers --batch 1 2 4 8 16 32 --tokens 32
        --drafter feature_head:artefacts/smollm2-135m-feature-head --out docs/results/throughput

The other environment needs the other engine only: this file runs there as a worker (`--worker vllm`) that reads one
JSON object a line and answers with one. Every engine continues the same prompts by the same number of tokens, ends of
text ignored; the first turn warms up. Weights are the same too, but for llama.cpp, which wants a file of its own
(`--model FILE.gguf`; its Python binding is xllamacpp). Writes OUT.md and OUT.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Ask = dict[str, Any]  # "prompts": token ids, "tokens": of each answer, "temperature"
Answer = Callable[[Ask], float]  # seconds


# --- in the other environment: nothing of draftproof may be imported -------------------------------------------------


def vllm_worker(model: str, dtype: str, batch: int) -> Answer:
    """vLLM's offline engine."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    engine = LLM(model, dtype=dtype, max_num_seqs=batch, max_model_len=1024, enable_prefix_caching=False)

    def answer(ask: Ask) -> float:
        params = SamplingParams(temperature=ask["temperature"], max_tokens=ask["tokens"], ignore_eos=True, seed=1)
        prompts = [{"prompt_token_ids": ids} for ids in ask["prompts"]]
        start = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(out.outputs[0].token_ids) == ask["tokens"] for out in outputs)
        return seconds

    return answer


def transformers_worker(model: str, dtype: str, batch: int) -> Answer:  # noqa: ARG001
    """transformers' generate, prompts padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM

    engine = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()

    def answer(ask: Ask) -> float:
        width = max(map(len, ask["prompts"]))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in ask["prompts"]])
        seen = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ask["prompts"]])
        length = {"min_new_tokens": ask["tokens"], "max_new_tokens": ask["tokens"], "pad_token_id": 0}
        draw: dict[str, Any] = {"do_sample": False}
        if ask["temperature"]:
            draw = {"do_sample": True, "temperature": ask["temperature"], "top_k": 0, "top_p": 1.0}
        torch.manual_seed(1)
        start = time.perf_counter()
        out = engine.generate(ids, attention_mask=seen, **length, **draw)
        seconds = time.perf_counter() - start
        assert out.shape[1] == width + ask["tokens"]
        return seconds

    return answer


def llama_worker(model: str, dtype: str, batch: int) -> Answer:  # noqa: ARG001
    """llama.cpp's server in this process (xllamacpp, whose wheels are built), a slot for each request."""
    from concurrent.futures import ThreadPoolExecutor

    import xllamacpp  # type: ignore[import-not-found]

    params = xllamacpp.CommonParams()
    params.model.path, params.n_parallel, params.n_ctx = model, batch, 1024 * batch
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    params.verbosity = -1
    server = xllamacpp.Server(params)

    def one(ask: Ask, ids: list[int]) -> None:
        out = server.handle_completions(
            {
                "prompt": ids,
                "n_predict": ask["tokens"],
                "temperature": ask["temperature"],
                "top_k": 0,
                "top_p": 1.0,
                "min_p": 0.0,
                "seed": 1,
                "ignore_eos": True,
                "cache_prompt": False,
            }
        )
        assert out["usage"]["completion_tokens"] == ask["tokens"], out

    def answer(ask: Ask) -> float:
        start = time.perf_counter()
        with ThreadPoolExecutor(len(ask["prompts"])) as pool:
            list(pool.map(lambda ids: one(ask, ids), ask["prompts"]))
        return time.perf_counter() - start

    return answer


WORKERS = {"vllm": vllm_worker, "transformers": transformers_worker, "llama.cpp": llama_worker}
# What vLLM's build for CPUs wants to be told on a small machine.
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}


def work(args: argparse.Namespace) -> None:
    """Answer what stands on stdin; whatever the engine prints goes to stderr."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer = WORKERS[args.worker](args.target, args.dtype, max(args.batch))
    print("ready", file=channel, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=channel, flush=True)


# --- here ------------------------------------------------------------------------------------------------------------


class Other:
    """An engine in a process of its own."""

    def __init__(self, args: argparse.Namespace, model: Path) -> None:
        python = args.python or sys.executable
        command = [str(python), __file__, "--worker", args.other, "--target", str(model), "--dtype", args.dtype]
        command += ["--batch", *map(str, args.batch), "--out", str(args.out)]
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        self._process = subprocess.Popen(  # noqa: S603 - a command of our own
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**clean, **ENVIRONMENT}
        )
        if self._read() != "ready":
            raise SystemExit(f"{args.other} did not start in {python}: see above")

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __call__(self, ask: Ask) -> float:
        """Seconds."""
        assert self._process.stdin is not None
        print(json.dumps(ask), file=self._process.stdin, flush=True)
        return float(self._read())


def ours(args: argparse.Namespace, drafter: str | None, batch: int) -> Answer:
    """An engine of draftproof."""
    from draftproof import Engine, SamplingParams

    engine = Engine.load(args.target, drafter=drafter, dtype=args.dtype, max_batch=batch)

    def answer(ask: Ask) -> float:
        params = [
            SamplingParams(temperature=ask["temperature"], max_tokens=ask["tokens"], ignore_eos=True, seed=1 + number)
            for number in range(len(ask["prompts"]))
        ]
        start = time.perf_counter()
        engine.generate(ask["prompts"], params)
        return time.perf_counter() - start

    return answer


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of tokens a second, batch by batch, engines in turns."""
    from draftproof import models
    from draftproof.bench.questions import read_questions
    from draftproof.tokenization import load_tokenizer

    where = models.resolve(args.target)
    tokenizer = load_tokenizer(where)
    other, rows = Other(args, args.model or where), []
    for batch in args.batch:
        engines = {args.other: other, "draftproof, plain": ours(args, None, batch)}
        if args.drafter:
            engines["draftproof, " + args.drafter.partition(":")[0]] = ours(args, args.drafter, batch)
        texts = [question.turns[0] for question in read_questions(args.dataset)][: batch * args.repeats]
        chat = [[{"role": "user", "content": text}] for text in texts]
        ids = [tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"] for turn in chat]
        for temperature in args.temperature:
            speeds: dict[str, list[float]] = {name: [] for name in engines}
            for repeat in range(args.repeats + 1):
                first = max(repeat - 1, 0) * batch
                prompts = [ids[(first + place) % len(ids)] for place in range(batch)]
                for name, engine in engines.items():
                    seconds = engine({"prompts": prompts, "tokens": args.tokens, "temperature": temperature})
                    if repeat:  # the first turn warms up
                        speeds[name].append(batch * args.tokens / seconds)
            rows += [
                {"batch": batch, "temperature": temperature, "engine": name, "speeds": speeds[name]} for name in speeds
            ]
            print(*(f"{name} {statistics.median(found):.1f}" for name, found in speeds.items()), file=sys.stderr)
    return rows


def report(args: argparse.Namespace, rows: list[dict[str, Any]]) -> str:
    """The table."""
    import platform

    import torch

    lines = [
        f"# {args.target} beside {args.other}",
        "",
        (
            f"{args.dtype}, {args.dataset}, {args.tokens} tokens an answer, {args.repeats} turns of different prompts, "
            f"{torch.get_num_threads()} threads ({platform.machine()}). "
            "Ratios are of the same turn: median, least and most."
        ),
        "",
        f"| batch | temperature | engine | tokens a second | over {args.other} |",
        "|---|---|---|---|---|",
    ]
    base: list[float] = []
    for row in rows:
        base = row["speeds"] if row["engine"] == args.other else base
        ratios = [mine / theirs for mine, theirs in zip(row["speeds"], base, strict=True)]
        told = f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
        speed = statistics.median(row["speeds"])
        lines.append(f"| {row['batch']} | {row['temperature']:g} | {row['engine']} | {speed:.1f} | {told} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worker", choices=sorted(WORKERS), help=argparse.SUPPRESS)
    parser.add_argument("--other", choices=sorted(WORKERS), default="vllm")
    parser.add_argument("--python", type=Path, help="of the environment that has the other engine; default this one")
    parser.add_argument("--model", type=Path, help="what the other engine reads; default the target's directory")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--drafter", help="beside plain decoding")
    parser.add_argument("--dataset", default="mt-bench")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return
    rows = measure(args)
    args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    args.out.with_suffix(".md").write_text(report(args, rows), encoding="utf-8")
    print(report(args, rows))


if __name__ == "__main__":
    main()
