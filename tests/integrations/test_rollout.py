"""Rollouts: the target's distribution with its own log-probabilities, and engines whose weights change."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import transformers

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean.backend import LeanBackend
from draftproof.backends.loading.in_memory import backend_in_memory
from draftproof.embedded import target_dir
from draftproof.engine.verifier_parts import make_verifier
from draftproof.integrations.rollout import Rollouts
from draftproof.testing import exact_distribution, total_variation
from support.helpers import CONFIGS, random_model, tiny_llama, tokenizer
from type_checks import checks_off

PROMPTS = [[5, 6, 7, 5, 6], [9, 8]]


def rows_of(model, prompt, completion, *, temperature=1.0):
    """The model's own log-probabilities after each token of a completion."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1].double()
    return (logits / temperature).log_softmax(-1)


# --- log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["token", "block", "gumbel"])
def test_logprobs_are_those_of_the_sampled_distribution(rule):
    model = random_model(CONFIGS["llama"]())
    small = random_model(CONFIGS["qwen2"](), seed=3)
    engine = Engine.assemble(
        backend_in_memory(model), backend_in_memory(small), None, stopper="fixed:3", rule=make_verifier(rule)
    )
    params = SamplingParams(temperature=0.6, max_tokens=16, n=2, seed=3, logprobs_mode="raw_logprobs")
    found = Rollouts(engine, params).sample(PROMPTS)
    assert [each.prompt_ids for each in found] == [tuple(PROMPTS[0])] * 2 + [tuple(PROMPTS[1])] * 2
    for each in found:
        expected = rows_of(model, each.prompt_ids, each.completion_ids, temperature=0.6)
        own = [float(expected[place, token]) for place, token in enumerate(each.completion_ids)]
        assert each.logprobs == pytest.approx(own, abs=2e-4)
    raw = rows_of(model, found[0].prompt_ids, found[0].completion_ids)
    assert found[0].logprobs != pytest.approx(
        [float(raw[i, t]) for i, t in enumerate(found[0].completion_ids)], abs=1e-2
    )


def test_logprobs_after_filters_and_penalties():
    model = random_model(CONFIGS["llama"]())
    engine = Engine.assemble(backend_in_memory(model), None, None, drafter="ngram:3")
    params = SamplingParams(temperature=0.8, top_k=3, presence_penalty=0.7, max_tokens=12, seed=1)
    (found,) = Rollouts(engine, params).sample([PROMPTS[0]])
    raw = rows_of(model, PROMPTS[0], found.completion_ids)
    for place, token in enumerate(found.completion_ids):
        scores = raw[place].clone()
        scores[list(set(found.completion_ids[:place]))] -= 0.7
        top = (scores / 0.8).topk(3)
        expected = top.values.log_softmax(-1)[top.indices.tolist().index(token)]
        assert found.logprobs[place] == pytest.approx(float(expected), abs=2e-4)
    (greedy,) = Rollouts(engine).sample([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=4))
    assert greedy.logprobs == (0.0,) * 4


def test_every_outcome_has_the_probability_that_its_logprobs_say():
    """The strongest statement: the exact probability of each rollout is the exponential of its log-probabilities."""
    target = tiny_llama()
    params = SamplingParams(temperature=0.7, max_tokens=3, logprobs=0, logprobs_mode="processed_logprobs")
    said = {}

    def program(rng):
        engine = Engine.assemble(target, draft, None, stopper="fixed:2", rule=make_verifier("block"))
        engine._round_rng = lambda *_: rng
        (out,) = engine.generate([[0, 2]], params)
        said[out.token_ids] = math.exp(sum(each.logprob for each in out.logprobs))
        return out.token_ids

    draft = HFBackend(random_model(_one_layer(), seed=2, dtype=torch.float64), name="draft", check=False)
    with checks_off():
        found = exact_distribution(program)
    assert total_variation(found, said) < 1e-5
    assert len(found) == 15, "token 2 ends an answer"


def _one_layer():
    return transformers.LlamaConfig(
        vocab_size=3,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=1.0,
    )


def test_wrong_modes_and_lossy_rules_are_refused():
    with pytest.raises(UserError, match="logprobs_mode"):
        SamplingParams(logprobs_mode="processed")
    lossy = Engine.load("embedded:target", "embedded:draft", verifier="typical")
    with pytest.raises(UserError, match="typical"):
        Rollouts(lossy)


# --- weights that change ---------------------------------------------------------------------------------------------


def changed(model):
    """The same architecture after a step of training."""
    made = copy.deepcopy(model)
    with torch.no_grad():
        for number, each in enumerate(made.parameters()):
            torch.manual_seed(number)
            each.add_(torch.randn_like(each) * 0.2 * each.std())
    return made


