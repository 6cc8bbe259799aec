"""EngineOptions: the options of an engine, declared once for Python, the command line, the server and integrations."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from draftproof.backends.heads.published.files import head_algorithm
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.loading.options import draft_dtype as read_draft_dtype
from draftproof.engine.drafter_parts import DEFAULT_DRAFTER, names_head
from draftproof.engine.memory import read_bytes
from draftproof.engine.stopper_parts import make_stopper
from draftproof.engine.verifier_parts import make_verifier
from draftproof.errors import UserError
from draftproof.native.numa import require_numa
from draftproof.native.threads import require_threads
from draftproof.stoppers.budget import DraftBudget
from draftproof.verifiers.base import Verifier

# Fields that LoadOptions has too: those of both models, and those of the target alone.
_OF_BOTH = ("trust_remote_code", "check", "backend", "attn_implementation", "activations")
_OF_TARGET = ("adapter", "quantization_config", "tensor_parallel", "weights", "kv_dtype")
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options of an engine: how models are loaded, the parts of a round, and limits.

    Attributes:
        draft: the draft model: registered name, hub id, directory or .gguf file; with another tokenizer it
            drafts the tokens that both models have. Or a published draft head (hub id or directory), which "auto"
            then also considers.
        find_draft: without a draft model, use the one on this disk that has the target's vocabulary and the largest
            estimated gain by the bytes that it reads (`draftproof models match`).
        drafter: where drafts come from: a name of DRAFTERS with its argument. Default "auto": in every round the best
            of the draft model or head, the target's own prediction layers, a head that ships for the target, the
            target with 4-bit weights, and repeated passages.
        stopper: when a draft ends; "fixed:4" is four tokens. Default "auto": as many as pay off, by the time of the
            rounds so far; "fixed:4" for rules that need a constant length.
        verifier: the verification rule. Default "block", or "trie_block" for drafters with several drafts. If no rule
            is named, requests that sample with a seed are verified by "gumbel" whenever drafts depend on the time of
            earlier rounds or on a draft budget, so that a seed gives the same text whatever is drafted.
        draft_temperature: temperature of the draft alone; the output distribution stays the target's.
        draft_top_k: top-k of the draft alone; the output distribution stays the target's.
        draft_budget: the most drafted tokens of a round over all its requests, spent on the tokens that are likeliest
            to be accepted; for drafters of single chains. Without it, each request's stopper decides alone, and "auto"
            decides for all together.
        dtype: number format of both models: auto, float32, bfloat16 or float16.
        draft_dtype: another number format for the draft; int8 or int4 quantizes the draft model or head. By default, on
            a CPU, the head of a target of few bits has 8, and a large output layer is rounded whose largest outputs are
            computed again; a dtype that is named, of a head the target's, keeps them whole.
        device: device of both models: cpu, cuda, cuda:1; without it an accelerator if there is one. "auto", or in
            Python a mapping from part names to a device or "disk", spreads the target (needs accelerate).
        backend: implementation of the forward pass: a name of BACKENDS. "auto" uses "lean" if it supports the model,
            "snapshot" if the model has recurrent layers, else "hf"; and "generate", without drafts, for a target that
            cannot roll back.
        adapter: a PEFT adapter (LoRA) for the target: directory or hub id. It is merged into the weights if that gives
            the same logits, else computed beside them.
        attn_implementation: attention of backend hf: eager or sdpa; without it transformers' choice.
        quantization_config: a config of transformers that quantizes the target while it is loaded, as JSON or as a
            .json file; in Python also as an object.
        activations: how to multiply weights that a .gguf file stores in few bits: int8 rounds their inputs to 8 bits
            in groups of 32; float does not round, as a reference, and needs the memory of the full weights.
        weights: how to round the target's weights at load: int8, int4, or auto for not at all. A rounded model is
            another model, read in half or a quarter of the time; outputs are exact for it.
        kv_dtype: number format of the target's keys and values: int8, bfloat16 or float32 (CPU with backend lean
            only), or auto for the model's dtype, and bfloat16 for a .gguf file in few bits. With fewer bits than the
            model's dtype it is another model, which needs less memory for a session; outputs are exact for it.
        max_model_len: longest sequence, prompt and text together; without it the target's own context.
        max_batch: sequences decoded together.
        kv_memory: memory for keys, values and states of both models, in bytes or as text such as 2GiB. Requests wait
            for free memory, and one that can never fit is refused. Without it there is no limit.
        prefix_reuse: reuse the keys and values of earlier requests with the same prefix; outputs are the same.
        trust_remote_code: run code that comes with a model.
        check: compare each model's logits with its own forward pass when it is loaded.
        generation_config: where sampling defaults come from: auto reads the target's generation config, none does not.
        tensor_parallel: number of processes that share the target, each with a device or a share of the cores.
        threads: number of CPU threads of the whole process; the last number set applies to all its engines. Without it
            one for each core, within the limit of processor time. Results of native operations do not depend on it.
        numa: on a Linux machine with several memory nodes (sockets), where threads run and weights lie, for the whole
            process: isolate keeps both on one node; distribute keeps native threads on all nodes and puts the part of a
            weight that each reads on its node. off touches nothing. Without effect on one node.

    Raises:
        UserError: an unknown name or an invalid value.
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
    numa: str = "off"

    def __post_init__(self) -> None:
        """Read the names before any model is loaded."""
        if self.generation_config not in ("auto", "none"):
            raise UserError(f"generation_config: expected auto or none, got {self.generation_config!r}")
        if self.threads is not None:
            require_threads(self.threads)
        require_numa(self.numa)
        self.of_target()  # refuses other names
        read_bytes(self.kv_memory)
        DraftBudget(self.draft_budget)
        if self.verifier is not None:
            make_verifier(self.verifier)
        if self.stopper is not None:
            make_stopper(self.stopper, self.draft or (self.drafter or "").removeprefix(f"{DEFAULT_DRAFTER}:"))
        read_draft_dtype(self.draft_dtype, self.dtype)

    def changed(self, **changes: Any) -> EngineOptions:
        """These options with some values replaced; the error for an unknown name suggests the nearest one."""
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
        """The named verification rule; None if the drafter decides."""
        return None if self.verifier is None else make_verifier(self.verifier)

    @property
    def draft_bits(self) -> int | None:
        """Number of bits that the draft's weights are quantized to; None if they are kept."""
        return read_draft_dtype(self.draft_dtype, self.dtype)[1]

    @property
    def whole_draft(self) -> str | None:
        """The dtype that was named for the draft, whose weights all stay in it; None without one."""
        return None if self.draft_dtype == "auto" or self.draft_bits is not None else self.draft_dtype

    def of_head(self) -> EngineOptions:
        """These options, with the head as a source of `auto` if `draft` names a published head."""
        algorithm = None if self.draft is None else head_algorithm(self.draft)
        if algorithm is None:
            return self
        if self.drafter not in (None, DEFAULT_DRAFTER):
            raise UserError(
                f"draft names a head of algorithm {algorithm}, but drafter is {self.drafter!r}: leave one of them out, "
                f"or use drafter {algorithm}:{self.draft}"
            )
        return replace(self, draft=None, drafter=f"{DEFAULT_DRAFTER}:{algorithm}:{self.draft}")

    def refuse_draft_dtype_alone(self) -> None:
        """Refuse a number format for the draft if there is no draft model and no head is named."""
        if self.draft is None and self.whole_draft is not None and not names_head(self.drafter):
            raise UserError(
                f"draft_dtype is {self.draft_dtype!r}, but there is no draft model: leave it out, or name one"
            )

    def of_target(self) -> LoadOptions:
        """The options for loading the target."""
        own = {name: getattr(self, name) for name in _OF_TARGET}
        return replace(self._of_both(self.dtype, self.device), plainly=True, **own)

    def of_draft(self) -> LoadOptions:
        """The options for loading the draft model, which is on one device."""
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
