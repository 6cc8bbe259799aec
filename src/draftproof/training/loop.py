"""The training loop of all models and heads: AdamW, a cosine schedule, evaluations, and checkpoints.

A run can be interrupted at any moment and resumed. The batch and torch's generators are functions of (seed, step), so a
checkpoint consists of weights, optimiser state and counters. A resumed run ends with exactly the same weights as one
that was not interrupted (on a CPU with the same number of threads; on an accelerator if its kernels are deterministic).
"""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from draftproof.errors import UserError, reason, refuse_below_one
from draftproof.files import whole_file
from draftproof.progress import Watch, silent
from draftproof.rng import fold


@contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """Yield a list that collects SIGINT and SIGTERM until the block ends; outside the main thread it stays empty."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.signal(kind, lambda number, _: caught.append(number)) for kind in kinds}
    try:
        yield caught
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def raise_for(caught: list[int]) -> None:
    """Raise what the first of the caught signals would have raised.

    Raises:
        KeyboardInterrupt: SIGINT.
        SystemExit: SIGTERM.
    """
    if caught and caught[0] == signal.SIGINT:
        raise KeyboardInterrupt
    if caught:
        raise SystemExit(128 + caught[0])


Batch = TypeVar("Batch")
Record = dict[str, Any]  # numbers by name
Evaluate = Callable[[nn.Module], Record]


@dataclass(frozen=True, eq=False)
class Loss:
    """The scalar that is minimised on a batch, and the number of its tokens, for tokens/s."""

    value: Tensor
    tokens: int


@dataclass(frozen=True)
class TrainingPlan:
    """The length and the parameters of a training run.

    Attributes:
        steps: number of optimiser steps.
        learning_rate: learning rate of AdamW at the top of a cosine schedule.
        warmup: number of steps in which the learning rate rises linearly; at most a tenth of all steps.
        floor: learning rate at the end, as a share of the highest one.
        weight_decay, betas: parameters of AdamW.
        clip: largest norm of the gradient; 0 is off.
        seed: seed of all random choices.
        log_every: number of steps whose mean loss is one record of the history.
        evaluate_every: number of steps between evaluations on held-out data; 0 evaluates at the end only.
        keep_best: name of an evaluation metric; the weights with its lowest value are the result (early stopping).
        save_every: number of steps between checkpoints; 0 saves by time only.
        save_seconds: seconds between checkpoints.
    """

    steps: int
    learning_rate: float = 1e-3
    warmup: int = 0
    floor: float = 0.0
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float = 1.0
    seed: int = 0
    log_every: int = 50
    evaluate_every: int = 0
    keep_best: str = ""
    save_every: int = 0
    save_seconds: float = 60.0

    def __post_init__(self) -> None:
        refuse_below_one(steps=self.steps, log_every=self.log_every)
        if not 0 < self.learning_rate < math.inf:
            raise UserError(f"learning rate: expected a finite number above 0, got {self.learning_rate}")

    def rate(self, step: int) -> float:
        """Learning rate of a step; the first step is 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.learning_rate * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2)


def train(
    module: nn.Module,
    batches: Callable[[int], Batch],
    loss: Callable[[nn.Module, Batch], Loss],
    plan: TrainingPlan,
    *,
    checkpoint: Path | None = None,
    identity: str = "",
    evaluate: Evaluate | None = None,
    watch: Watch = silent,
) -> list[Record]:
    """Train the parameters of `module` that require gradients, in place, from a checkpoint if there is one.

    Args:
        module: the module, on its device.
        batches: returns the batch of a step; it must depend on the step only.
        loss: the loss of the module on a batch.
        plan: steps and learning rate.
        checkpoint: file that is read at the start, and written whole at intervals, on SIGINT and SIGTERM, and at the
            end; None for no checkpoints.
        identity: a hash of data and options, which identifies the run of a checkpoint.
        evaluate: metrics of the module on held-out data; called in eval mode without gradients.
        watch: shows progress.

    Returns:
        the history: {"step", "loss", "rate"} every `log_every` steps, and evaluations with their step and metrics.

    Raises:
        UserError: the loss is not finite, or the checkpoint belongs to another run.
        KeyboardInterrupt: after SIGINT, when the checkpoint is written.
        SystemExit: after SIGTERM, when the checkpoint is written.
    """
    run = _TrainingRun(module, plan, checkpoint, identity)
    run.restore()
    with deferred_signals() as caught, watch("training", plan.steps, run.state.step) as tick:
        while run.state.step < plan.steps:
            value, tokens = run.advance(batches, loss)
            if evaluate is not None and run.evaluation_due():
                run.evaluate(evaluate)
            tick(run.state.step, tokens=tokens, loss=value)
            if caught or run.save_due():
                run.save()
            raise_for(caught)
        run.save()
    run.adopt_best()
    return run.state.history


@dataclass
class _Progress:
    """The counters of a run, which a checkpoint contains besides tensors."""

    step: int = 0
    total: float = 0.0  # sum of the losses since the last record
    count: int = 0
    history: list[Record] = field(default_factory=list)
    best: float | None = None


