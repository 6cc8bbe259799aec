"""Our lookup drafters and stoppers as vLLM's proposer of the method `custom_class`."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from draftproof.drafters.auto import AutoDrafter
from draftproof.drafters.base import Drafter, DraftRequest
from draftproof.drafters.ngram import NgramDrafter
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.engine.stopper_parts import make_stopper
from draftproof.errors import UserError
from draftproof.integrations.vllm.options import PluginOptions
from draftproof.integrations.vllm.runner import current_round
from draftproof.rng import CounterRoundRng
from draftproof.sampling import SamplingParams, Transforms
from draftproof.stoppers.base import RoundTime, Stopper
from draftproof.stoppers.costs import DraftCosts

_log = logging.getLogger("vllm.draftproof")


class Proposer:
    """Drafts for vLLM what followed the last tokens of a request earlier, in its own text or in other requests.

    vLLM makes it for `--speculative-config '{"method": "custom_class", "model":
    "draftproof.integrations.vllm.Proposer", "num_speculative_tokens": 8}'`. Its own options are `drafter`, `stopper`
    and `shared` in the section `draftproof` of `--additional-config`. Its drafts are point masses, so every rule takes
    them, and they may be cut after they were looked up.

    Args:
        vllm_config: vLLM's `VllmConfig`.

    Raises:
        UserError: an invalid option, or a stopper that needs the probabilities of a draft model.
    """

    def __init__(self, vllm_config: Any) -> None:
        options = PluginOptions.of(vllm_config)
        length = vllm_config.speculative_config.num_speculative_tokens
        self._longest = vllm_config.model_config.max_model_len
        self._vocab = vllm_config.model_config.get_vocab_size()
        self._drafter = _drafter(options, length)
        self._stopper = _stopper(options)
        self._rows: dict[str, _Row] = {}
        self._next = 0
        # End of the last proposal, its seconds, and the length of each row's draft.
        self._round: tuple[float, float, list[int]] | None = None
        name = self._drafter.name + ("" if self._stopper is None else f", stopper {self._stopper.name}")
        _log.info("draftproof drafts %d tokens at most by %s", length, name)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: there is no model."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,  # noqa: ARG002 - there is no cache
    ) -> list[list[int]]:
        """A draft for each request of the batch, empty for those that sampled nothing.

        Args:
            sampled_token_ids: what each request has emitted in this round; empty while its prompt is read.
            num_tokens_no_spec: the number of committed tokens of each request.
            token_ids_cpu: these tokens, [requests, longest].
            slot_mappings: not used.
        """
        now = current_round()
        if now is None:
            raise UserError(
                "draftproof's proposer needs draftproof's plug-in, which this process did not load: leave VLLM_PLUGINS "
                "unset, or name draftproof in it"
            )
        start = time.perf_counter()
        batch, running = now.runner.input_batch, now.runner.requests
        self._forget(running)
        rows: list[_Row | None] = []
        for place, emitted in enumerate(sampled_token_ids):
            name, count = batch.req_ids[place], int(num_tokens_no_spec[place])
            row = None
            if emitted and count < self._longest:
                row = self._row(name, int(batch.num_prompt_tokens[place]), running[name].sampling_params)
                row.follow(emitted, token_ids_cpu[place], count)
            rows.append(row)
        drafting = [row for row in rows if row is not None]
        self._learn(drafting, start, len(rows))
        made = self._draft(drafting)
        lengths = [len(draft) for draft in made] + [0] * (len(rows) - len(made))
        self._round = (time.perf_counter(), time.perf_counter() - start, lengths)
        drafts = iter(made)
        return [[] if row is None else next(drafts) for row in rows]

    def _draft(self, rows: Sequence[_Row]) -> list[list[int]]:
        if not rows:
            return []
        if self._stopper is not None:
            self._stopper.begin([row.id for row in rows])
        requests = []
        for row in rows:
            most = min(self._drafter.limit, self._longest - len(row.tokens) - 1)
            if self._stopper is not None:
                most = min(most, self._stopper.length(row.id))
            requests.append(DraftRequest(row.id, row.tokens, row.prompt_length, max(most, 0), row.transforms))
        seeds = [row.id for row in rows]  # lookups draw nothing, but the contract has a place for it
        found = self._drafter.propose(requests, CounterRoundRng(seeds, [len(row.tokens) for row in rows]))
        for row, draft in zip(rows, found, strict=True):
            row.drafted = len(draft)
        return [draft.tree.tokens.tolist() for draft in found]

    def _learn(self, rows: Sequence[_Row], start: float, size: int) -> None:
        """Tell drafter and stopper what became of the last drafts, and what the round cost that verified them."""
        parts: list[Drafter | Stopper] = [self._drafter]
        if self._stopper is not None:
            parts.append(self._stopper)
        for row in rows:
            for part in parts:
                part.observe(row.id, row.drafted, min(row.emitted - 1, row.drafted))
        if self._round is not None and self._round[2]:
            end, draft, lengths = self._round
            # A round in which requests came or ended, or a prompt was read, says nothing about the cost of decoding.
            same = len(lengths) == size == len(rows) and all(row.emitted and not row.fresh for row in rows)
            reads = 1 if same else self._longest
            for part in parts:
                part.spent(RoundTime(draft, start - end, size, max(lengths), sum(lengths) / len(lengths), reads))
        for row in rows:
            row.fresh = False

    def _row(self, name: str, prompt_length: int, params: Any) -> _Row:
        if name not in self._rows:
            self._rows[name] = _Row(self._next, prompt_length, _transforms(params, self._vocab))
            self._next += 1
        return self._rows[name]

    def _forget(self, running: Any) -> None:
        for name in self._rows.keys() - running.keys():
            row = self._rows.pop(name)
            self._drafter.release(row.id)
            if self._stopper is not None:
                self._stopper.release(row.id)


class _Row:
    """A request that is decoded: its committed tokens, and what its last draft and round were."""

    def __init__(self, number: int, prompt_length: int, transforms: Transforms) -> None:
        self.id = number
        self.prompt_length = prompt_length
        self.transforms = transforms
        self.tokens: list[int] = []
        self.drafted = self.emitted = 0
        self.fresh = True

    def follow(self, emitted: Sequence[int], stored: Any, count: int) -> None:
        """Take over what was committed; all of it anew where it does not follow what is known."""
        self.emitted = len(emitted)
        if len(self.tokens) + len(emitted) == count:
            self.tokens.extend(emitted)
        else:
            self.tokens[:] = stored[:count].tolist()


def _transforms(params: Any, vocab: int) -> Transforms:
    """What lookups read of a request's parameters: whether it samples with a seed."""
    return Transforms(SamplingParams(temperature=params.temperature, seed=params.seed), vocab)


def _drafter(options: PluginOptions, length: int) -> Drafter:
    if options.drafter == "ngram":
        return NgramDrafter(length)
    suffix = SuffixDrafter(length, shared=options.shared)
    return suffix if options.drafter == "suffix" else AutoDrafter([], suffix, DraftCosts())


def _stopper(options: PluginOptions) -> Stopper | None:
    return None if options.stopper is None else make_stopper(options.stopper)
