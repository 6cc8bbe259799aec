"""transformers' own generators of drafts, run by `generate` on tiny random models: exact distributions of its output.

Every outcome of every draw is tried, those of drafts, of verification and of tokens. So there are no false alarms, and
the distance is exact but for the rounding of logits to float32, which `generate` does itself. Greedy texts are held
against a forward pass of the target over the whole text, without a cache.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.audit.check import ROUNDED, CheckLine
from draftproof.audit.distributions import Distribution, WorstOutcome, worst_cell
from draftproof.rng import Rng
from draftproof.testing import EnumeratingRng, exact_distribution, total_variation


class _Uniforms:
    """In place of a tensor of uniforms that is only compared: each comparison is a draw of our Rng."""

    def __init__(self, rng: Rng) -> None:
        self._rng = rng

    def __le__(self, prob: Tensor) -> Tensor:
        return self._rng.bernoulli(prob.clamp(max=1))

    __lt__ = __le__


@contextmanager
def patched(owner: Any, **values: Any) -> Iterator[None]:
    """Replace attributes of a module or a class within the block."""
    before = {name: vars(owner)[name] for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def enumerated_draws(rng: Rng) -> AbstractContextManager[None]:
    """Within the block torch's draws of one token, and uniforms that are only compared, come from an Rng."""

    def multinomial(weights: Tensor, num_samples: int = 1, **_: Any) -> Tensor:
        assert num_samples == 1, f"{num_samples} draws per row: only one can be enumerated"
        return rng.categorical(weights).unsqueeze(-1)

    return patched(torch, rand_like=lambda *_, **__: _Uniforms(rng), multinomial=multinomial)


VOCAB = 3
PROMPT = (0, 1, 2, 2, 1)
DRAFTED = 2  # tokens of a draft
GREEDY = 24  # tokens of a greedy text: many rounds, beyond the sliding windows
NEAR = 1e-3  # a greedy token may have a logit lower by this than the largest one: several passes round differently
WINDOW = 4
_NO_TOKENS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
_SHAPE = {
    "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 64,
}  # fmt: skip
TINY: dict[str, Any] = {"vocab_size": VOCAB, **_SHAPE, **_NO_TOKENS}
MODULE = "transformers.generation.candidate_generator"


NOTE = (
    "exact, by enumeration of every draw of `generate` on tiny random models, so there are no false alarms; greedy "
    "texts are held against one pass of the target over the whole text"
)


class Subject(NamedTuple):
    """A target in float64, and its `generate` with a generator of drafts."""

    target: Any
    generate: Callable[..., Tensor]


def _filled(model: Any, seed: int, scale: float = 0.3) -> Any:
    """A model in float64 with random matrices; everything else is 1, so that its initialisation does not matter."""
    source = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    for weight in model.parameters():
        made = torch.randn(weight.shape, generator=source, dtype=torch.float64) * scale
        weight.data = made if weight.dim() > 1 else torch.ones_like(made)
    return model


def _causal(kind: str, seed: int, **fields: Any) -> Any:
    transformers: Any = importlib.import_module("transformers")
    with torch.random.fork_rng():
        config = transformers.AutoConfig.for_model(kind, **{**TINY, **fields})
        made = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    return _filled(made, seed)


def _llama(seed: int = 1, layers: int = 2) -> Any:
    return _causal("llama", seed, num_hidden_layers=layers)


def _with_draft() -> Subject:
    target, draft = _llama(), _llama(2, 1)
    draft.generation_config.num_assistant_tokens = DRAFTED
    draft.generation_config.num_assistant_tokens_schedule = "constant"  # no number is kept from call to call
    draft.generation_config.assistant_confidence_threshold = 0.3  # it ends some drafts after their first token
    return Subject(target, lambda *ids, **given: target.generate(*ids, assistant_model=draft, **given))


def _with_lookup() -> Subject:
    target = _llama()
    return Subject(target, lambda *ids, **given: target.generate(*ids, prompt_lookup_num_tokens=DRAFTED, **given))


def _with_early_exit() -> Subject:
    target = _llama()
    target.generation_config.num_assistant_tokens = DRAFTED
    target.generation_config.num_assistant_tokens_schedule = "constant"
    return Subject(target, lambda *ids, **given: target.generate(*ids, assistant_early_exit=1, **given))


def _with_mtp() -> Subject:
    """A mixture with two prediction layers, which are random instead of read from its checkpoint."""
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
    target = _causal(
        "glm4_moe", 3, **experts, num_hidden_layers=2, moe_intermediate_size=8, num_mtp_layers=DRAFTED,
        first_k_dense_replace=2,
    )  # fmt: skip
    layers: Any = importlib.import_module("transformers.modeling_layers").MtpModel
    mtp = _filled(layers(target, DRAFTED), 4)
    _filled(target, 3)  # they share embeddings

    def generate(*ids: Tensor, **given: Any) -> Tensor:
        with patched(layers, from_pretrained=staticmethod(lambda *_, **__: mtp)):
            found: Tensor = target.generate(*ids, use_mtp=True, **given)
        return found

    return Subject(target, generate)


def _with_dflash() -> Subject:
    transformers: Any = importlib.import_module("transformers")
    target = _llama()
    config = transformers.AutoConfig.for_model(
        "muse_glimmer_assistant", **_SHAPE, num_hidden_layers=1, sliding_window=WINDOW, block_size=DRAFTED + 1,
        mask_token_id=0, target_layer_ids=[0, 1],
    )  # fmt: skip
    with torch.random.fork_rng():
        draft = _filled(transformers.AutoModel.from_config(config), 5)
    given = {"assistant_model": draft, "speculation_type": "dflash"}
    return Subject(target, lambda *ids, **more: target.generate(*ids, **given, **more))