def outputs(engine):
    """Greedy and sampled texts, with log-probabilities."""
    params = [SamplingParams(temperature=t, max_tokens=14, seed=5, logprobs=2) for t in (0, 1.0)]
    made = [engine.generate(PROMPTS, own) for own in params]
    return [(each.token_ids, each.logprobs) for outs in made for each in outs]


def same(first, second):
    """Equal tokens, and log-probabilities equal but for rounding, which passes of other lengths do otherwise."""
    pairs = zip(first, second, strict=True)
    return all(
        here[0] == there[0]
        and [each.logprob for each in here[1]] == pytest.approx([x.logprob for x in there[1]], abs=2e-4)
        for here, there in pairs
    )


PARTS = {
    "plain": {"drafter": "none"},
    "ngram": {"drafter": "ngram:4"},
    "quantized": {"drafter": "quantized:4", "stopper": "fixed:3"},
    "early_exit": {"drafter": "early_exit:1", "stopper": "fixed:3"},
    "auto": {},
}


#: Every family with every second part by default, in turns; with the others among slow tests.
CASES = [
    pytest.param(name, parts, marks=[pytest.mark.slow] * ((row + column) % 2))
    for row, name in enumerate(("llama", "qwen2", "qwen3", "mistral", "gpt2", "gemma3"))
    for column, parts in enumerate(PARTS)
]


@pytest.mark.grid(2)
@pytest.mark.parametrize(("name", "parts"), CASES)
def test_an_updated_engine_is_as_a_fresh_one(name, parts):
    model = random_model(CONFIGS[name]())
    model.generation_config = transformers.GenerationConfig()
    new = changed(model)
    target = LeanBackend(model) if name in ("llama", "qwen3") else backend_in_memory(copy.deepcopy(model))
    engine = Engine.assemble(target, None, None, **PARTS[parts])
    before = outputs(engine)
    engine.update_weights(new if parts != "ngram" else new.state_dict())
    fresh = Engine.assemble(backend_in_memory(new), None, None, **PARTS[parts])
    assert same(outputs(engine), outputs(fresh))
    assert not same(outputs(engine), before)


def test_tied_weights_and_loaded_engines():
    """Engines by name; SmolLM2 and the embedded pair share embedding and output layer or not."""
    engine = Engine.load("embedded:target", "embedded:draft", stopper="fixed:3")
    model = transformers.AutoModelForCausalLM.from_pretrained(target_dir(), dtype=torch.float32)
    before = outputs(engine)
    engine.update_weights(model)
    assert outputs(engine) == before, "the weights that it has already"
    engine.update_weights(new := changed(model))
    fresh = Engine.assemble(
        backend_in_memory(new), Engine.load("embedded:draft", drafter="none").target, tokenizer(), stopper="fixed:3"
    )
    on_cpu = engine.target.device.type == "cpu"  # a device adds in another order in passes of other sizes
    assert (outputs(engine) == outputs(fresh)) if on_cpu else same(outputs(engine), outputs(fresh))
    tied = transformers.LlamaConfig(**{**CONFIGS["llama"]().to_dict(), "tie_word_embeddings": True})
    for backend in ("lean", "hf"):
        first, second = random_model(tied), random_model(tied, seed=8)
        engine = Engine.assemble(backend_in_memory(first, backend=backend), None, None, drafter="none")
        state = second.state_dict()
        state.pop("lm_head.weight", None)  # as safetensors files have it
        engine.update_weights(state)
        fresh = Engine.assemble(backend_in_memory(second, backend=backend), None, None, drafter="none")
        assert outputs(engine) == outputs(fresh)


def test_the_engine_keeps_no_reference_to_the_policy():
    policy = random_model(CONFIGS["llama"]())
    engine = Engine.assemble(backend_in_memory(random_model(CONFIGS["llama"](), seed=4)), None, None, drafter="ngram:3")
    engine.update_weights(policy)
    before = outputs(engine)
    with torch.no_grad():
        for each in policy.parameters():
            each.mul_(1.1)
    assert outputs(engine) == before


