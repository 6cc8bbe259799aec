"""Early exit: the target's first layers as its draft, on its weights and in its cache."""

import pytest
import torch

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed
from draftproof.backends.heads.self_draft import EarlyExitBackend
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.hf.truncate import first_layers
from draftproof.engine.drafter_parts import make_drafter
from support.helpers import CONFIGS, assert_output_distribution, backend, engine, random_model, tiny_llama
from support.quantized_drafts import early_exit


@pytest.mark.parametrize("name", [*CONFIGS])
def test_every_architecture_is_cut_without_copying(name):
    whole = backend(name)
    cut = first_layers(whole.model, 1, name)
    shared = {id(weights) for weights in whole.model.parameters()}
    assert all(id(weights) in shared for weights in cut.parameters())
    assert whole.config.num_hidden_layers == 2, "the whole model is left as it was"
    ids = torch.arange(5).unsqueeze(0)
    reference = random_model(CONFIGS[name]())
    want = reference(input_ids=ids, use_cache=False).logits
    assert torch.equal(whole.model(input_ids=ids, use_cache=False).logits, want)
    assert not torch.allclose(cut(input_ids=ids, use_cache=False).logits, want, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_a_borrowed_session_continues_what_the_target_has_read(name):
    whole = backend(name)
    exit_ = EarlyExitBackend(whole, 1)
    own, tokens = whole.open(), [5, 9, 2, 7, 11]
    try:
        whole.forward([Feed(own, tokens[:3])])
        borrowed = exit_.borrow(own)
        rows = exit_.forward([Feed(borrowed, tokens[3:])])[0].logits
        plain = exit_.part.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1:]
        assert torch.allclose(rows, plain, atol=1e-4)
        borrowed.close()
        after = whole.forward([Feed(own, tokens[3:])])[0].logits
        assert torch.allclose(
            after, whole.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1:], atol=1e-4
        )
    finally:
        own.close()


@pytest.mark.parametrize("chains", [1, 3])
@pytest.mark.parametrize("length", [1, 5])
def test_greedy_output_is_the_targets(chains, length):
    target = backend("target")
    prompts = ["Once upon a time", "The little dog", "One day, Tim and his mom went to the"]
    greedy = SamplingParams(max_tokens=40, temperature=0)
    plain = engine(draft=None).generate(prompts, greedy)
    made = engine(draft=None, verifier="trie_block" if chains > 1 else "block")
    made = Engine(
        target,
        early_exit(target, 3, chains=chains, length=length),
        made.verifier,
        tokenizer=made.tokenizer,
        eos_token_ids=(1, 2),
    )
    outs = made.generate(prompts, greedy)
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    assert sum(out.stats.num_accepted_tokens for out in outs) > 0
    assert outs[0].drafter == ("early_exit:3" if chains == 1 else "early_exit:3x3")


def test_it_takes_no_slot_of_its_own():
    target = HFBackend(random_model(CONFIGS["llama"]()), name="llama")
    made = Engine(target, early_exit(target, 1))
    made.generate([[1, 2], [3, 4, 5]], SamplingParams(max_tokens=6))
    assert sorted(target._cache._free) == [0, 1], "two sequences, two slots, both given back"


@pytest.mark.grid(1)
@pytest.mark.parametrize(("chains", "rule"), [(1, "token"), (1, "block"), (2, "trie_block")])
def test_exact_output_distribution_on_a_real_model(chains, rule):
    target = tiny_llama()
    assert_output_distribution(
        target, lambda: early_exit(target, 1, chains=chains, length=2), rule, length=2 if chains > 1 else 3
    )


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("early_exit:0", "expected 1 to 4 layers, got 0"),
        ("early_exit:5", "expected 1 to 4 layers, got 5"),
        ("early_exit", "expected a number of layers, .* got none"),
        ("early_exit:3x2x1", "expected a number of layers, .* got 3x2x1"),
        ("early_exit:3x99", "expected 1 to 64, got 99"),
    ],
)
def test_bad_arguments_say_what_is_legal(spec, words):
    with pytest.raises(UserError, match=words):
        make_drafter(spec, target=backend("target"), draft=None, stopper="fixed:4")
