"""A pair of models with its data, and what is made from them and kept in a cache: tokens, responses, features."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import torch

from draftproof import models
from draftproof.backends.base import Backend
from draftproof.backends.cache.slot_backend import SlotBackend
from draftproof.backends.heads.feature_head import FeatureBackend, StandaloneHead
from draftproof.backends.heads.feature_net import load_net
from draftproof.backends.loading.load import load
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.loading.tokenization import load_tokenizer, refuse_different
from draftproof.backends.model_info import end_tokens
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.head import HeadDraftModel
from draftproof.engine.engine import Engine
from draftproof.errors import UserError
from draftproof.progress import Watch, silent
from draftproof.provenance import digest, fingerprint
from draftproof.rng import fold
from draftproof.sampling import SamplingParams
from draftproof.training import features
from draftproof.training.data import cache_folder, read_examples, split, tokenize
from draftproof.training.features import Build, JudgeRows, ModelPair, collect, fit, join
from draftproof.training.head_options import Material
from draftproof.training.responses import Response, sample_responses
from draftproof.training.sweep import Trial

DRAFTED = 24  # tokens of each drafted continuation: more than the limit of any stopper with a head
CATEGORIES = ("original", "draft", "target", "mixed")  # SPRINTER, arXiv 2502.04557, section 3.2


class PairData:
    """The loaded models and data, and rows made from them."""

    def __init__(self, material: Material, watch: Watch = silent) -> None:
        self.material = material
        self.watch = watch
        self.cache = cache_folder(material.cache)
        examples, self.sources = read_examples(material.data, form=material.form, opening=material.opening)
        self.parts = split(examples, material.prompts)
        self.tokenizer = self._tokenizer()
        self.target = self._load(material.target)
        self.head = _feature_head(material.draft)
        self.draft: Backend = (
            StandaloneHead(self.target, load_net(self.head)) if self.head else self._load(material.draft)
        )
        self.pair = ModelPair(
            self.target, self.draft, replace(material.params, seed=None), self._model if self.head else None
        )
        self.fingerprints = {material.target: fingerprint(material.target)}
        self.fingerprints[material.draft] = fingerprint(self.head or material.draft)

    def _tokenizer(self) -> Any:
        if _feature_head(self.material.draft):
            return load_tokenizer(models.resolve(self.material.target))  # a feature head has no tokenizer
        names = (self.material.target, self.material.draft)
        ours, theirs = (load_tokenizer(models.resolve(name)) for name in names)
        refuse_different(ours, theirs, target_name=names[0], draft_name=names[1])
        return ours

    def _load(self, name: str) -> SlotBackend:
        return load(name, LoadOptions(dtype=self.material.dtype, device=self.material.device)).backend

    def _model(self) -> DraftModel:
        """The feature head as drafters use it."""
        assert self.head is not None, "the draft is a feature head"
        return HeadDraftModel(FeatureBackend(self.target, load_net(self.head)), self.target)

    @cached_property
    def eos(self) -> tuple[int, ...]:
        """Tokens that end a response."""
        return end_tokens(self.target.eos_token_ids, self.tokenizer.eos_token_id)

    @property
    def identity(self) -> str:
        """A hash of the data, the models and the sampling parameters."""
        params = asdict(self.material.params)
        sources = [asdict(source) for source in self.sources]
        m = self.material
        facts = (
            m.form,
            m.opening,
            m.prompts,
            m.starts,
            m.seed,
            m.dtype,
            str(self.target.device),
            list(self.fingerprints.values()),
        )
        return digest(params, sources, facts)

    # --- sequences ------------------------------------------------------------------------------------------------

    def prompts(self, part: str) -> list[list[int]]:
        """Token ids of a part's prompts that leave room for a response."""
        ids = self._ids([example.prompt for example in self.parts[part]])
        found = [row for row in self._short(ids) if row]
        if not found:
            raise UserError(
                f"prompts: expected 1 to {self._room - 1} tokens, which the models can read with a response; all "
                f"{len(ids)} of the part {part} have others (cut them, or use other texts)"
            )
        return found

    @property
    def _room(self) -> int:
        """Number of tokens at which a prefix is too long for a drafted continuation."""
        bounds = [model.max_positions for model in (self.target, self.draft) if model.max_positions is not None]
        return min(bounds, default=1 << 30) - DRAFTED

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        return tokenize(texts, self.tokenizer, cache=self.cache, key=self.fingerprints[self.material.target])

    def responses(self, part: str) -> list[Response]:
        """The target's continuations of the prompts of a part."""
        return self._continue(self.target, self.prompts(part), self.material.params, f"responses ({part})")

    def drafts(self, part: str) -> list[Response]:
        """The draft model's continuations of prefixes that end at random places of the target's responses."""
        rows = [row for row in fit(self.responses(part), self.target, self.draft) for _ in range(self.material.starts)]
        return self._onward(rows, f"drafts ({part})")

    def _onward(self, rows: Sequence[Response], title: str) -> list[Response]:
        """The draft model's continuations of prefixes that end at random places of these rows."""
        chooser = random.Random(fold(self.material.seed, 4))
        prefixes = [[*row.prompt, *row.tokens[: chooser.randrange(len(row.tokens))]] for row in rows]
        return self._continue(self.draft, self._short(prefixes), self._brief, title)

    def completed(self, part: str) -> list[Response]:
        """The target's continuations of the draft model's continuations: prefixes with tokens of both models."""
        prefixes = [row.whole for row in self.drafts(part) if row.tokens and row.tokens[-1] not in self.eos]
        return self._continue(self.target, self._short(prefixes), self._brief, f"mixed ({part})")

    def originals(self, part: str) -> list[Response]:
        """The texts of a part, each as a response to its first token."""
        limit = (self.material.params.max_tokens or 128) * 2
        ids = self._ids([example.text for example in self.parts[part]])
        return [Response(tuple(row[:1]), tuple(row[1:limit])) for row in ids if len(row) > 1]

    @property
    def _brief(self) -> SamplingParams:
        return replace(self.material.params, max_tokens=DRAFTED)

    def _short(self, prefixes: list[list[int]]) -> list[list[int]]:
        """The prefixes that leave room for a drafted continuation."""
        return [row for row in prefixes if len(row) < self._room]

    def _continue(self, model: Backend, prompts: list[list[int]], params: SamplingParams, title: str) -> list[Response]:
        name = self.material.target if model is self.target else self.material.draft
        engine = Engine(model, tokenizer=self.tokenizer, eos_token_ids=self.eos)
        key = digest(self.fingerprints[name], self.material.dtype, model.device.type, self.eos)
        options: dict[str, Any] = {"seed": self.material.seed, "watch": self.watch, "title": title}
        return sample_responses(engine, prompts, params, cache=self.cache, key=key, **options)

    # --- rows -----------------------------------------------------------------------------------------------------

    def head_rows(self, part: str, mix: float | None) -> JudgeRows:
        """Rows for heads that read the state at a token: of drafts, or token-mixed with this share of target tokens."""
        if mix is None:
            return self._rows(part, "drafted", features.drafted(self.pair), self.drafts)
        build = features.mixed(self.pair, mix, fold(self.material.seed, 5))
        return self._rows(part, f"mixed {mix:g}", build, self.responses)

    def verifier_rows(self, part: str) -> tuple[JudgeRows, dict[str, int]]:
        """Rows for verifiers, equally many of each category of prefixes, and their number by category.

        The states of a feature head exist for its own drafts only, so it first continues the prefixes of each category.
        """
        makers = (self.originals, self.drafts, self.responses, self.completed)
        found = [self._prefix_rows(part, name, make) for name, make in zip(CATEGORIES, makers, strict=True)]
        size = min(map(len, found))
        generator = torch.Generator().manual_seed(fold(self.material.seed, 7) >> 1)
        picked = [rows.pick(torch.randperm(len(rows), generator=generator)[:size]) for rows in found]
        return join(picked), dict.fromkeys(CATEGORIES, size)

    def _prefix_rows(self, part: str, name: str, make: Callable[[str], list[Response]]) -> JudgeRows:
        """Rows of tokens that the draft model draws at places of one category."""
        if self.head is None:
            return self._rows(part, name, features.before(self.pair, fold(self.material.seed, 6)), make)

        def onward(part: str) -> list[Response]:
            return self._onward(fit(make(part), self.target, self.draft), f"drafts ({part}, {name})")

        return self._rows(part, f"above {name}", features.drafted(self.pair, above=True), onward)

    def placed(self, part: str) -> list[Response]:
        """Texts where the draft model's states are those of a run: drafts of a feature head, else responses."""
        return self.responses(part) if self.head is None else self.drafts(part)

    def draft_rows_above(self, part: str) -> JudgeRows:
        """Rows of drafts with the state before each token, which a verifier reads in a run."""
        return self._rows(part, "above", features.drafted(self.pair, above=True), self.drafts)

    def _rows(self, part: str, name: str, build: Build, make: Callable[[str], list[Response]]) -> JudgeRows:
        key = digest(self.identity, name, part)[:24]
        responses = fit(make(part), self.target, self.draft)
        title = f"features ({part}, {name})"
        return collect(build, responses, self.cache / "features" / key, watch=self.watch, title=title)

    def trial(self, prompts: int, tokens: int, part: str = "valid") -> Trial:
        """The first prompts of a held-out part, for runs of the engine."""
        return Trial(self.pair, self.prompts(part)[:prompts], self.eos, tokens, self.material.seed)


def _feature_head(name: str) -> str | None:
    """DIR of `feature_head:DIR`; None for the name of a model."""
    kind, _, where = name.partition(":")
    return where if kind == "feature_head" else None
