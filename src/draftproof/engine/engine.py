"""Engine: the decoding loop, made from names of models and parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from draftproof.backends.loading import draft_dtype as read_draft_dtype
from draftproof.backends.loading import take_part
from draftproof.backends.slots import SlotBackend
from draftproof.engine.checked import ModelSource
from draftproof.engine.kept_costs import KeptCosts
from draftproof.engine.loop import DecodingLoop
from draftproof.engine.memory import read_bytes
from draftproof.engine.registry import (
    DEFAULT_TREE_VERIFIER,
    DEFAULT_VERIFIER,
    SEEDED_VERIFIER,
    default_stopper,
    make_drafter,
    make_stopper,
    make_verifier,
)
from draftproof.errors import UserError
from draftproof.sampling import default_params
from draftproof.tokenization import end_tokens, refuse_different
from draftproof.verifiers.base import Verifier


class Engine(DecodingLoop):
    """Generates from a target model, speculatively when it is given a drafter; arguments as of `DecodingLoop`."""

    _kept: KeptCosts | None = None
    _draft: SlotBackend | None = None
    _options: Mapping[str, Any] | None = None

    def keep_costs(self) -> None:
        """Begin with what earlier runs learned of rounds with these models, and keep what this one learns."""
        self._kept = KeptCosts(self)

    def idle(self) -> None:
        """See `DecodingLoop`; writes what was learned."""
        if self._kept is not None:
            self._kept.idle()

    def update_weights(
        self,
        weights: nn.Module | Mapping[str, Tensor],
        draft_weights: nn.Module | Mapping[str, Tensor] | None = None,
    ) -> None:
        """Go on with new weights of the target, as after a step of training; afterwards it is as if loaded with them.

        What is made of the target's weights (a quantized twin, first layers, a tied head) is made again; what was
        learned of rounds stays. The weights are copied: a later change of the module changes nothing here.

        Args:
            weights: a model of the same architecture, or its state dict under transformers' names.
            draft_weights: of the draft model, where it changes too.

        Raises:
            UserError: requests are running, weights of another model, or a backend that cannot change them.
        """
        with self._lock:
            target = self.target
            if self.busy:
                raise UserError("weights cannot change while requests run: wait for them, or abort them")
            if self._options is None or not isinstance(target, SlotBackend):
                raise UserError("this engine was not made by Engine.load or Engine.assemble: make a new one")
            if draft_weights is not None and self._draft is None:
                raise UserError("draft_weights were given, and the engine has no draft model: leave them out")
            if self._kept is not None:
                self._kept.write()
            draft = self._draft
            if draft is not None and draft_weights is not None:
                draft = draft.with_weights(draft_weights)
            fresh = type(self).assemble(target.with_weights(weights), draft, self.tokenizer, **self._options)
            self.forget()
            self.target, self.drafter = fresh.target, fresh.drafter
            self.verifier, self.seeded_verifier = fresh.verifier, fresh.seeded_verifier
            self._draft, self._kept = draft, fresh._kept  # noqa: SLF001 - of this class
            self._schedule()

    @classmethod
    def load(
        cls,
        target: str,
        draft: str | None = None,
        *,
        drafter: str | None = None,
        verifier: str | None = None,
        stopper: str | None = None,
        dtype: str = "auto",
        device: str | Mapping[str, Any] | None = None,
        draft_dtype: str = "auto",
        draft_temperature: float | None = None,
        draft_top_k: int | None = None,
        max_batch: int = 8,
        kv_memory: int | str | None = None,
        prefix_reuse: bool = True,
        trust_remote_code: bool = False,
        check: bool = True,
        backend: str = "auto",
        adapter: str | None = None,
        attn_implementation: str | None = None,
        quantization_config: Any = None,
        max_model_len: int | None = None,
        generation_config: str = "auto",
        tensor_parallel: int = 1,
    ) -> Engine:
        """An engine from names; registered models that are not on this machine are downloaded (`models.obtain`).

        Args:
            target: a registered name ("embedded:target", "smollm2-135m"), hub id, directory or .gguf file.
            draft: the draft model, named likewise; its tokenizer must be the target's.
            drafter: a name of DRAFTERS, with its argument; default "auto": in every round what pays most of the draft
                model, what ships for the target, the target with weights of 4 bits, and repeated passages.
            verifier: a name of VERIFIERS; default "block", and "trie_block" for drafters of several drafts. Without a
                name, requests that sample with a seed are verified by "gumbel" where drafts depend on the time of
                earlier rounds: then a seed gives the same text whatever is drafted.
            stopper: when a chain of drafted tokens ends; "fixed:4" is four tokens. Default "auto": as many as pay, by
                the time of the rounds so far; "fixed:4" for rules that want constant lengths.
            dtype: "auto", "float32", "bfloat16" or "float16", for both models.
            draft_dtype: another one for the draft model; "int8" and "int4" quantize the weights of the draft model or
                of the feature head.
            device: for both models; default an accelerator when there is one. "auto", or a device or "disk" for each
                part of the model by its name, spreads the target over several (needs accelerate); the draft model is
                on one then.
            draft_temperature: of the draft, when it is not each request's own; the output stays the target's.
            draft_top_k: of the draft, likewise.
            max_batch: sequences decoded together.
            kv_memory: bytes for keys, values and states of all requests and of both models, or a text such as "2GiB".
                Requests wait for memory, and one that can never fit is refused. None: no limit.
            prefix_reuse: whether a prompt that begins like another one, running or ended, takes over what was read of
                it; outputs are the same.
            trust_remote_code: run code that comes with a model; off unless asked for.
            check: probe each model for rollback at construction (a few short forward passes).
            backend: of both models, a name of BACKENDS; "auto" takes "lean" where the model allows it, "snapshot" where
                it has recurrent layers, else "hf"; and for a target whose drafts cannot be taken back "plain", which
                decodes without drafts (`plain_because` says why).
            adapter: a PEFT adapter for the target, a directory or hub id: merged into its weights where that gives the
                same logits, else computed beside them by backend hf. A draft or target that is an adapter itself is
                loaded with its base model.
            attn_implementation: transformers' attention for both models, "eager" or "sdpa"; not for backend lean.
            quantization_config: quantizes the target's weights while they are loaded, by transformers: one of its
                configs (BitsAndBytesConfig, TorchAoConfig, ...), the fields of one, or JSON text or a .json file with
                them. The output is that of the quantized target.
            max_model_len: the longest sequence, prompt and text together; at most what the target reads, which is the
                default. A draft model with a shorter context drafts up to its own.
            generation_config: "auto" takes the sampling parameters of the target's generation config as defaults, as
                vLLM and transformers do (`default_params`); "none" leaves them alone.
            tensor_parallel: number of processes among which the target is divided, by transformers' plan for its type;
                they are started by torchrun. Only process 0 returns and has the draft model; the others compute their
                parts of its passes in here, and exit when it ends.

        Raises:
            UserError: a name that is none, a model that cannot be had, parts that do not fit together.
        """
        if generation_config not in ("auto", "none"):
            raise UserError(f"generation_config is {generation_config!r}: legal are auto and none")
        read_bytes(kv_memory)
        if tensor_parallel != 1:
            take_part(tensor_parallel)
        chosen = None if verifier is None else make_verifier(verifier)  # names are read before models are loaded
        if stopper is not None:
            make_stopper(stopper, draft or drafter)
        options: dict[str, Any] = {
            "device": device,
            "dtype": dtype,
            "trust_remote_code": trust_remote_code,
            "check": check,
            "backend": backend,
            "adapter": None,
            "attn_implementation": attn_implementation,
        }
        loaded_in, bits = read_draft_dtype(draft_dtype, dtype)
        if draft is None and bits is None and draft_dtype != "auto":
            raise UserError(f"draft_dtype is {draft_dtype!r}, and there is no draft model: leave it out, or name one")
        one = device is None or (isinstance(device, str) and device != "auto")
        of_target = {"adapter": adapter, "quantization_config": quantization_config, "plainly": True}
        source = ModelSource(target, **{**options, **of_target, "tensor_parallel": tensor_parallel})
        tokenizer, small = source.tokenizer, None
        if draft is not None:
            other = ModelSource(draft, **{**options, "dtype": loaded_in, "device": device if one else None})
            refuse_different(tokenizer, other.tokenizer, target_name=target, draft_name=draft)
            small = None if drafter == "none" else other.backend()
        main = source.backend()
        if max_model_len is not None:
            main.use_context(max_model_len)
            if small is not None:
                small.use_context(min(max_model_len, small.max_positions or max_model_len))
        return cls.assemble(
            main,
            small,
            tokenizer,
            drafter=drafter,
            stopper=stopper,
            rule=chosen,
            draft_bits=bits,
            draft_temperature=draft_temperature,
            draft_top_k=draft_top_k,
            max_batch=max_batch,
            kv_memory=kv_memory,
            prefix_reuse=prefix_reuse,
            generation_config=generation_config,
        )

    @classmethod
    def assemble(
        cls,
        target: SlotBackend,
        draft: SlotBackend | None,
        tokenizer: Any,
        *,
        drafter: str | None = None,
        stopper: str | None = None,
        rule: Verifier | None = None,
        draft_bits: int | None = None,
        draft_temperature: float | None = None,
        draft_top_k: int | None = None,
        max_batch: int = 8,
        kv_memory: int | str | None = None,
        prefix_reuse: bool = True,
        generation_config: str = "auto",
    ) -> Engine:
        """An engine around models that are loaded already; several engines may share them.

        Args:
            target: loaded.
            draft: loaded, where the drafter reads one.
            tokenizer: the target's; without one, prompts are token ids and there is no text.
            drafter: as in `load`.
            stopper: as in `load`.
            rule: made by `make_verifier`; default as in `load`.
            draft_bits: to which the weights of the draft model or of the feature head are quantized; None leaves them.
            draft_temperature: as in `load`.
            draft_top_k: as in `load`.
            max_batch: as in `load`.
            kv_memory: as in `load`.
            prefix_reuse: as in `load`.
            generation_config: as in `load`.

        Raises:
            UserError: parts that do not fit together.
        """
        part = make_drafter(
            drafter,
            target=target,
            draft=draft if draft is None or draft_bits is None else draft.quantized(draft_bits),
            stopper=stopper or default_stopper(rule),
            temperature=draft_temperature,
            top_k=draft_top_k,
            bits=draft_bits,
            rule=rule,
        )
        chosen = rule or make_verifier(DEFAULT_TREE_VERIFIER if part.branching else DEFAULT_VERIFIER)
        by_clock = rule is None and part.timed and not part.branching
        defaults = target.facts.sampling_defaults if generation_config == "auto" else {}
        engine = cls(
            target,
            part,
            chosen,
            tokenizer=tokenizer,
            eos_token_ids=end_tokens(target.eos_token_ids, getattr(tokenizer, "eos_token_id", None)),
            max_batch=max_batch,
            kv_memory=kv_memory,
            prefix_reuse=prefix_reuse,
            default_params=default_params(defaults, target.name),
            seeded_verifier=make_verifier(SEEDED_VERIFIER) if by_clock else None,
        )
        engine.keep_costs()
        engine._draft = draft
        engine._options = {
            "drafter": drafter,
            "stopper": stopper,
            "rule": rule,
            "draft_bits": draft_bits,
            "draft_temperature": draft_temperature,
            "draft_top_k": draft_top_k,
            "max_batch": max_batch,
            "kv_memory": kv_memory,
            "prefix_reuse": prefix_reuse,
            "generation_config": generation_config,
        }
        return engine
