"""The directory of a trained language model: stored weights, tokenizer, figures on held-out text, provenance."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from draftproof.backends.loading.by_name import load_backend, load_model
from draftproof.backends.loading.options import LoadOptions
from draftproof.files import whole_directory, write_json
from draftproof.progress import Watch, silent
from draftproof.provenance import FILE, fingerprint, model_name, provenance
from draftproof.sampling import SamplingParams
from draftproof.stoppers.fixed import FixedLength
from draftproof.training import distil
from draftproof.training.drafter import DrafterRun
from draftproof.training.drafter_options import PROMPT, DrafterJob
from draftproof.training.features import ModelPair
from draftproof.training.loop import Record
from draftproof.training.sweep import Trial

METRICS = "metrics.json"
LENGTHS = (4, 8)  # numbers of drafted tokens for which the block efficiency is measured


def make_drafter(job: DrafterJob, watch: Watch = silent) -> dict[str, Any]:
    """Train a model, write its directory, and return the figures of the written model on texts not used in training."""
    run = DrafterRun(job, watch)
    model, history = run.train()
    with whole_directory(job.out) as folder:
        store(model, run.tokenizer, folder, job.stored)
        summary = {"parameters": model.num_parameters(), **evaluate(run, folder)}
        write_json(folder / METRICS, {"test": summary, "history": history})
        write_json(folder / FILE, _provenance(run, summary, history))
    shutil.rmtree(job.work, ignore_errors=True)
    return summary


def store(model: Any, tokenizer: Any, folder: Path, dtype: str) -> None:
    """Write model and tokenizer; the weights are rounded to `dtype`, and will be loaded as float32."""
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, {**config, "dtype": "float32"})
    tokenizer.save_pretrained(folder)


def evaluate(run: DrafterRun, folder: Path) -> dict[str, Any]:
    """Bits per byte of the model in a directory, on the test part of the texts.

    For a draft model also the target's, the acceptance on text and on the target's own samples, and block efficiencies.
    """
    windows, size = run.held_out("test")
    found: dict[str, Any] = {"test_bytes": size}
    options = LoadOptions(dtype="float32", device=str(run.device))
    draft = load_model(str(folder), options).eval()
    found["bits_per_byte"] = distil.bits_per_byte(draft, windows, size)
    if run.target is None or run.job.imitation is None:
        return found
    found["target_bits_per_byte"] = distil.bits_per_byte(run.target, windows, size)
    found["on_text"] = distil.agreement(run.target, draft, windows)
    own = _own(run, windows)
    found["on_own_samples"] = distil.agreement(run.target, draft, own, skip=PROMPT)
    target, drafts = (load_backend(name, options) for name in (run.job.imitation.target, str(folder)))
    trial = _trial(run, ModelPair(target, drafts, SamplingParams()))
    with run.watch("block efficiency", len(LENGTHS), 0) as tick:
        for number, length in enumerate(LENGTHS, 1):
            rates = trial.rates(FixedLength(length), "block")
            found[f"block_efficiency_{length}"] = rates["block_efficiency"]
            tick(number, tokens=int(rates["tokens"]))
    return found


def _own(run: DrafterRun, windows: Int[Tensor, "windows length"]) -> Int[Tensor, "rows length"]:
    """The target's continuations of the first tokens of test windows, at temperature 1."""
    whole = windows[(windows >= 0).all(-1)]
    prompts = (whole if len(whole) else windows.clamp(min=0))[:32, :PROMPT]
    with torch.random.fork_rng():
        torch.manual_seed(run.job.seed)
        return distil.sampled(run.target, prompts, windows.shape[1])


def _trial(run: DrafterRun, pair: ModelPair) -> Trial:
    """A trial of the engine on the prompts of test texts."""
    prompts = [example.prompt for example in run.parts["test"]]
    ids = [run.tokenizer(prompt)["input_ids"] for prompt in prompts]
    room = int(run.settings["max_position_embeddings"]) - run.job.trial_tokens - max(LENGTHS)
    fitting = [row for row in ids if 0 < len(row) <= room] or [ids[0][: max(room, 1)]]
    return Trial(pair, fitting[: run.job.trial_prompts], (run.end,), run.job.trial_tokens, run.job.seed)


def _provenance(run: DrafterRun, summary: dict[str, Any], history: list[Record]) -> dict[str, Any]:
    """The content of provenance.json."""
    job, goal = run.job, run.job.imitation
    options = {"config": run.settings, "vocabulary": run.vocabulary, "plan": asdict(run.plan)}
    texts = {name: value for name, value in asdict(job.texts).items() if name not in ("data", "background")}
    options |= {"texts": texts, "precision": job.precision, "stored": job.stored}
    options |= {"rows": job.rows, "length": job.length}
    origin: dict[str, Any] = {"options": options, "best_step": best_step(history, run.plan.keep_best)}
    if job.init is not None:
        origin["init"] = {"model": model_name(job.init), "fingerprint": fingerprint(job.init)}
    if goal is not None:
        target = {"target": model_name(goal.target), "fingerprint": fingerprint(goal.target)}
        origin["imitation"] = {**asdict(goal), **target}
    return provenance(
        data=[asdict(source) for source in run.sources],
        seed=job.seed,
        metrics=summary,
        seconds=time.perf_counter() - run.start,
        device=run.device,
        **origin,
    )


def best_step(history: list[Record], metric: str) -> int:
    """The step whose weights were kept: the one with the lowest value of the metric."""
    evaluated = [record for record in history if metric in record]
    return int(min(evaluated, key=lambda record: float(record[metric]))["step"])
