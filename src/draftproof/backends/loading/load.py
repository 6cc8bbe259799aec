"""Loading of models by name: `load` returns a model's tokenizer and its backend, and owns all steps between."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from draftproof import models
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.lean.backend import LeanBackend
from draftproof.backends.loading.adapters import tokenizer_of
from draftproof.backends.loading.by_name import load_backend, take_part
from draftproof.backends.loading.fast_tokenizer import FastTokenizer
from draftproof.backends.loading.gguf_model import in_own_numbers, refuse_head
from draftproof.backends.loading.options import KV_DTYPES, WEIGHTS, LoadOptions
from draftproof.backends.loading.packed_checkpoint import read_packed
from draftproof.backends.loading.stored_backends import rounded
from draftproof.backends.loading.tokenization import load_tokenizer, read_tokenizer, share_of_text, shared_tokens
from draftproof.backends.loading.verified import StoredCheck
from draftproof.backends.translation.backend import DraftBackend, over_target
from draftproof.backends.translation.token_map import TokenMap
from draftproof.errors import reason
from draftproof.models.gguf_file import GGUFFile, is_gguf

_log = logging.getLogger(__name__)
_Read = TypeVar("_Read")


def load(name: str, options: LoadOptions | None = None, *, drafts_for: LoadedModel | None = None) -> LoadedModel:
    """A model from a registered name, a hub id, a directory or a .gguf file; a registered one is downloaded.

    With `tensor_parallel`, only process 0 returns (see `take_part`). The tokenizer of a draft model is compared with
    that of the target that it drafts for at once, and weights are read later.

    Raises:
        UserError: a name that is none, a model that cannot be had, or a draft model that shares too few tokens.
    """
    options = options or LoadOptions()
    if options.tensor_parallel != 1:
        take_part(options.tensor_parallel)
    made = LoadedModel(name, options)
    if drafts_for is not None:
        made.draft_for(drafts_for)
    return made


class LoadedModel:
    """A model by name; its tokenizer and its weights are read when they are first asked for."""

    def __init__(self, name: str, options: LoadOptions) -> None:
        self.name = name
        self._options = options
        where = models.obtain(name)
        self._tokenizer_source = tokenizer_of(where)
        self._check = StoredCheck.of(Path(where), options)
        self._where = Path(where)
        self._shared: TokenMap | None = None

    def draft_for(self, target: LoadedModel) -> None:
        """Let `draft` be over the tokens of a target."""
        self._shared = shared_tokens(target.tokenizer, self.tokenizer, target_name=target.name, draft_name=self.name)
        if self._shared is not None:
            _log.warning(
                "%s has another vocabulary than %s: drafts are of %d tokens that both have, %.0f%% of those in a text",
                self.name,
                target.name,
                len(self._shared),
                100 * share_of_text(self._shared, target.tokenizer),
            )

    @property
    def draft(self) -> DraftBackend:
        """The model as a draft model, over the tokens of the target that it drafts for."""
        return over_target(self.backend, self._shared)

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The model's tokenizer: transformers' own, or one that does the same."""
        if self._gguf is not None:
            return read_tokenizer(self._gguf)
        kept = self._from_check(lambda check: check.tokenizer(self._original_tokenizer))
        return self._original_tokenizer() if kept is None else kept

    @functools.cached_property
    def backend(self) -> SlotBackend:
        """The model with its weights."""
        made, bits = self._as_it_is(), WEIGHTS[self._options.weights]
        if bits is not None:
            made = rounded(made, bits, check=self._options.check)
            _log.warning(
                "the weights of %s are rounded to %d bits: texts are those of the rounded model", self.name, bits
            )
        dtype = KV_DTYPES[self._options.kv_dtype]
        if dtype is not None:
            made.store_kv(dtype)
        if dtype not in (None, made.dtype):
            _log.warning(
                "keys and values of %s are rounded to %d bits: texts are those of this model",
                self.name,
                8 * dtype.itemsize,
            )
        return made

    def _as_it_is(self) -> SlotBackend:
        """The model with the weights that it has."""
        kept = self._from_check(lambda check: check.backend(self.name))
        if kept is not None:
            return kept
        if self._gguf is not None and (own := in_own_numbers(self._gguf, self.name, self._options)) is not None:
            return own
        if self._gguf is None and (packed := read_packed(str(self._where), self.name, self._options)) is not None:
            return packed
        made = load_backend(self.name, self._options)
        if self._check is not None and type(made) is LeanBackend:
            # a tokenizer without transformers is described by transformers' own
            fast = isinstance(self.tokenizer, FastTokenizer)
            self._check.keep(self._original_tokenizer() if fast else self.tokenizer, made)
        return made

    @functools.cached_property
    def _gguf(self) -> GGUFFile | None:
        if not is_gguf(self._where):
            return None
        file = GGUFFile(self._where)
        refuse_head(file, self.name)
        return file

    def _original_tokenizer(self) -> Any:
        return load_tokenizer(self._tokenizer_source, trust_remote_code=self._options.trust_remote_code)

    def _from_check(self, read: Callable[[StoredCheck], _Read]) -> _Read | None:
        """Something that an earlier check left; None where there is none, or it cannot be used."""
        if self._check is None or self._check.row is None:
            return None
        try:
            return read(self._check)
        except Exception as cause:  # noqa: BLE001 - whatever is wrong with what was kept, the model itself is there
            _log.info("what was kept of %s cannot be used (%s): it is checked again", self.name, reason(cause))
            self._check.row = None
            return None
