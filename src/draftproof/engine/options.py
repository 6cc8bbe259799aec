"""EngineOptions: how an engine is made, declared once for Python, the command line, the server and integrations."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from draftproof.backends.heads.published.files import head_algorithm
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.loading.options import draft_dtype as read_draft_dtype
from draftproof.engine.memory import read_bytes
from draftproof.engine.registry import DEFAULT_DRAFTER, make_stopper, make_verifier
from draftproof.errors import UserError
from draftproof.native.threads import require_threads
from draftproof.stoppers.budget import DraftBudget
from draftproof.verifiers.base import Verifier

# Fields that LoadOptions has too: those of both models, and those of the target alone.
_OF_BOTH = ("trust_remote_code", "check", "backend", "attn_implementation", "activations")
_OF_TARGET = ("adapter", "quantization_config", "tensor_parallel", "weights", "kv_dtype")
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine is made: the models' form, the parts of a round, and limits.

    Attributes:
        draft: the draft model: registered name, hub id, directory or .gguf file; with another tokenizer it
            drafts the tokens that both have. Or a published draft head, hub id or directory, among which "auto"
            then chooses, too.
        find_draft: without a draft model, take the one on this disk that gains most by the bytes that it reads and has
            the target's vocabulary (`draftproof models match`).
        drafter: where drafts come from, a name of DRAFTERS with its argument. Default "auto": in every round what pays
            most of the draft model or head, the target's own prediction layers, what ships for it, the target with
            weights of 4 bits, and repeated passages.
        stopper: when a draft ends; "fixed:4" is four tokens. Default "auto": as many as pay, by the time of the rounds
            so far; "fixed:4" for rules that need constant lengths.
        verifier: the verification rule. Default "block", and "trie_block" for drafters of several drafts. Without a
            name, requests that sample with a seed are verified by "gumbel" where drafts depend on the time of earlier
            rounds: then a seed gives the same text whatever is drafted. With a draft budget they are in any case.
        draft_temperature: temperature of the draft alone; the output distribution stays the target's.
        draft_top_k: top-k of the draft alone; the output distribution stays the target's.
        draft_budget: drafted tokens that a round may have over all its requests, given to those that are likeliest to
            be accepted; for drafters of single chains. Without it each request's stopper decides alone, and "auto" for
            all together.
        dtype: number format of both models: auto, float32, bfloat16 or float16.
        draft_dtype: another number format for the draft; int8 or int4 quantize the draft model or the head.
        device: where both models are: cpu, cuda, cuda:1; without it an accelerator if there is one. "auto", or in
            Python a device or "disk" for each part by its name, spreads the target (needs accelerate).
        backend: implementation of the forward pass, a name of BACKENDS. "auto" takes "lean" where the model allows it,
            "snapshot" where it has recurrent layers, else "hf"; and "generate", without drafts, for a target whose
            drafts cannot be taken back.
        adapter: a PEFT adapter (LoRA) for the target, a directory or hub id: merged into its weights where that gives
            the same logits, else computed beside them.
        attn_implementation: attention of backend hf: eager or sdpa; without it transformers' choice.
        quantization_config: quantizes the target by transformers: JSON of one of its configs, or a .json file; in
            Python also such a config.
        activations: how weights that a .gguf file holds in few bits are multiplied: int8 rounds their inputs to 8 bits
            in groups of 32; float, a reference, does not, and takes the memory of the full weights.
        weights: int8 or int4 round the target's weights when it is loaded: another model, which is read in half or a
            quarter of the time; what is written is exact for the rounded one. auto leaves them.
        kv_dtype: int8 stores the target's keys and values in 8 bits, on a CPU with backend lean: another model, whose
            sessions take about half the memory; what is written is exact for it. auto has the model's dtype.
        max_model_len: longest sequence, prompt and text together; without it the target's own context.
        max_batch: sequences decoded together.
        kv_memory: memory for keys, values and states of both models, in bytes or like 2GiB. Requests wait for it, and
            one that can never fit is refused. Without it no limit.
        prefix_reuse: take over what was read of other requests that begin alike; outputs are the same.
        trust_remote_code: run code that comes with a model.
        check: compare each model's logits with its own forward pass when it is loaded.
        generation_config: where sampling defaults come from: auto reads the target's generation config, none does not.
        tensor_parallel: processes among which the target is divided, each with a device or a share of the cores.
        threads: threads that a CPU computes with, of the whole process: all its engines have the number that was named
            last. Without it one for each core, within a limit of processor time. What is computed by native operations
            has the same bits with any number.

    Raises:
        UserError: a name or value that is none.
    """

    draft: str | None = None
    find_draft: bool = False
    drafter: str | None = None
    stopper: str | None = None
    verifier: str | None = None
    draft_temperature: float | None = None
    draft_top_k: int | None = None
    draft_budget: int | None = None
    dtype: str = "auto"
    draft_dtype: str = "auto"
    device: str | Mapping[str, Any] | None = None
    backend: str = "auto"
    adapter: str | None = None
    attn_implementation: str | None = None
    quantization_config: Any = None
    activations: str = "int8"
    weights: str = "auto"
    kv_dtype: str = "auto"
    max_model_len: int | None = None
    max_batch: int = 8
    kv_memory: int | str | None = None
    prefix_reuse: bool = True
    trust_remote_code: bool = False
    check: bool = True
    generation_config: str = "auto"
    tensor_parallel: int = 1
    threads: int | None = None

    def __post_init__(self) -> None:
        """Read the names before any model is loaded."""
        if self.generation_config not in ("auto", "none"):
            raise UserError(f"generation_config: expected auto or none, got {self.generation_config!r}")
        if self.threads is not None:
            require_threads(self.threads)
        self.of_target()  # refuses other names
        read_bytes(self.kv_memory)
        DraftBudget(self.draft_budget)
        if self.verifier is not None:
            make_verifier(self.verifier)
        if self.stopper is not None:
            make_stopper(self.stopper, self.draft or (self.drafter or "").removeprefix(f"{DEFAULT_DRAFTER}:"))
        read_draft_dtype(self.draft_dtype, self.dtype)

    def changed(self, **changes: Any) -> EngineOptions:
        """These options with other values; the error for a name that is none says the nearest one."""
        known = [each.name for each in fields(self)]
        for name in changes:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                meant = f"; did you mean {near[0]}?" if near else f": the options are {', '.join(known)}"
                raise UserError(f"an engine has no option {name!r}{meant}")
        new = {name: value for name, value in changes.items() if getattr(self, name) != value}
        return replace(self, **new) if new else self  # a check of the names may read a head from its files

    @property
    def rule(self) -> Verifier | None:
        """The named verification rule; None leaves it to the drafter."""
        return None if self.verifier is None else make_verifier(self.verifier)

    @property
    def draft_bits(self) -> int | None:
        """To how many bits the weights of the draft are quantized; None leaves them."""
        return read_draft_dtype(self.draft_dtype, self.dtype)[1]

    def of_head(self) -> EngineOptions:
        """The same, with the head as a source of `auto` where `draft` names a published one."""
        algorithm = None if self.draft is None else head_algorithm(self.draft)
        if algorithm is None:
            return self
        if self.drafter not in (None, DEFAULT_DRAFTER):
            raise UserError(
                f"draft names a head of algorithm {algorithm}, and drafter is {self.drafter!r}: leave one of them out, "
                f"or take drafter {algorithm}:{self.draft}"
            )
        return replace(self, draft=None, drafter=f"{DEFAULT_DRAFTER}:{algorithm}:{self.draft}")

    def refuse_draft_dtype_alone(self) -> None:
        """Refuse a number format for a draft model that is not there."""
        if self.draft is None and self.draft_bits is None and self.draft_dtype != "auto":
            raise UserError(
                f"draft_dtype is {self.draft_dtype!r}, and there is no draft model: leave it out, or name one"
            )

    def of_target(self) -> LoadOptions:
        """How the target is loaded."""
        own = {name: getattr(self, name) for name in _OF_TARGET}
        return replace(self._of_both(self.dtype, self.device), plainly=True, **own)

    def of_draft(self) -> LoadOptions:
        """How the draft model is loaded, which is on one device."""
        one = self.device is None or (isinstance(self.device, str) and self.device != "auto")
        dtype, _ = read_draft_dtype(self.draft_dtype, self.dtype)
        return self._of_both(dtype, self.device if one else None)

    def _of_both(self, dtype: str, device: str | Mapping[str, Any] | None) -> LoadOptions:
        return LoadOptions(dtype=dtype, device=device, **{name: getattr(self, name) for name in _OF_BOTH})


def takes_options(function: _Function) -> _Function:
    """Show the fields of EngineOptions in the signature of a function that takes them as `**changes`."""
    found = inspect.signature(function, eval_str=False)
    own = [each for each in found.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    taken = {each.name for each in own}
    added = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
        for each in fields(EngineOptions)
        if each.name not in taken
    ]
    function.__signature__ = found.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    return function
