"""Where vLLM 0.32 is changed: each function here stands in for one of vLLM's, or is called around it.

Only workers are changed, and a worker only as far as its options ask. One change nobody has to ask for, a repair: on a
CPU vLLM 0.32's `expand_batch_to_tokens` returns memory that was never written, and top_k without a single draft ends
the engine.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from draftproof.accelerator import sent
from draftproof.integrations.vllm.options import Options
from draftproof.integrations.vllm.rules import NONE, GeneratorRng, matched_rows, verify_rows
from draftproof.rng import NoiseRng, Purpose, Rng

_log = logging.getLogger("vllm.draftproof")
_GREEDY = 1e-5  # vLLM's own limit of a temperature that means greedy

_ARGUMENTS, _WORKER = "vllm.engine.arg_utils", "vllm.v1.worker.worker_base"
_SAMPLER, _RUNNER = "vllm.v1.sample.rejection_sampler", "vllm.v1.worker.gpu_model_runner"
_DRAFTING = "vllm.v1.spec_decode.llm_base_proposer"
_SECOND, _NOISE = "vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu.sample.gumbel"
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
    _NOISE: {
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
                found = functools.reduce(getattr, name.split("."), importlib.import_module(module))
            except (ImportError, AttributeError):
                return f"{module}.{name}"
            if arguments is not None and list(inspect.signature(found).parameters) != arguments.split():
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
        Options.of(config)
        return config

    def init_device(original: Callable[..., Any], self: Any) -> None:
        change(self.vllm_config)  # before the model runner is made; a process of a worker loads plug-ins just before
        original(self)

    _around(arguments, "create_engine_config", create_engine_config)
    _around(worker, "init_device", init_device)


def change(vllm_config: Any) -> None:
    """Change the model runner of a worker, before it is made."""
    second = vllm_config.use_v2_model_runner
    if lacks := missing(*(_SECOND_SEAMS if second else (_SAMPLER, _DRAFTING, _RUNNER))):
        _unknown(lacks)
        return
    if second:
        _around(importlib.import_module(_SECOND).GPUModelRunner, "load_model", _load_second)
        return
    sampler, runner = importlib.import_module(_SAMPLER), importlib.import_module(_RUNNER).GPUModelRunner
    if importlib.import_module("vllm.platforms").current_platform.is_cpu():
        _around(sampler, "expand_batch_to_tokens", _expand)
        _around(sampler, "apply_sampling_constraints", _constrain)
    _around(sampler, "rejection_sample", _rejection_sample)
    _around(importlib.import_module(_DRAFTING), "compute_probs_and_sample_next_token", _draw_draft)
    _around(runner, "__init__", _init_runner)
    _around(runner, "_sample", _sample)
    _around(runner, "propose_draft_token_ids", _propose)


def _unknown(seam: str) -> None:
    _log.warning("draftproof finds no %s in this vLLM: it changes nothing", seam)


def _around(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Call `function` in the place of an attribute, with what stood there as its first argument; only once."""
    original = getattr(owner, name)
    if hasattr(original, _DONE):
        return
    changed = functools.wraps(original)(functools.partial(function, original))
    made = _as_method(changed) if inspect.isclass(owner) else changed
    setattr(made, _DONE, True)
    setattr(owner, name, made)


def _as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return method


# --- the repair on a CPU ----------------------------------------------------------------------------------------------


