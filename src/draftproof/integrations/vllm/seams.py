"""Where vLLM 0.32 is changed, and the check that it is the vLLM that is known.

Only workers are changed, and a worker only as far as its options ask. One change nobody has to ask for, a repair: on a
CPU vLLM 0.32's `expand_batch_to_tokens` returns memory that was never written, and top_k without a single draft ends
the engine.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

from draftproof.integrations.vllm import runner, second_runner
from draftproof.integrations.vllm.options import PluginOptions

_log = logging.getLogger("vllm.draftproof")

_ARGUMENTS, _WORKER = "vllm.engine.arg_utils", "vllm.v1.worker.worker_base"
_SAMPLER, _RUNNER = "vllm.v1.sample.rejection_sampler", "vllm.v1.worker.gpu_model_runner"
_DRAFTING = "vllm.v1.spec_decode.llm_base_proposer"
_SECOND = "vllm.v1.worker.gpu.model_runner"
_DONE = "_draftproof"  # marks what was changed, as a process may hold several engines

# What is changed, with the arguments that it must have.
_SEAMS: dict[str, dict[str, str | None]] = {
    _ARGUMENTS: {"EngineArgs.create_engine_config": "self usage_context headless"},
    _WORKER: {"WorkerWrapperBase.init_device": "self"},
    _SAMPLER: {
        "rejection_sample": "draft_token_ids num_draft_tokens max_spec_len cu_num_draft_tokens draft_probs "
        "target_logits bonus_token_ids sampling_metadata synthetic_mode synthetic_conditional_rates use_fp64_gumbel",
        "apply_sampling_constraints": "logits cu_num_draft_tokens sampling_metadata",
        "expand_batch_to_tokens": "x cu_num_tokens num_tokens replace_from replace_to",
    },
    _DRAFTING: {"compute_probs_and_sample_next_token": "logits sampling_metadata use_fp64_gumbel"},
    _RUNNER: {
        "GPUModelRunner.__init__": "self vllm_config device",
        "GPUModelRunner._sample": "self logits spec_decode_metadata",
        "GPUModelRunner.propose_draft_token_ids": "self scheduler_output sampled_token_ids sampling_metadata "
        "hidden_states sample_hidden_states aux_hidden_states spec_decode_metadata common_attn_metadata slot_mappings",
    },
}
_SECOND_SEAMS: dict[str, dict[str, str | None]] = {
    _SECOND: {"GPUModelRunner.load_model": None},
    second_runner.NOISE: {
        "gumbel_sample": "logits expanded_idx_mapping temperature seed pos apply_temperature is_drafting logits_cache "
        "logits_cache_col use_fp64 logits_cache_source"
    },
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler": {
        "RejectionSampler._verify": "self logits draft_logits draft_sampled pos cu_num_logits idx_mapping "
        "idx_mapping_np expanded_idx_mapping expanded_local_pos seq_lens_upper_bound_np verify_draft_sampled"
    },
}


def missing(*modules: str) -> str:
    """The first seam that this vLLM does not have as it is known; empty where all are there."""
    for module, names in (_SEAMS | _SECOND_SEAMS).items():
        if module not in modules:
            continue
        for name, arguments in names.items():
            try:
                found: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
                parameters = list(inspect.signature(found).parameters)
            except Exception:  # noqa: BLE001 - whatever another vLLM does, its start goes on without us
                return f"{module}.{name}"
            if arguments is not None and parameters != arguments.split():
                return f"{module}.{name}({', '.join(arguments.split())})"
    return ""


def prepare() -> None:
    """In each process: check the options before an engine starts, and change workers when they are made."""
    if lacks := missing(_ARGUMENTS, _WORKER):
        _unknown(lacks)
        return
    arguments = importlib.import_module(_ARGUMENTS).EngineArgs
    worker = importlib.import_module(_WORKER).WorkerWrapperBase

    def create_engine_config(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        config = original(*args, **kwargs)
        PluginOptions.of(config)
        return config

    def init_device(original: Callable[..., Any], self: Any) -> None:
        change(self.vllm_config)  # before the model runner is made; a process of a worker loads plug-ins just before
        original(self)

    _around(arguments, "create_engine_config", create_engine_config)
    _around(worker, "init_device", init_device)


def change(vllm_config: Any) -> None:
    """Change the model runner of a worker, before it is made, as far as its options ask."""
    try:
        rule, proposes = PluginOptions.of(vllm_config).rule, _proposes(vllm_config)
        second = vllm_config.use_v2_model_runner
    except AttributeError as error:  # another vLLM, which does not fail for a plug-in
        _unknown(str(error))
        return
    if lacks := missing(*(_SECOND_SEAMS if second else (_SAMPLER, _DRAFTING, _RUNNER))):
        _unknown(lacks)
        return
    if second:
        if rule is not None:
            _around(importlib.import_module(_SECOND).GPUModelRunner, "load_model", second_runner.load_model)
        return
    sampler, model_runner = importlib.import_module(_SAMPLER), importlib.import_module(_RUNNER).GPUModelRunner
    if importlib.import_module("vllm.platforms").current_platform.is_cpu():
        _around(sampler, "expand_batch_to_tokens", runner.expand)
        _around(sampler, "apply_sampling_constraints", runner.constrain)
    if rule is None and not proposes:
        return
    _around(model_runner, "__init__", runner.init_runner)
    _around(model_runner, "propose_draft_token_ids", runner.propose)
    if rule is not None:
        _around(sampler, "rejection_sample", runner.rejection_sample)
        _around(importlib.import_module(_DRAFTING), "compute_probs_and_sample_next_token", runner.draw_draft)
        _around(model_runner, "_sample", runner.sample)


def _proposes(vllm_config: Any) -> bool:
    speculative = vllm_config.speculative_config
    return speculative is not None and str(getattr(speculative, "model", "")).startswith("draftproof.")


def _unknown(seam: str) -> None:
    _log.warning("draftproof finds no %s in this vLLM: it changes nothing", seam)


def _around(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Call `function` in the place of an attribute, with what stood there as its first argument; only once."""
    original = getattr(owner, name)
    if hasattr(original, _DONE):
        return

    @functools.wraps(original)
    def changed(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    setattr(changed, _DONE, True)
    setattr(owner, name, changed)
