"""Engines around models in memory, kept for the next call as long as the model lives and its weights stay the same."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from draftproof import models
from draftproof.backends.in_memory import Version, backend_in_memory, refuse_training, weights_version
from draftproof.backends.loading import draft_dtype, load_backend
from draftproof.backends.slots import SlotBackend
from draftproof.engine.engine import Engine
from draftproof.engine.memory import read_bytes
from draftproof.engine.registry import SHIPPED_FEATURE_HEADS, make_stopper, make_verifier
from draftproof.errors import UserError
from draftproof.tokenization import load_tokenizer, refuse_different

_MOST = 4  # compositions that are kept for a model


@dataclass(frozen=True, kw_only=True)
class Composition:
    """What an engine around a model in memory is made of; fields as the arguments of `Engine.load`.

    Attributes:
        draft: the draft model: a name, as in `Engine.load`, or a transformers model in memory.
        tokenizer: the target's; needed only to compare it with that of a draft model that is given by name.
    """

    draft: Any = field(default=None)
    drafter: str | None = None
    verifier: str | None = None
    stopper: str | None = None
    draft_dtype: str = "auto"
    draft_temperature: float | None = None
    draft_top_k: int | None = None
    max_batch: int = 8
    trust_remote_code: bool = False
    check: bool = True
    backend: str = "auto"
    max_model_len: int | None = None
    kv_memory: int | str | None = None
    prefix_reuse: bool = True
    tokenizer: Any = field(default=None)

    def __post_init__(self) -> None:
        """Read the names before any model is needed.

        Raises:
            UserError: a name that is none.
        """
        named = isinstance(self.draft, str)
        if self.verifier is not None:
            make_verifier(self.verifier)
        if self.stopper is not None:
            make_stopper(self.stopper, self.draft if named else self.drafter)
        read_bytes(self.kv_memory)
        _, bits = draft_dtype(self.draft_dtype, "auto")
        if self.draft is None and bits is None and self.draft_dtype != "auto":
            raise UserError(
                f"draft_dtype is {self.draft_dtype!r}, and there is no draft model: leave it out, or name one"
            )
        if not named and self.draft is not None and not hasattr(self.draft, "get_output_embeddings"):
            raise UserError(
                f"draft is a {type(self.draft).__name__}: legal are a model's name, directory or hub id, or a "
                "transformers model"
            )
        if self.draft is not None and not named and self.draft_dtype in ("float32", "bfloat16", "float16"):
            raise UserError(
                f"draft_dtype is {self.draft_dtype!r}, and the draft model is in memory: convert it with .to(...), or "
                "take int8 or int4, which makes a quantized copy"
            )

    @property
    def key(self) -> tuple[Any, ...]:
        """What two compositions must share to share an engine."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        own["draft"] = self.draft if self.draft is None or isinstance(self.draft, str) else id(self.draft)
        own["tokenizer"] = None if self.tokenizer is None else id(self.tokenizer)
        return tuple(own.values())

    def engine(self, model: Any, draft: SlotBackend | None, *, keeps: bool = True) -> Engine:
        """A new engine around a model.

        Args:
            model: the target.
            draft: the draft model's backend, where there is one.
            keeps: see `SlotBackend`.
        """
        target = backend_in_memory(model, backend=self.backend, name=_name(model), check=self.check)
        target.keeps = keeps
        if self.max_model_len is not None:
            target.use_context(self.max_model_len)
            if draft is not None:
                draft.use_context(min(self.max_model_len, draft.max_positions or self.max_model_len))
        _, bits = draft_dtype(self.draft_dtype, "auto")
        engine = Engine.assemble(
            target,
            draft,
            None,
            drafter=self.drafter,
            stopper=self.stopper,
            rule=None if self.verifier is None else make_verifier(self.verifier),
            draft_bits=bits,
            draft_temperature=self.draft_temperature,
            draft_top_k=self.draft_top_k,
            max_batch=self.max_batch,
            kv_memory=self.kv_memory,
            prefix_reuse=self.prefix_reuse,
            generation_config="none",
        )
        engine.eos_token_ids = ()  # each call names its own
        return engine

    def draft_backend(self, target: Any) -> SlotBackend | None:
        """The draft model, loaded; None where there is none."""
        if self.draft is None or self.drafter == "none":
            return None
        if not isinstance(self.draft, str):
            return backend_in_memory(self.draft, check=self.check)
        where = models.obtain(self.draft)
        if self.tokenizer is not None:
            words = load_tokenizer(where, trust_remote_code=self.trust_remote_code)
            refuse_different(self.tokenizer, words, target_name=_name(target), draft_name=self.draft)
        loaded_in, _ = draft_dtype(self.draft_dtype, str(target.dtype).removeprefix("torch."))
        return load_backend(
            self.draft,
            dtype=loaded_in,
            device=str(target.device),
            trust_remote_code=self.trust_remote_code,
            check=self.check,
        )


def _name(model: Any) -> str:
    """How errors call a model; the registered name of one that was loaded from where that is kept."""
    source = str(getattr(model.config, "_name_or_path", "") or type(model).__name__)
    for name in SHIPPED_FEATURE_HEADS:
        if models.pulled(name) and models.resolve(name) == source:
            return name
    return source


@dataclass(eq=False)
class Held:
    """An engine that is kept for a model.

    Attributes:
        engine: used by one call at a time.
        version: of the weights that it was made from.
        draft: backend of the draft model.
        draft_version: of its weights, where it is a model in memory.
        owner: that model, so that another one in its place is noticed.
        lock: held by the call that uses the engine.
    """

    engine: Engine
    version: Version
    draft: SlotBackend | None
    draft_version: Version | None
    owner: weakref.ref[Any] | None
    lock: threading.Lock = field(default_factory=threading.Lock)


_held: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], Held]] = weakref.WeakKeyDictionary()
_guard = threading.RLock()


@contextmanager
def engine_of(model: Any, composition: Composition) -> Iterator[Engine]:
    """The engine of a model with this composition, for one caller at a time; made at the first call.

    It is made again when the weights have changed (`weights_version`), and dropped with the model or by `forget`.

    Raises:
        UserError: the model cannot be read, or is in training mode; parts that do not fit together.
    """
    with _guard:
        held = _current(model, composition)
    with held.lock:
        yield held.engine


def _current(model: Any, composition: Composition) -> Held:
    refuse_training(model)
    kept = _held.setdefault(model, {})
    held, version = kept.get(composition.key), weights_version(model)
    other = None if isinstance(composition.draft, str) or composition.draft is None else composition.draft
    draft_version = None if other is None else weights_version(other)
    draft, keeps = None, held is None or held.version == version
    if held is not None and (held.owner is None or held.owner() is other) and held.draft_version == draft_version:
        if held.version == version:
            return held
        draft = held.draft
    if draft is None:
        draft = composition.draft_backend(model)
    kept.pop(composition.key, None)
    held = None  # frees its memory before the next one takes some
    engine = composition.engine(model, draft, keeps=keeps)
    made = Held(engine, version, draft, draft_version, None if other is None else weakref.ref(other))
    kept[composition.key] = made
    while len(kept) > _MOST:
        del kept[next(iter(kept))]
    return made


def forget(model: Any) -> None:
    """Drop the engines of a model now, and free their memory; the next call makes a new one.

    Needed only after a change of few weights past torch's own count of changes (through `tensor.data`, or by another
    library), which `weights_version` may not see.
    """
    with _guard:
        _held.pop(model, None)
