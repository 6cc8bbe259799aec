"""vLLM 0.32's first model runner with our rules: what stands in for its functions, and what is repaired on a CPU.

Each function here gets vLLM's own as its first argument, `original`; see `draftproof.integrations.vllm.seams`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from typing_extensions import override

from draftproof.accelerator import to_device
from draftproof.backends.cache.passes import during
from draftproof.integrations.vllm.options import PluginOptions
from draftproof.integrations.vllm.rules import NONE, GeneratorRng, verify_rows
from draftproof.rng import NoiseRng, Purpose, Rng

_log = logging.getLogger("vllm.draftproof")
_GREEDY = 1e-5  # vLLM's own limit of a temperature that means greedy


# --- the repair on a CPU ----------------------------------------------------------------------------------------------


def expand(
    original: Callable[..., Tensor],  # noqa: ARG001
    x: Tensor,
    cu_num_tokens: Tensor,
    num_tokens: int,
    replace_from: float = 0,
    replace_to: float = 0,
) -> Tensor:
    """Each request's value once for each of its drafted tokens."""
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
    return torch.repeat_interleave(values, counts, output_size=num_tokens)


def constrain(original: Callable[..., Tensor], logits: Tensor, cu_num_draft_tokens: Tensor, metadata: Any) -> Tensor:
    """Nothing to constrain where no request of the batch has a draft; vLLM's own top_k fails on empty rows."""
    return original(logits, cu_num_draft_tokens, metadata) if logits.shape[0] else logits


@dataclass
class Round:
    """What is known of the round in which a function of vLLM is called."""

    runner: Any  # the model runner
    # VLLM's data on the drafts of the round; None without speculative decoding, and while drafting.
    metadata: Any = None
    drawn: int = 0  # while drafting, the number of tokens that a draft model has drawn for each request

    @property
    def rule(self) -> str | None:
        """The rule that the options name, or None."""
        found: str | None = getattr(self.runner, "draftproof_rule", None)  # none where it was made before the change
        return found

    def noise(self, *, last: bool = False) -> tuple[list[int], list[int]]:
        """For each request the seed and place of the noise of its first row of logits, or of its last one.

        A place is the number of the output token that the row is for.
        """
        runner, batch = self.runner, self.runner.input_batch
        size = batch.num_reqs
        rows = runner.query_start_loc.gpu[1 : size + 1].long() - 1
        if not last and self.metadata is not None:
            rows = rows - to_device(self.metadata.num_draft_tokens, rows.device, torch.int64)
        read, prompts = runner.positions[rows].tolist(), batch.num_prompt_tokens[:size].tolist()
        return self._seeds(), [place + 1 - prompt for place, prompt in zip(read, prompts, strict=True)]

    def _seeds(self) -> list[int]:
        """A request without a seed gets one, by torch's global generator: all ranks of a group get the same one."""
        batch, kept = self.runner.input_batch, self.runner.draftproof_seeds
        for name in kept.keys() - self.runner.requests.keys():
            del kept[name]
        found = []
        for row, name in enumerate(batch.req_ids):
            generator = batch.generators.get(row)
            if generator is None and name not in kept:
                kept[name] = int(torch.randint(1 << 62, ()))
            found.append(kept[name] if generator is None else generator.initial_seed())
        return found


_round: ContextVar[Round | None] = ContextVar("draftproof_round", default=None)


within = partial(during, _round)  # makes a round the one that `current_round` returns


def current_round() -> Round | None:
    """The round in which this is called; None outside of a changed model runner."""
    return _round.get()


def init_runner(original: Callable[..., None], self: Any, vllm_config: Any, device: torch.device) -> None:
    """Read options; let vLLM's drafters keep their probabilities for a block; for `gumbel`, draw with keyed noise."""
    original(self, vllm_config, device)
    self.draftproof_rule = rule = PluginOptions.of(vllm_config).rule
    self.draftproof_seeds = {}
    self.draftproof_next = None
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.rejection_sample_method == "block":
        # vLLM's drafters keep their probabilities for its own rule only; without them a block gains nothing.
        drafter: Any = getattr(self, "drafter", None)
        if hasattr(drafter, "_enable_probabilistic_draft_probs"):
            drafter._enable_probabilistic_draft_probs = speculative.draft_sample_method == "probabilistic"  # noqa: SLF001
    if rule == "gumbel":
        self.sampler.topk_topp_sampler = NoiseSampler(self.sampler.topk_topp_sampler)
    _log.info("draftproof verifies drafts by %s", "vLLM's own rule" if rule is None else f"the rule {rule}")