class _TrainingRun:
    """One run: the module, its optimiser and the counters."""

    def __init__(self, module: nn.Module, plan: TrainingPlan, checkpoint: Path | None, identity: str) -> None:
        self.module = module
        self.plan = plan
        self.checkpoint = checkpoint
        self.identity = f"{identity} {json.dumps(asdict(plan), sort_keys=True)}"
        self.state = _Progress()
        self.best: dict[str, Tensor] = {}
        self.trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        decay, betas = plan.weight_decay, plan.betas
        self.optimiser = torch.optim.AdamW(
            self.trained.values(), lr=plan.learning_rate, betas=betas, weight_decay=decay
        )
        self._saved = time.monotonic()

    # --- a step ---------------------------------------------------------------------------------------------------

    def advance(self, batches: Callable[[int], Batch], loss: Callable[[nn.Module, Batch], Loss]) -> tuple[float, int]:
        """Make one optimiser step; return the loss and the number of tokens."""
        step, plan = self.state.step, self.plan
        for group in self.optimiser.param_groups:
            group["lr"] = plan.rate(step)
        self.module.train()
        with _seeded(fold(plan.seed, step)):
            found = loss(self.module, batches(step))
            self.optimiser.zero_grad(set_to_none=True)
            found.value.backward()  # type: ignore[no-untyped-call]
        value = float(found.value.detach())
        if not math.isfinite(value):
            raise UserError(
                f"the loss is {value} at step {step + 1}: choose a lower learning rate than {plan.learning_rate:g}"
            )
        if plan.clip:
            nn.utils.clip_grad_norm_(self.trained.values(), plan.clip)
        self.optimiser.step()
        self._record(value, plan.rate(step))
        return value, found.tokens

    def _record(self, value: float, rate: float) -> None:
        state = self.state
        state.step = state.step + 1
        state.total = state.total + value
        state.count = state.count + 1
        if state.step % self.plan.log_every == 0 or state.step == self.plan.steps:
            state.history.append({"step": state.step, "loss": state.total / state.count, "rate": rate})
            state.total = 0.0
            state.count = 0

    def evaluation_due(self) -> bool:
        """Whether held-out data is evaluated after this step."""
        every = self.plan.evaluate_every
        return self.state.step == self.plan.steps or bool(every and self.state.step % every == 0)

    def evaluate(self, evaluate: Evaluate) -> None:
        """Record the metrics of held-out data, and keep the weights if they are the best so far."""
        self.module.eval()
        with torch.no_grad():
            found = evaluate(self.module)
        self.state.history.append({"step": self.state.step, **found})
        if self.plan.keep_best and (self.state.best is None or found[self.plan.keep_best] < self.state.best):
            self.state.best = found[self.plan.keep_best]
            self.best = {name: p.detach().clone() for name, p in self.trained.items()}

    def adopt_best(self) -> None:
        """Copy the best weights into the module, and leave it in eval mode."""
        self.module.eval()
        with torch.no_grad():
            for name, value in self.best.items():
                self.trained[name].copy_(value)

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def save_due(self) -> bool:
        """Whether it is time for a checkpoint."""
        every = self.plan.save_every
        return bool(every and self.state.step % every == 0) or time.monotonic() - self._saved > self.plan.save_seconds

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        if self.checkpoint is None:
            return
        tensors = {f"best.{name}": value for name, value in self.best.items()}
        tensors |= {f"module.{name}": value.detach() for name, value in self._kept().items()}
        for place, slots in self.optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{place}.{name}": torch.as_tensor(value) for name, value in slots.items()}
        metadata = {"identity": self.identity, "state": json.dumps(asdict(self.state))}
        with whole_file(self.checkpoint) as work:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, work, metadata=metadata)
        self._saved = time.monotonic()

    def _kept(self) -> dict[str, Tensor]:
        """The tensors that training changes: trained parameters and buffers, without frozen parameters."""
        return {**self.trained, **dict(self.module.named_buffers())}

    def restore(self) -> None:
        """Continue from the checkpoint, if there is one."""
        if self.checkpoint is None or not self.checkpoint.exists():
            return
        try:
            metadata, tensors = _read(self.checkpoint)
            state = _Progress(**json.loads(metadata["state"]))
        except Exception as cause:
            raise UserError(
                f"cannot resume from {self.checkpoint} ({reason(cause)}): remove it to start again"
            ) from cause
        if metadata["identity"] != self.identity:
            raise UserError(
                f"{self.checkpoint} belongs to a run with other data or options: use the same ones, "
                "choose another output, or remove the file to start again"
            )
        self.state = state
        self._load(tensors)

    def _load(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        with torch.no_grad():
            for name, value in self._kept().items():
                value.copy_(tensors["module"][name])
        slots: dict[int, dict[str, Any]] = {}
        for name, value in tensors.get("optimiser", {}).items():
            place, _, slot = name.partition(".")
            slots.setdefault(int(place), {})[slot] = value
        self.optimiser.load_state_dict({"state": slots, "param_groups": self.optimiser.state_dict()["param_groups"]})
        device = next(iter(self.trained.values())).device
        self.best = {name: value.to(device) for name, value in tensors.get("best", {}).items()}


def _read(path: Path) -> tuple[dict[str, str], dict[str, dict[str, Tensor]]]:
    """Metadata and tensors of a checkpoint, by the first part of their names."""
    parts: dict[str, dict[str, Tensor]] = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            part, _, rest = name.partition(".")
            parts.setdefault(part, {})[rest] = file.get_tensor(name)
        return file.metadata(), parts


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch's generators for the block, and restore them after it."""
    with torch.random.fork_rng():
        seed &= (1 << 63) - 1
        if torch.accelerator.is_available():
            torch.manual_seed(seed)
        else:  # without a device, torch.manual_seed writes down the stack for one that may be started later
            torch.default_generator.manual_seed(seed)
        yield
