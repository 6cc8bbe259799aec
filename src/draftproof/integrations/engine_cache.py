"""Engines around models in memory, kept for the next call as long as the model lives and its weights stay the same."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from draftproof import models
from draftproof.backends.loading.in_memory import (
    Counter,
    Version,
    backend_in_memory,
    grown_numbers,
    model_version,
    pass_counters,
    refuse_training,
    without,
)
from draftproof.backends.loading.load import load
from draftproof.backends.loading.options import LoadOptions, draft_dtype
from draftproof.backends.loading.tokenization import load_tokenizer, shared_tokens
from draftproof.backends.translation.backend import DraftBackend, over_target
from draftproof.engine.engine import Engine
from draftproof.engine.options import EngineOptions
from draftproof.engine.stopper_parts import SHIPPED_FEATURE_HEADS
from draftproof.errors import UserError

_MOST = 4  # compositions that are kept for a model


# Options of EngineOptions that a model in memory has decided already.
OF_LOADING = (
    "dtype", "device", "adapter", "attn_implementation", "quantization_config", "activations", "weights", "kv_dtype",
    "tensor_parallel",
)  # fmt: skip


@dataclass(frozen=True)
class EngineConfig:
    """What an engine around a model in memory is made of."""

    options: EngineOptions  # as in `Engine.load`; `draft` where the draft model is given by name
    draft: Any = None  # the draft model where it is a transformers model in memory
    tokenizer: Any = None  # the target's; needed only to compare it with that of a draft model that is given by name

    @classmethod
    def of(cls, draft: Any, tokenizer: Any, options: Mapping[str, Any]) -> EngineConfig:
        """From a draft model (a name, a transformers model, or None), a tokenizer and options of an engine."""
        for name in options:
            if name in OF_LOADING:
                raise UserError(f"{name} cannot be given for a model that is loaded already: leave it out")
        named = draft is None or isinstance(draft, str)
        if not named and not hasattr(draft, "get_output_embeddings"):
            raise UserError(
                f"draft is a {type(draft).__name__}: expected a model's name, directory or hub id, or a transformers "
                "model"
            )
        changes = {**({"draft": draft} if named else {}), **options}
        made = EngineOptions(generation_config="none").changed(**changes).of_head()
        if named:
            made.refuse_draft_dtype_alone()
        elif made.draft_dtype in ("float32", "bfloat16", "float16"):
            raise UserError(
                f"draft_dtype is {made.draft_dtype!r}, and the draft model is in memory: convert it with .to(...), or "
                "take int8 or int4, which makes a quantized copy"
            )
        return cls(made, None if named else draft, tokenizer if isinstance(draft, str) else None)

    @property
    def key(self) -> tuple[Any, ...]:
        """What two compositions must share to share an engine."""
        own = [getattr(self.options, each.name) for each in fields(self.options)]
        return (*own, *(None if each is None else id(each) for each in (self.draft, self.tokenizer)))

    def engine(self, model: Any, draft: DraftBackend | None, *, keeps: bool = True) -> Engine:
        """A new engine around a model; `keeps` is that of `SlotBackend`."""
        target = backend_in_memory(model, backend=self.options.backend, name=_name(model), check=self.options.check)
        target.keeps = keeps
        engine = Engine.assemble(target, draft, None, options=self.options)
        engine.eos_token_ids = ()  # each call names its own
        return engine

    def draft_backend(self, target: Any) -> DraftBackend | None:
        """The draft model, loaded; None where there is none."""
        options = self.options
        if options.drafter == "none" or (self.draft is None and options.draft is None):
            return None
        if self.draft is not None:
            return backend_in_memory(self.draft, check=options.check)
        assert options.draft is not None, "one of them is given"
        where = models.obtain(options.draft)
        shared = None
        if self.tokenizer is not None:
            words = load_tokenizer(where, trust_remote_code=options.trust_remote_code)
            shared = shared_tokens(self.tokenizer, words, target_name=_name(target), draft_name=options.draft)
        loaded_in, _ = draft_dtype(options.draft_dtype, str(target.dtype).removeprefix("torch."))
        how = LoadOptions(
            dtype=loaded_in, device=str(target.device), trust_remote_code=options.trust_remote_code, check=options.check
        )
        return over_target(load(options.draft, how).backend, shared)


def _name(model: Any) -> str:
    """How errors call a model; the registered name of one that was loaded from where that is kept."""
    source = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    for name in SHIPPED_FEATURE_HEADS:
        if models.pulled(name) and models.resolve(name) == source:
            return name
    return source


@dataclass(eq=False)
class CachedEngine:
    """An engine that is kept for a model, and used by one call at a time, which holds the lock."""

    engine: Engine
    version: Version  # of the weights that it was made from
    draft: DraftBackend | None
    draft_version: Version | None  # of the draft model's weights, where it is a model in memory
    owner: weakref.ref[Any] | None  # that model, so that another one in its place is noticed
    counters: set[Counter] = field(default_factory=set)  # of both models: settings that are none
    lock: threading.Lock = field(default_factory=threading.Lock)

    def fits(self, model: Any, version: Version) -> bool:
        """Whether the target's weights are those that the engine was made from."""
        return self._same(model, self.version, version)

    def fits_draft(self, other: Any, version: Version | None) -> bool:
        """Whether the draft model is the same, with the same weights; `other` is None where it is not in memory."""
        if self.draft_version is None or version is None:
            return self.draft_version is version
        return self.owner is not None and self.owner() is other and self._same(other, self.draft_version, version)

    def _same(self, model: Any, known: Version, now: Version) -> bool:
        if known == now:
            return True
        grown = grown_numbers(known, now)
        if without(known, grown) != without(now, grown):
            return False
        if not grown <= self.counters:
            self.counters |= pass_counters(model)
        return grown <= self.counters


_held: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], CachedEngine]] = weakref.WeakKeyDictionary()
_guard = threading.RLock()


@contextmanager
def engine_of(model: Any, composition: EngineConfig) -> Iterator[Engine]:
    """The engine of a model with this composition, for one caller at a time; made at the first call.

    It is made again when the weights have changed, or what the model computes with them (`model_version`), and dropped
    with the model or by `forget`.
    """
    with _guard:
        held = _current(model, composition)
    with held.lock:
        yield held.engine


def _current(model: Any, composition: EngineConfig) -> CachedEngine:
    refuse_training(model)
    kept = _held.setdefault(model, {})
    held, version = kept.get(composition.key), model_version(model)
    other = composition.draft
    draft_version = None if other is None else model_version(other)
    draft, keeps = None, held is None or held.fits(model, version)
    if held is not None and held.fits_draft(other, draft_version):
        if keeps:
            return held
        draft = held.draft
    if draft is None:
        draft = composition.draft_backend(model)
    kept.pop(composition.key, None)
    held = None  # frees its memory before the next one takes some
    engine = composition.engine(model, draft, keeps=keeps)
    made = CachedEngine(engine, version, draft, draft_version, None if other is None else weakref.ref(other))
    kept[composition.key] = made
    while len(kept) > _MOST:
        del kept[next(iter(kept))]
    return made


def forget(model: Any) -> None:
    """Drop the engines of a model now, and free their memory; the next call makes a new one.

    Needed only after a change of few weights past torch's own count of changes (through `tensor.data`, or by another
    library), which `model_version` may not see.
    """
    with _guard:
        _held.pop(model, None)
