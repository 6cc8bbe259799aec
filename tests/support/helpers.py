"""What several test files share: tiny models of many architectures, the embedded pair, plain forward passes."""

import functools
import itertools

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftproof import Engine, SamplingParams
from draftproof.backends.hf.backend import HFBackend
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.model import ModelDrafter
from draftproof.embedded import draft_dir, target_dir
from draftproof.engine.verifier_parts import make_verifier
from draftproof.stoppers.fixed import FixedLength
from draftproof.testing import engine_distribution, total_variation
from type_checks import checks_off

VOCAB = 97
# Weights large enough that a wrong mask or position changes the logits visibly; untrained models are nearly uniform.
COMMON = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
RANGE = {"initializer_range": 0.3}
ROPE = {**COMMON, **RANGE, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 640}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**ROPE),
    "qwen2": lambda: transformers.Qwen2Config(**ROPE),
    "qwen3": lambda: transformers.Qwen3Config(**ROPE, head_dim=16),
    "mistral": lambda: transformers.MistralConfig(**ROPE, sliding_window=7),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **ROPE,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gpt2": lambda: transformers.GPT2Config(**COMMON, **RANGE, n_positions=640),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(
        **COMMON, **RANGE, intermediate_size=48, max_position_embeddings=640
    ),
    "opt": lambda: transformers.OPTConfig(
        **COMMON, init_std=0.3, ffn_dim=48, max_position_embeddings=640, word_embed_proj_dim=32
    ),
}


def random_model(config, seed=0, dtype=torch.float32):
    """An untrained causal LM with this config, always the same one."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@functools.cache
def backend(name):
    """A probed float32 backend: "target" or "draft" of the embedded pair, or a random tiny model by architecture."""
    model = embedded_model(name) if name in ("target", "draft") else random_model(CONFIGS[name]())
    return HFBackend(model, name=name)


@functools.cache
def embedded_model(name):
    """A transformers model of the embedded pair."""
    return AutoModelForCausalLM.from_pretrained(target_dir() if name == "target" else draft_dir(), dtype=torch.float32)


@functools.cache
def tokenizer():
    """The embedded pair's tokenizer."""
    return AutoTokenizer.from_pretrained(target_dir())


def engine(target="target", draft="draft", verifier="block", length=4, **options):
    """An engine over the embedded pair; names or backends; draft=None decodes plainly."""
    main = backend(target) if isinstance(target, str) else target
    small = backend(draft) if isinstance(draft, str) else draft
    drafter = None
    if small is not None:
        drafter = ModelDrafter(DraftModel(small, vocab_size=main.vocab_size), FixedLength(length))
    options = {"tokenizer": tokenizer(), "eos_token_ids": (1, 2), **options}
    return Engine(main, drafter, make_verifier(verifier), **options)


@torch.inference_mode()
def plain_rows(model, sequences):
    """Logits and last hidden state after each token sequence, from one cache-free forward pass padded on the right."""
    width = max(len(tokens) for tokens in sequences)
    ids = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens in sequences])
    out = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    last = [len(tokens) - 1 for tokens in sequences]
    rows = torch.arange(len(sequences))
    return out.logits[rows, last], out.hidden_states[-1][rows, last]


def tiny_llama():
    """A Llama of two layers and three tokens in float64, small enough to enumerate its outputs."""
    config = transformers.LlamaConfig(
        vocab_size=3,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=1.0,
    )
    return HFBackend(random_model(config, dtype=torch.float64), name="tiny")


def assert_output_distribution(target, make_drafter, rule, *, length, tolerance=1e-7, prompt=(0, 2), learns=False):
    """Assert, by enumeration, that outputs of `length` tokens have the distribution of the model's plain forward pass.

    Every outcome has a new engine. All have one drafter, as requests of an engine that runs for long: what it keeps
    from one to the next would change what is drawn. One that `learns` from requests is made for every engine.
    """
    params, start = SamplingParams(max_tokens=length), len(prompt) - 1
    one = None if learns else make_drafter()

    def make(round_rng):
        return Engine(target, make_drafter() if learns else one, make_verifier(rule), round_rng=round_rng)

    with checks_off():
        found = engine_distribution(make, list(prompt), params)
    expected = {}
    for tokens in itertools.product(range(target.vocab_size), repeat=length):
        rows = target.model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0].softmax(-1)
        each = [rows[start + place, token] for place, token in enumerate(tokens)]
        expected[tokens] = float(torch.stack(each).prod().detach())
    assert total_variation(found, expected) < tolerance, "the rules work on float32 rows"


def with_other_rows(make_drafter, first=0):
    """Make drafters as another maker does, whose rows of q from the given one on are not those that were drawn from."""

    def make():
        drafter = make_drafter()
        propose = drafter.propose

        def lying(requests, rng):
            drafts = propose(requests, rng)
            for draft in drafts:
                if len(draft) > first:
                    draft.probs[first:] = 0.5 * draft.probs[first:].roll(1, -1) + 0.5 / draft.probs.shape[-1]
            return drafts

        drafter.propose = lying
        return drafter

    return make


def assert_other_rows_are_seen(target, make_drafter, rule, *, first=0, **options):
    """Assert that the same enumeration fails with rows of q that were not drawn from: its negative control."""
    with pytest.raises(AssertionError, match="the rules work on"):
        assert_output_distribution(target, with_other_rows(make_drafter, first), rule, **options)