def test_weights_that_do_not_fit_change_nothing():
    model = random_model(CONFIGS["llama"]())
    for backend in ("lean", "hf"):
        engine = Engine.assemble(backend_in_memory(copy.deepcopy(model), backend=backend), None, None, drafter="none")
        before, state = outputs(engine), changed(model).state_dict()
        broken = {**state, "model.norm.weight": state["model.norm.weight"] * math.nan}
        cases = {
            "lack": {name: each for name, each in state.items() if "layers.1.mlp" not in name},
            "too much": {**state, "model.layers.2.mlp.up_proj.weight": state["model.layers.1.mlp.up_proj.weight"]},
            "do not fit": {**state, "model.norm.weight": torch.ones(7)},
            "NaN": broken,
            "adapter": {**state, "model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.ones(2, 2)},
            "state dict": [1, 2],
        }
        for words, wrong in cases.items():
            with pytest.raises(UserError, match=words), checks_off():
                engine.update_weights(wrong)
        assert outputs(engine) == before
    request = engine.add(PROMPTS[0])[0]
    with pytest.raises(UserError, match="requests run"):
        engine.update_weights(state)
    engine.abort(request)
    with pytest.raises(UserError, match="draft_weights"):
        engine.update_weights(state, draft_weights=state)
    with pytest.raises(UserError, match=r"Engine\.load"):
        Engine(engine.target).update_weights(state)


def test_draft_weights_change_too():
    target, small = random_model(CONFIGS["llama"]()), random_model(CONFIGS["qwen2"](), seed=3)
    engine = Engine.assemble(
        backend_in_memory(target), backend_in_memory(small), None, drafter="model", stopper="fixed:3"
    )
    new, other = changed(target), changed(small)
    engine.update_weights(new, other.state_dict())
    fresh = Engine.assemble(backend_in_memory(new), backend_in_memory(other), None, drafter="model", stopper="fixed:3")
    assert outputs(engine) == outputs(fresh)
    counts = [made.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20)) for made in (engine, fresh)]
    assert [out.stats.num_accepted_tokens for out in counts[0]] == [out.stats.num_accepted_tokens for out in counts[1]]


# --- as trl calls it -------------------------------------------------------------------------------------------------


class Trainer:
    """What trl's GRPOTrainer shows a rollout function."""

    def __init__(self, model):
        self.model, self.state = model, SimpleNamespace(global_step=0)
        self.accelerator = SimpleNamespace(unwrap_model=lambda each: each)
        self.temperature, self.top_p, self.max_completion_length = 0.9, 1.0, 24


def test_a_rollout_function_follows_the_trainer(monkeypatch):
    policy = transformers.AutoModelForCausalLM.from_pretrained(target_dir(), dtype=torch.float32)
    rollouts = Rollouts(Engine.load("embedded:target", drafter="ngram:3"), SamplingParams(seed=2))
    updates = []
    original = rollouts.engine.update_weights
    monkeypatch.setattr(rollouts.engine, "update_weights", lambda *args: updates.append(1) or original(*args))
    trainer = Trainer(policy)
    first = rollouts(["Once upon a time"] * 2, trainer)
    assert {"prompt_ids", "completion_ids", "logprobs"} <= first.keys()
    assert [len(each) for each in first["completion_ids"]] == [len(each) for each in first["logprobs"]]
    assert max(map(len, first["completion_ids"])) <= 24
    assert first["completion_ids"][0] != first["completion_ids"][1], "equal prompts have different samples"
    again = rollouts(["Once upon a time"] * 2, trainer)
    assert again["completion_ids"] != first["completion_ids"], "so have two calls"
    assert Rollouts(rollouts.engine, rollouts.params)(["Once upon a time"] * 2, trainer) == first, "by one seed"
    updates.clear()
    trainer.model, trainer.state.global_step = changed(policy), 1
    second = rollouts(["Once upon a time"] * 2, trainer)
    assert len(updates) == 1
    rows = rows_of(trainer.model, second["prompt_ids"][0], second["completion_ids"][0], temperature=0.9)
    expected = [float(rows[place, token]) for place, token in enumerate(second["completion_ids"][0])]
    assert second["logprobs"][0] == pytest.approx(expected, abs=2e-4)


def test_an_adapter_is_merged_on_a_copy():
    peft = pytest.importorskip("peft")
    base = random_model(CONFIGS["llama"]())
    policy = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=4, init_lora_weights=False)).eval()
    before = {name: each.clone() for name, each in policy.state_dict().items()}
    rollouts = Rollouts(Engine.assemble(backend_in_memory(base), None, None, drafter="ngram:3"))
    rollouts.update_weights(policy)
    assert all(torch.equal(each, before[name]) for name, each in policy.state_dict().items())
    (found,) = rollouts.sample([PROMPTS[0]], SamplingParams(max_tokens=8, seed=1))
    rows = rows_of(policy, PROMPTS[0], found.completion_ids)
    assert found.logprobs == pytest.approx([float(rows[i, t]) for i, t in enumerate(found.completion_ids)], abs=2e-4)