def sample(original: Callable[..., Any], self: Any, logits: Tensor, spec_decode_metadata: Any) -> Any:
    """A round's draws and verification; for `gumbel`, note the places that the next drafts are for."""
    now = Round(self, spec_decode_metadata)
    with within(now):
        found = original(self, logits, spec_decode_metadata)
        if now.rule == "gumbel" and spec_decode_metadata is not None:
            seeds, places = now.noise()
            sampled = (found.sampled_token_ids != NONE).sum(-1).tolist()
            self.draftproof_next = seeds, [place + more for place, more in zip(places, sampled, strict=True)]
    return found


def propose(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """The round's drafts."""
    with within(Round(self)):
        return original(self, *args, **kwargs)


def draw_draft(
    original: Callable[..., tuple[Tensor, Tensor]], logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """vLLM's `compute_probs_and_sample_next_token`, for the rule `gumbel` with the noise of the place."""
    now = _round.get()
    known = None if now is None or now.rule != "gumbel" else now.runner.draftproof_next
    if now is None or known is None or sampling_metadata.all_greedy or len(known[0]) != logits.shape[0]:
        return original(logits, sampling_metadata, *args, **kwargs)
    seeds, places = known
    temperature = sampling_metadata.temperature
    greedy = temperature < _GREEDY
    q = (logits / torch.where(greedy, 1.0, temperature).unsqueeze(-1)).softmax(-1, dtype=torch.float32)
    drawn = NoiseRng(seeds, [place + now.drawn for place in places], Purpose.DRAFT).categorical(q)
    now.drawn += 1
    return torch.where(greedy, q.argmax(-1), drawn), q


def rejection_sample(
    original: Callable[..., Tensor],
    draft_token_ids: Int[Tensor, " drafted"],
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: Int[Tensor, " requests"],
    draft_probs: Float[Tensor, "drafted vocab"] | None,
    target_logits: Float[Tensor, "drafted vocab"],
    bonus_token_ids: Int[Tensor, "requests 1"],
    sampling_metadata: Any,
    synthetic_mode: bool = False,
    synthetic_conditional_rates: Tensor | None = None,
    use_fp64_gumbel: bool = False,
) -> Int[Tensor, "requests width"]:
    """vLLM's function of this name, by the rule of the round; vLLM's own where there is none or all are greedy."""
    now = _round.get()
    rule = None if now is None else now.rule
    if now is None or rule is None or synthetic_mode or sampling_metadata.all_greedy:
        return original(
            draft_token_ids,
            num_draft_tokens,
            max_spec_len,
            cu_num_draft_tokens,
            draft_probs,
            target_logits,
            bonus_token_ids,
            sampling_metadata,
            synthetic_mode,
            synthetic_conditional_rates,
            use_fp64_gumbel,
        )
    counts, generators = list(num_draft_tokens), sampling_metadata.generators
    found = verify_rows(
        rule,
        draft_token_ids,
        counts,
        draft_probs,
        target_logits.softmax(-1, dtype=torch.float32),
        bonus_token_ids.flatten(),
        rng=_noise(*now.noise()) if rule == "gumbel" else _draws(generators, counts),
        greedy=None if sampling_metadata.all_random else sampling_metadata.temperature < _GREEDY,
    )
    return found.to(torch.int32)


def _draws(generators: dict[int, torch.Generator], counts: Sequence[int]) -> Callable[[slice], Rng]:
    def of(part: slice) -> Rng:
        own = {row - part.start: each for row, each in generators.items() if part.start <= row < part.stop}
        return GeneratorRng(own, counts[part])

    return of


def _noise(seeds: Sequence[int], places: Sequence[int]) -> Callable[[slice], Rng]:
    return lambda part: NoiseRng(seeds[part], places[part], Purpose.VERIFY)


class NoiseSampler(nn.Module):
    """vLLM's sampler of a token after top_k and top_p, in rounds with noise keyed by the request's seed and place."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.original: Any = original

    @override
    def forward(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        now = _round.get()
        if now is None:
            found: tuple[Tensor, Tensor | None] = self.original(logits, generators, k, p)
            return found
        ops = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")
        kept = ops.apply_top_k_top_p(logits, k, p)
        mode, returned = self.original.logprobs_mode, None
        if mode in ("processed_logits", "processed_logprobs"):
            returned = kept if mode == "processed_logits" else kept.log_softmax(-1, dtype=torch.float32)
        for generator in generators.values():  # vLLM takes one draw back where a prompt is read in chunks
            torch.rand(1, generator=generator, device=generator.device)
        rng = NoiseRng(*now.noise(last=True), Purpose.VERIFY)
        return rng.categorical(kept.softmax(-1, dtype=torch.float32)), returned