def _with_assistant() -> Subject:
    """A Gemma 4 with a layer of each kind, and an assistant that reads the keys of both."""
    transformers: Any = importlib.import_module("transformers")
    shape = {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": WINDOW,
        "global_head_dim": TINY["head_dim"],
        "enable_moe_block": False,
    }
    target = _causal(
        "gemma4_text", 6, **shape, hidden_size_per_layer_input=4, vocab_size_per_layer_input=VOCAB,
        num_kv_shared_layers=0,
    )  # fmt: skip
    text = transformers.Gemma4TextConfig(
        **TINY, **shape, hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, num_kv_shared_layers=2
    )
    config = transformers.Gemma4AssistantConfig(text_config=text.to_dict(), backbone_hidden_size=TINY["hidden_size"])
    with torch.random.fork_rng():
        draft = _filled(transformers.Gemma4AssistantForCausalLM(config), 7)
    draft.generation_config.num_assistant_tokens = DRAFTED
    return Subject(target, lambda *ids, **given: target.generate(*ids, assistant_model=draft, **given))


class Generator(NamedTuple):
    """A generator of drafts: its class, models for it, and so many tokens that drafts of two are verified."""

    rule: str
    make: Callable[[], Subject]
    length: int = 3


ALL = {
    "assisted": Generator("AssistedCandidateGenerator", _with_draft),
    "prompt lookup": Generator("PromptLookupCandidateGenerator", _with_lookup),
    "early exit": Generator("EarlyExitCandidateGenerator", _with_early_exit),
    "prediction layers": Generator("MTPCandidateGenerator", _with_mtp),
    "DFlash": Generator("DFlashTokenCandidateGenerator", _with_dflash),
    "Gemma 4 assistant": Generator("SinglePositionMultiTokenCandidateGenerator", _with_assistant, 4),
}


def load(generator: Generator) -> Subject:
    """The models of a generator, which this version of transformers must have, after a trial in which it must draft."""
    if not hasattr(importlib.import_module(MODULE), generator.rule):
        raise ImportError("it is not in this version")
    subject, widths = generator.make(), set[int]()
    hook = subject.target.register_forward_pre_hook(
        lambda _, __, given: widths.add(given["input_ids"].shape[1]), with_kwargs=True
    )
    _text(subject, PROMPT, GREEDY, do_sample=False)
    hook.remove()
    if DRAFTED + 1 not in widths:
        raise RuntimeError(f"no draft of {DRAFTED} tokens was verified")
    return subject


def audit(subject: Subject, length: int, *, full: bool = False) -> list[CheckLine]:
    """The output against the target's, at temperature 1 and greedy, with `full` also at temperature 0.5."""
    return [
        *(_sampled(subject, length, temperature) for temperature in ((1.0, 0.5) if full else (1.0,))),
        _greedy(subject),
    ]


def in_words(line: CheckLine) -> str:
    """A sentence on a line that failed."""
    if line.method == "comparison":
        return f"lossy when greedy: {line.total_variation:.0%} of the texts have a token that is not the likeliest one"
    return f"lossy at {line.model}: total variation {line.total_variation:.3f}"


def _text(subject: Subject, prompt: tuple[int, ...], length: int, **given: Any) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": length, "min_new_tokens": length, **given}
    return tuple(subject.generate(ids, **options)[0, len(prompt) :].tolist())


@torch.no_grad()
def _logits(subject: Subject, prompt: tuple[int, ...], text: tuple[int, ...]) -> Float[Tensor, "length vocab"]:
    """The target's logits before each token of a text, from one pass over all of it."""
    found: Tensor = subject.target(torch.tensor([(*prompt, *text)]), use_cache=False).logits
    return found[0, len(prompt) - 1 : -1]


def _sampled(subject: Subject, length: int, temperature: float) -> CheckLine:
    def program(rng: EnumeratingRng) -> tuple[int, ...]:
        with enumerated_draws(rng):
            return _text(subject, PROMPT, length, do_sample=True, temperature=temperature, top_k=0)

    expected: Distribution = {}
    for text in itertools.product(range(VOCAB), repeat=length):
        rows = (_logits(subject, PROMPT, text) / temperature).softmax(-1)
        expected[text] = float(rows[range(length), text].prod())
    found = exact_distribution(program)
    distance = total_variation(found, expected)
    return _line(f"temperature {temperature:g}", "enumeration", distance, worst_cell(found, expected))


def _greedy(subject: Subject) -> CheckLine:
    """Greedy texts after all prompts of two tokens: the share of them in which a token is not a likeliest one."""
    prompts = [(*PROMPT, *more) for more in itertools.product(range(VOCAB), repeat=2)]
    wrong, example = 0, WorstOutcome((), 1.0, 1.0)
    for prompt in prompts:
        text = _text(subject, prompt, GREEDY, do_sample=False)
        logits = _logits(subject, prompt, text)
        short = logits.amax(-1) - logits[range(GREEDY), text] > NEAR
        if short.any():
            wrong += 1
            example = WorstOutcome(text[: int(short.int().argmax()) + 1], 0.0, 1.0)
    return _line("greedy", "comparison", wrong / len(prompts), example)


def _line(model: str, method: str, distance: float, worst: WorstOutcome) -> CheckLine:
    return CheckLine(
        model=model,
        drafts=f"1x{DRAFTED}",
        method=method,
        total_variation=distance,
        worst_cell=worst,
        failures={},
        verdict="ok" if distance < ROUNDED else "FAIL",
    )
