"""Engine: the decoding loop, built from the names of models and parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.loading.load import load
from draftproof.backends.loading.match import find_draft
from draftproof.backends.model_info import end_tokens
from draftproof.backends.translation.backend import DraftBackend
from draftproof.drafters.base import Drafter
from draftproof.engine.composition import DrafterTraits
from draftproof.engine.cost_file import CostFile
from draftproof.engine.drafter_parts import make_drafter
from draftproof.engine.loop import DecodingLoop
from draftproof.engine.options import EngineOptions, takes_options
from draftproof.engine.stopper_parts import default_stopper
from draftproof.engine.verifier_parts import DEFAULT_TREE_VERIFIER, DEFAULT_VERIFIER, SEEDED_VERIFIER, make_verifier
from draftproof.errors import UserError
from draftproof.native.numa import use_processors
from draftproof.sampling import default_params
from draftproof.verifiers.base import Verifier


class Engine(DecodingLoop):
    """Generates text from a target model, by speculative decoding if it has a drafter.

    Make one by `Engine.load` from names of models, or by `Engine.assemble` from loaded models. The constructor takes
    the arguments of `DecodingLoop`.
    """

    _cost_file: CostFile | None = None
    _draft: DraftBackend | None = None
    _options: EngineOptions | None = None
    _named_rule: Verifier | None = None

    def keep_costs(self) -> None:
        """Start from the round costs that earlier runs measured for these models, and save those of this run."""
        self._cost_file = CostFile(self)

    @override
    def idle(self) -> None:
        """Save the measured round costs."""
        if self._cost_file is not None:
            self._cost_file.idle()

    def update_weights(
        self,
        weights: nn.Module | Mapping[str, Tensor],
        draft_weights: nn.Module | Mapping[str, Tensor] | None = None,
    ) -> None:
        """Replace the target's weights, for example after a training step; the engine is then as if loaded with them.

        Everything that was made from the old weights (a quantized copy, first layers, a tied head) is made again.
        Measured round costs are kept. The weights are copied, so later changes to the module have no effect.

        Args:
            weights: a model of the same architecture, or its state dict under transformers' names.
            draft_weights: new weights of the draft model, if they change too.

        Raises:
            UserError: requests are running, the weights are of another model, or the backend cannot replace them.
        """
        with self._lock:
            target = self.target
            if self.busy:
                raise UserError("weights cannot change while requests run: wait for the requests, or abort them")
            if self._options is None or not isinstance(target, SlotBackend):
                raise UserError("this engine was not made by Engine.load or Engine.assemble: make a new one")
            if draft_weights is not None and self._draft is None:
                raise UserError("got draft_weights, but the engine has no draft model: leave them out")
            if self._cost_file is not None:
                self._cost_file.write()
            draft = self._draft
            if draft is not None and draft_weights is not None:
                draft = draft.with_weights(draft_weights)
            fresh = type(self).assemble(
                target.with_weights(weights), draft, self.tokenizer, options=self._options, rule=self._named_rule
            )
            self.forget()
            self.target = fresh.target
            self.drafter = fresh.drafter
            self.verifier = fresh.verifier
            self.seeded_verifier = fresh.seeded_verifier
            self._draft = draft
            self._cost_file = fresh._cost_file  # noqa: SLF001 - of this class
            self._schedule()

    @classmethod
    @takes_options
    def load(
        cls, target: str, draft: str | None = None, *, options: EngineOptions | None = None, **changes: Any
    ) -> Engine:
        """Load an engine by model names; registered models are downloaded if they are not on this machine.

        With `tensor_parallel`, only process 0 returns, and only it has the draft model. The other processes compute
        their share of its passes inside this call, and exit when it ends.

        Args:
            target: a registered name ("embedded:target", "smollm2-135m"), hub id, directory or .gguf file.
            draft: the draft model, named in the same way, or a published draft head. A draft model with another
                tokenizer drafts the tokens that both models have.
            options: the options of the engine.
            **changes: fields of `EngineOptions` that override `options`: `Engine.load(name, drafter="ngram:8")`.

        Raises:
            UserError: an unknown name, a model that cannot be loaded, or parts that do not fit together.
        """
        named = (options or EngineOptions()).changed(**({} if draft is None else {"draft": draft}), **changes)
        made = named.of_head()
        made.refuse_draft_dtype_alone()
        use_processors(made.threads, made.numa)  # weights are read by them, too
        source = load(target, made.of_target())
        small_name = find_draft(source) if named.find_draft and named.draft is None else made.draft
        other = None if small_name is None else load(small_name, made.of_draft(), drafts_for=source)
        tokenizer = source.tokenizer  # before the weights, which take longer: an unknown one is an error at once
        small = None if other is None or made.drafter == "none" else other.draft
        return cls.assemble(source.backend, small, tokenizer, options=made)

    @classmethod
    @takes_options
    def assemble(
        cls,
        target: SlotBackend,
        draft: DraftBackend | None,
        tokenizer: Any,
        *,
        options: EngineOptions | None = None,
        rule: Verifier | None = None,
        **changes: Any,
    ) -> Engine:
        """Build an engine around models that are already loaded; several engines may share them.

        Args:
            target: the loaded target.
            draft: the loaded draft model, if the drafter reads one.
            tokenizer: the target's tokenizer; without one, prompts are token ids and outputs have no text.
            options: the options of the engine; those about loading are ignored.
            rule: made by `make_verifier`; default the one named in `options`.
            **changes: fields of `EngineOptions` that override `options`.

        Raises:
            UserError: the parts do not fit together.
        """
        named = {} if draft is None else {"draft": draft.name}  # by which a stopper finds the head that ships for it
        made = (options or EngineOptions()).changed(**named, **changes)
        use_processors(made.threads, made.numa)
        if draft is not None and made.draft_dtype == "auto":
            draft = draft.for_drafts()
        if made.max_model_len is not None:
            target.use_context(made.max_model_len)
            if draft is not None:
                draft.use_context(min(made.max_model_len, draft.max_positions or made.max_model_len))
        rule = rule or made.rule
        part = _drafter_of(made, target, draft, rule)
        traits = DrafterTraits.of(part)
        chosen = rule or make_verifier(DEFAULT_TREE_VERIFIER if traits.branching else DEFAULT_VERIFIER)
        by_clock = rule is None and traits.depends_on_clock
        # With a budget, a draft depends on other requests' drafts; requests with the same seed share random numbers.
        shared = made.draft_budget is not None and (rule is None or (rule.lossless and not rule.shared_noise))
        seeded = (by_clock or shared) and not traits.branching
        defaults = target.facts.sampling_defaults if made.generation_config == "auto" else {}
        engine = cls(
            target,
            part,
            chosen,
            tokenizer=tokenizer,
            eos_token_ids=end_tokens(target.eos_token_ids, getattr(tokenizer, "eos_token_id", None)),
            max_batch=made.max_batch,
            kv_memory=made.kv_memory,
            prefix_reuse=made.prefix_reuse,
            default_params=default_params(defaults, target.name),
            seeded_verifier=make_verifier(SEEDED_VERIFIER) if seeded else None,
            draft_budget=made.draft_budget,
        )
        engine.keep_costs()
        engine._draft = draft
        engine._options = made
        engine._named_rule = rule
        return engine


def _drafter_of(made: EngineOptions, target: SlotBackend, draft: DraftBackend | None, rule: Verifier | None) -> Drafter:
    bits = made.draft_bits
    return make_drafter(
        made.drafter,
        target=target,
        draft=draft if draft is None or bits is None else draft.quantized(bits),
        stopper=made.stopper or default_stopper(rule),
        temperature=made.draft_temperature,
        top_k=made.draft_top_k,
        bits=bits,
        whole=made.whole_draft,
        rule=rule,
        budget=float(made.draft_budget or math.inf),
    )