def _expand(
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


def _constrain(original: Callable[..., Tensor], logits: Tensor, cu_num_draft_tokens: Tensor, metadata: Any) -> Tensor:
    """Nothing to constrain where no request of the batch has a draft; vLLM's own top_k fails on empty rows."""
    return original(logits, cu_num_draft_tokens, metadata) if logits.shape[0] else logits


# --- the first model runner -------------------------------------------------------------------------------------------


@dataclass
class Round:
    """What is known of the round in which a function of vLLM is called.

    Attributes:
        runner: the model runner.
        metadata: vLLM's data on the drafts of the round; None without speculative decoding, and while drafting.
        drawn: while drafting, the number of tokens that a draft model has drawn for each request.
    """

    runner: Any
    metadata: Any = None
    drawn: int = 0

    @property
    def rule(self) -> str | None:
        """The rule that the options name, or None."""
        found: str | None = self.runner.draftproof_rule
        return found

    def noise(self, *, last: bool = False) -> tuple[list[int], list[int]]:
        """For each request the seed and place of the noise of its first row of logits, or of its last one.

        A place is the number of the output token that the row is for.
        """
        runner, batch = self.runner, self.runner.input_batch
        size = batch.num_reqs
        rows = runner.query_start_loc.gpu[1 : size + 1].long() - 1
        if not last and self.metadata is not None:
            rows = rows - sent(self.metadata.num_draft_tokens, rows.device, torch.int64)
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


@contextmanager
def _in(current: Round) -> Iterator[None]:
    token = _round.set(current)
    try:
        yield
    finally:
        _round.reset(token)


def current_round() -> Round | None:
    """The round in which this is called; None outside of a changed model runner."""
    return _round.get()


def _init_runner(original: Callable[..., None], self: Any, vllm_config: Any, device: torch.device) -> None:
    original(self, vllm_config, device)
    self.draftproof_rule = rule = Options.of(vllm_config).rule
    self.draftproof_seeds, self.draftproof_next = {}, None
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.rejection_sample_method == "block":
        # vLLM's drafters keep their probabilities for its own rule only; without them a block gains nothing.
        drafter = getattr(self, "drafter", None)
        if hasattr(drafter, "_enable_probabilistic_draft_probs"):
            drafter._enable_probabilistic_draft_probs = speculative.draft_sample_method == "probabilistic"  # noqa: SLF001
    if rule == "gumbel":
        self.sampler.topk_topp_sampler = NoiseSampler(self.sampler.topk_topp_sampler)
    _log.info("draftproof verifies drafts by %s", "vLLM's own rule" if rule is None else f"the rule {rule}")


def _sample(original: Callable[..., Any], self: Any, logits: Tensor, spec_decode_metadata: Any) -> Any:
    now = Round(self, spec_decode_metadata)
    with _in(now):
        found = original(self, logits, spec_decode_metadata)
        if now.rule == "gumbel" and spec_decode_metadata is not None:
            seeds, places = now.noise()
            sampled = (found.sampled_token_ids != NONE).sum(-1).tolist()
            self.draftproof_next = seeds, [place + more for place, more in zip(places, sampled, strict=True)]
    return found


def _propose(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    with _in(Round(self)):
        return original(self, *args, **kwargs)


def _draw_draft(
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


def _rejection_sample(
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
    """vLLM's sampler of a token after top_k and top_p, with noise that is keyed by the request's seed and place.

    Args:
        original: vLLM's own, used outside of rounds.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.original = original

    def forward(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See vLLM's `TopKTopPSampler`."""
        now = _round.get()
        if now is None:
            found: tuple[Tensor, Tensor | None] = self.original(logits, generators, k, p)
            return found
        ops = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")
        kept = ops.apply_top_k_top_p(logits, k, p)
        shown = {"processed_logits": lambda: kept, "processed_logprobs": lambda: kept.log_softmax(-1, torch.float32)}
        returned = shown.get(self.original.logprobs_mode, lambda: None)()
        rng = NoiseRng(*now.noise(last=True), Purpose.VERIFY)
        return rng.categorical(kept.softmax(-1, dtype=torch.float32)), returned


# --- the second model runner ------------------------------------------------------------------------------------------


def _load_second(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """The second runner has token and block verification, and its plain sampler is keyed by seed and place already."""
    original(self, *args, **kwargs)
    rule, verifier = Options.of(self.vllm_config).rule, self.rejection_sampler
    if rule is None or verifier is None:
        return
    if rule == "gumbel":
        verifier._verify = functools.partial(_verify_second, verifier)  # noqa: SLF001
    else:
        verifier.use_block_verification = rule == "block"
    _log.info("draftproof verifies drafts by the rule %s", rule if rule == "gumbel" else f"{rule} of vLLM itself")


def _verify_second(
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
    """`RejectionSampler._verify` by the rule `gumbel`: what plain decoding draws at each place, while drafts equal it."""
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
    drawn = importlib.import_module(_NOISE).gumbel_sample(
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
