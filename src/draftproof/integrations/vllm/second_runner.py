"""vLLM 0.32's second model runner with our rules; it was not run here, as it needs a GPU.

It has token and block verification of its own, which the options choose. What it lacks is `gumbel`. Its plain sampler
draws with noise that is keyed by a request's seed and place already, so the rule draws by this sampler too.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from draftproof.integrations.vllm.options import PluginOptions
from draftproof.integrations.vllm.rules import matched_rows

_log = logging.getLogger("vllm.draftproof")
NOISE = "vllm.v1.worker.gpu.sample.gumbel"


def load_model(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """The second runner has token and block verification, and its plain sampler is keyed by seed and place already."""
    original(self, *args, **kwargs)
    rule, verifier = PluginOptions.of(self.vllm_config).rule, self.rejection_sampler
    if rule is None or verifier is None:
        return
    if rule == "gumbel":
        verifier._verify = functools.partial(verify, verifier)  # noqa: SLF001
    else:
        verifier.use_block_verification = rule == "block"
    _log.info("draftproof verifies drafts by the rule %s", rule if rule == "gumbel" else f"{rule} of vLLM itself")


def verify(
    verifier: Any,
    logits: Tensor,
    draft_logits: Tensor | None,  # noqa: ARG001 - a match needs no probabilities
    draft_sampled: Tensor,
    pos: Tensor,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    idx_mapping_np: Any,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    seq_lens_upper_bound_np: Any,
    verify_draft_sampled: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """`RejectionSampler._verify` by the rule `gumbel`: plain decoding's draws, as long as the draft equals them."""
    states = verifier.sampler.sampling_states
    processed = verifier.sampler.apply_sampling_params(
        logits,
        expanded_idx_mapping,
        idx_mapping,
        idx_mapping_np,
        pos,
        draft_sampled,
        expanded_local_pos,
        seq_lens_upper_bound_np,
    )
    drawn = importlib.import_module(NOISE).gumbel_sample(
        processed,
        expanded_idx_mapping,
        states.temperature.gpu,
        states.seeds.gpu,
        pos,
        apply_temperature=False,
        is_drafting=False,
        use_fp64=verifier.sampler.use_fp64_gumbel,
    )
    found, number = matched_rows(drawn, verify_draft_sampled, cu_num_logits, verifier.num_speculative_steps + 1)
    return processed, found, number
