"""The directory of a model that was trained here: weights as they are stored, tokenizer, what they are worth.

Knows: which figures say whether a model is a good target or draft. Does not know: how it was trained.
"""

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

from draftproof.backends.loading import load_backend, load_model
from draftproof.files import whole_directory
from draftproof.progress import Watch, silent
from draftproof.provenance import FILE, fingerprint, provenance, write_json
from draftproof.sampling import SamplingParams
from draftproof.stoppers.fixed import FixedLength
from draftproof.training import distil
from draftproof.training.drafter import Studio
from draftproof.training.drafter_options import PROMPT, DrafterJob
from draftproof.training.features import ModelPair
from draftproof.training.loop import Record
from draftproof.training.sweep import Trial

METRICS = "metrics.json"
LENGTHS = (4, 8)  # drafted tokens a round, of the block efficiencies


def make_drafter(job: DrafterJob, watch: Watch = silent) -> dict[str, Any]:
    """Train a model, write it, and judge what was written on texts that had no part in the training.

    Returns:
        The figures that sum it up, as in its provenance.

    Raises:
        UserError: something that cannot be used or does not fit, before long work wherever possible.
    """
    studio = Studio(job, watch)
    model, history = studio.train()
    with whole_directory(job.out) as folder:
        store(model, studio.tokenizer, folder, job.stored)
        summary = {"parameters": model.num_parameters(), **appraise(studio, folder)}
        write_json(folder / METRICS, {"test": summary, "history": history})
        write_json(folder / FILE, _provenance(studio, summary, history))
    shutil.rmtree(job.work, ignore_errors=True)
    return summary


def store(model: Any, tokenizer: Any, folder: Path, dtype: str) -> None:
    """Write model and tokenizer; the weights are rounded to a dtype and load as float32."""
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, {**config, "dtype": "float32"})
    tokenizer.save_pretrained(folder)


def appraise(studio: Studio, folder: Path) -> dict[str, Any]:
    """Figures of the model in a directory, on the part of the texts that is for tests.

    Returns:
        Bits per byte; for a draft also its target's, the acceptance on text and on what the target writes, and the
        block efficiencies.
    """
    windows, size = studio.held_out("test")
    found: dict[str, Any] = {"test_bytes": size}
    options: dict[str, Any] = {"dtype": "float32", "device": str(studio.device)}
    draft = load_model(str(folder), **options).eval()
    found["bits_per_byte"] = distil.bits_per_byte(draft, windows, size)
    if studio.target is None or studio.job.imitation is None:
        return found
    found["target_bits_per_byte"] = distil.bits_per_byte(studio.target, windows, size)
    found["on_text"] = distil.agreement(studio.target, draft, windows)
    own = _own(studio, windows)
    found["on_own_samples"] = distil.agreement(studio.target, draft, own, skip=PROMPT)
    target, drafts = (load_backend(name, **options) for name in (studio.job.imitation.target, str(folder)))
    trial = _trial(studio, ModelPair(target, drafts, SamplingParams()))
    with studio.watch("block efficiency", len(LENGTHS), 0) as tick:
        for number, length in enumerate(LENGTHS, 1):
            rates = trial.rates(FixedLength(length), "block")
            found[f"block_efficiency_{length}"] = rates["block_efficiency"]
            tick(number, tokens=int(rates["tokens"]))
    return found


def _own(studio: Studio, windows: Int[Tensor, "windows length"]) -> Int[Tensor, "rows length"]:
    """What the target makes of the first tokens of test windows at temperature 1."""
    whole = windows[(windows >= 0).all(-1)]
    prompts = (whole if len(whole) else windows.clamp(min=0))[:32, :PROMPT]
    with torch.random.fork_rng():
        torch.manual_seed(studio.job.seed)
        return distil.sampled(studio.target, prompts, windows.shape[1])


def _trial(studio: Studio, pair: ModelPair) -> Trial:
    """The openings of test texts, for runs of the engine."""
    prompts = [example.prompt for example in studio.parts["test"]]
    ids = [studio.tokenizer(prompt)["input_ids"] for prompt in prompts]
    room = int(studio.settings["max_position_embeddings"]) - studio.job.trial_tokens - max(LENGTHS)
    fitting = [row for row in ids if 0 < len(row) <= room] or [ids[0][: max(room, 1)]]
    return Trial(pair, fitting[: studio.job.trial_prompts], (studio.end,), studio.job.trial_tokens, studio.job.seed)


def _provenance(studio: Studio, summary: dict[str, Any], history: list[Record]) -> dict[str, Any]:
    """What stands in provenance.json."""
    job, asked = studio.job, studio.job.imitation
    options = {"config": studio.settings, "vocabulary": studio.vocabulary, "plan": asdict(studio.plan)}
    texts = {name: value for name, value in asdict(job.texts).items() if name not in ("data", "background")}
    options |= {"texts": texts, "precision": job.precision, "stored": job.stored}
    options |= {"rows": job.rows, "length": job.length}
    origin: dict[str, Any] = {"options": options, "best_step": best_step(history, studio.plan.keep_best)}
    if job.init is not None:
        origin["init"] = {"model": _plain(job.init), "fingerprint": fingerprint(job.init)}
    if asked is not None:
        target = {"target": _plain(asked.target), "fingerprint": fingerprint(asked.target)}
        origin["imitation"] = {**asdict(asked), **target}
    return provenance(
        data=[asdict(source) for source in studio.sources],
        seed=job.seed,
        metrics=summary,
        seconds=time.perf_counter() - studio.start,
        device=studio.device,
        **origin,
    )


def _plain(name: str) -> str:
    """A model's name without the folders it is in."""
    return Path(name).name if Path(name).is_absolute() else name


def best_step(history: list[Record], metric: str) -> int:
    """The step whose weights were kept."""
    judged = [record for record in history if metric in record]
    return int(min(judged, key=lambda record: float(record[metric]))["step"])
