"""`custom_generate=speculative(...)`: what transformers' own generate returns, and a model that stays as it is."""

import copy
import gc
import itertools
import re
import threading
import weakref
from pathlib import Path

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    StopStringCriteria,
    TextIteratorStreamer,
    pipeline,
)

from draftproof import UserError
from draftproof.backends.model_info import cache_names
from draftproof.embedded import target_dir
from draftproof.integrations import engine_cache as held
from draftproof.integrations.generation_config import INERT, MAPPED, REFUSED
from draftproof.integrations.processors import Processors, as_params
from draftproof.integrations.transformers import forget, speculative
from draftproof.testing import exact_distribution, total_variation
from support.helpers import CONFIGS, ROPE, VOCAB, random_model, tokenizer
from type_checks import checks_off

EOS = 5
PAGE = Path(__file__).parents[2] / "docs" / "guide" / "transformers.md"
NGRAM = speculative(drafter="ngram:4")


def model_of(name="llama", **options):
    model = random_model(CONFIGS[name]())
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=EOS, **options)
    return model


@pytest.fixture(scope="module")
def llama():
    return model_of()


def small(seed=9):
    """A draft model for the tiny families: one layer, other weights."""
    return random_model(transformers.LlamaConfig(**{**ROPE, "num_hidden_layers": 1}), seed=seed)


def batch():
    """Three prompts of different lengths, padded on the left."""
    ids = torch.randint(6, VOCAB, (3, 9), generator=torch.Generator().manual_seed(4))  # threads share the global one
    mask = torch.ones_like(ids)
    mask[0, :5], mask[2, :1] = 0, 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def both(model, custom=NGRAM, **options):
    """What transformers' own generate returns, and what it returns with ours."""
    given = {**batch(), "max_new_tokens": 24, **options}
    return model.generate(**given), model.generate(**given, custom_generate=custom)


# --- greedy: token for token --------------------------------------------------------------------------------------


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_is_transformers_own(name):
    model = model_of(name)
    model.generation_config.eos_token_id = None
    first = both(model)[0][:, 9:]
    model.generation_config.eos_token_id = int(first[0, 7])  # some row ends early
    expected, found = both(model)
    assert (expected[:, 9:] == 0).any(), "some row is padded"
    assert torch.equal(found, expected)


@pytest.mark.parametrize("backend", ["lean", "hf"])
def test_greedy_with_a_draft_model_in_memory(llama, backend):
    draft = small()
    before = {name: each.clone() for name, each in llama.state_dict().items()}
    custom = speculative(draft, stopper="fixed:3", backend=backend)
    expected, found = both(llama, custom)
    assert torch.equal(found, expected)
    assert all(torch.equal(each, before[name]) for name, each in llama.state_dict().items())


def bans_by_row(row, ids):
    """Of row 0 only even tokens, of the others only odd ones, and never the last token again."""
    return [token for token in range(6, VOCAB) if token % 2 == (row > 0) and token != int(ids[-1])]


class Shifts:
    """A caller's processor that depends on the row's place in the batch and on its last token."""

    def __call__(self, input_ids, scores):
        made = scores.clone()
        for row, last in enumerate(input_ids[:, -1].tolist()):
            made[row, (last + row) % VOCAB] += 8
        return made


FIELDS = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[63], [34, 49]]},
    "min_new_tokens": {"min_new_tokens": 12},
    "min_length": {"min_length": 20},
    "more than fits": {"min_new_tokens": 50},
    "suppress_tokens": {"suppress_tokens": [10, 11, 12], "begin_suppress_tokens": [20, 21]},
    "sequence_bias": {"sequence_bias": [[[30], 5.0], [[31, 32], -4.0]]},
    "forced_eos_token_id": {"forced_eos_token_id": 6},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (4, 1.5)},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "renormalize_logits": {"renormalize_logits": True, "remove_invalid_values": True},
    "watermark": {"watermarking_config": transformers.WatermarkingConfig(bias=6.0)},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": bans_by_row},
    "logits_processor": {"logits_processor": LogitsProcessorList([Shifts()])},
    "all": {"repetition_penalty": 1.3, "min_new_tokens": 9, "logits_processor": LogitsProcessorList([Shifts()])},
}


OFTEN = ("logits_processor", "prefix_allowed_tokens_fn", "all", "repetition_penalty")  # with both drafters by default
DRAFTS = [
    pytest.param(name, drafts, marks=pytest.mark.slow if drafts == "model" and name not in OFTEN else ())
    for name in FIELDS
    for drafts in ("model", "ngram")
]


@pytest.mark.grid(6)
@pytest.mark.parametrize(("name", "drafts"), DRAFTS)
def test_greedy_with_each_field(llama, name, drafts):
    custom = NGRAM if drafts == "ngram" else speculative(small(), stopper="fixed:3")
    if name == "watermark":
        llama = model_of("gpt2")  # its config names the vocabulary where the watermark looks for it
    expected, found = both(llama, custom, **FIELDS[name])
    plain = llama.generate(**batch(), max_new_tokens=24)
    assert torch.equal(found, expected)
    silent = ("renormalize_logits", "forced_eos_token_id", "min_new_tokens", "min_length", "more than fits")
    assert name in silent or not torch.equal(plain, expected), "the field changes something"


def test_fields_without_a_call_of_ours_are_sampling_parameters(llama):
    seen = []
    original = Processors.__call__

    def counted(self, *args):
        seen.append(args)
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Processors, "__call__", counted)
        both(llama, do_sample=True, temperature=0.7, top_k=20, top_p=0.9, repetition_penalty=1.2, min_new_tokens=2)
        assert not seen
        both(llama, do_sample=True, top_p=0.9, min_p=0.1)
        assert seen


def test_rows_that_return_several_sequences(llama):
    prompts = batch()["input_ids"].repeat_interleave(2, 0)
    nearly_greedy = {"do_sample": True, "temperature": 1e-4, "top_k": 0}
    expected, found = both(llama, num_return_sequences=2, **nearly_greedy)
    assert torch.equal(found[:, :9], prompts)
    assert torch.equal(found, expected)


def test_one_prompt_without_a_mask(llama):
    ids = torch.tensor([[7, 8, 9, 7, 8]])
    expected = llama.generate(ids, max_new_tokens=12)
    assert torch.equal(llama.generate(ids, max_new_tokens=12, custom_generate=NGRAM), expected)
    short = {"max_length": 6}
    assert torch.equal(llama.generate(ids, **short, custom_generate=NGRAM), llama.generate(ids, **short))


def test_an_empty_prompt_begins_with_bos(llama):
    options = {"max_new_tokens": 6, "bos_token_id": 3}
    assert torch.equal(llama.generate(**options, custom_generate=NGRAM), llama.generate(**options))


def test_adapters_beside_the_weights(llama):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(copy.deepcopy(llama), peft.LoraConfig(r=4, init_lora_weights=False)).eval()
    adapted.generation_config = llama.generation_config
    expected, found = both(adapted)
    assert torch.equal(found, expected)
    assert not torch.equal(found, both(llama)[1])


def test_an_adapter_that_is_switched_after_its_prompt_was_read():
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(model_of(), peft.LoraConfig(r=4, init_lora_weights=False)).eval()
    ids = torch.randint(6, VOCAB, (1, 60), generator=torch.Generator().manual_seed(4))  # its keys and values are kept
    scales = [each.scaling for each in adapted.modules() if isinstance(getattr(each, "scaling", None), dict)]
    texts = []

    def compare():
        expected, found = both(adapted, input_ids=ids, attention_mask=torch.ones_like(ids))
        assert torch.equal(found, expected)
        texts.append(tuple(found[0].tolist()))

    compare()
    with adapted.disable_adapter():
        compare()
    for each in scales:
        each["default"] *= 4
    compare()
    assert scales
    assert len({*texts}) == 3


# --- sampling -----------------------------------------------------------------------------------------------------


def sampled_distribution(model, custom, length, **options):
    """Every answer of `generate` and its probability: the engine's randomness walks through all outcomes."""
    ids = torch.tensor([[0, 2]])

    def program(rng):
        with held.engine_of(model, custom.composition) as engine:
            engine._round_rng = lambda *_: rng
        made = model.generate(ids, do_sample=True, max_new_tokens=length, custom_generate=custom, **options)
        return tuple(made[0, 2:].tolist())

    try:
        with checks_off():
            return exact_distribution(program)
    finally:
        forget(model)


def plain_distribution(model, length, **options):
    """The same from the model's own logits and transformers' own processors, token by token."""
    found = {}
    config = {**options, "do_sample": True}
    seen = {}

    def keep(own, input_ids, logits_processor, **_):
        seen["processors"] = logits_processor
        return input_ids

    model.generate(torch.tensor([[0, 2]]), custom_generate=keep, max_new_tokens=length, **config)
    for tokens in itertools.product(range(3), repeat=length):
        weight = 1.0
        for place, token in enumerate(tokens):
            ids = torch.tensor([[0, 2, *tokens[:place]]])
            with torch.no_grad():
                scores = seen["processors"](ids, model(ids).logits[:, -1].float())
            weight *= float(scores.softmax(-1)[0, token])
        found[tokens] = weight
    return found


def three_tokens(seed=0, layers=2):
    config = transformers.LlamaConfig(
        vocab_size=3,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=1.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return random_model(config, seed=seed)


class Repels:
    """A caller's processor: the last two tokens become less likely."""

    def __call__(self, input_ids, scores):
        made = scores.clone()
        for row, ids in enumerate(input_ids.tolist()):
            for token in ids[-2:]:
                made[row, token] -= 0.8
        return made


SAMPLED = {
    "plain": {"top_k": 0},
    "shaped": {"temperature": 0.7, "top_k": 2},
    "nucleus": {"top_p": 0.8, "repetition_penalty": 1.4},
    "processor": {"temperature": 1.3, "logits_processor": LogitsProcessorList([Repels()])},
    "last": {"top_p": 0.9, "min_p": 0.2},
    "typical": {"typical_p": 0.7, "top_k": 0},
}


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=pytest.mark.slow if each in ("shaped", "last") else ()) for each in SAMPLED]
)
def test_sampling_has_the_exact_distribution(name):
    model, options = three_tokens(), SAMPLED[name]
    custom = speculative(three_tokens(seed=3, layers=1), stopper="fixed:2")
    expected = plain_distribution(model, 3, **options)
    found = sampled_distribution(model, custom, 3, **options)
    assert total_variation(found, expected) < 1e-5
    others = (other for other in SAMPLED if other != name)
    assert all(total_variation(plain_distribution(model, 3, **SAMPLED[other]), expected) > 1e-3 for other in others)


def test_torch_seed_decides_what_is_drawn(llama):
    def draw(seed, **options):
        torch.manual_seed(seed)
        return llama.generate(**batch(), do_sample=True, max_new_tokens=12, custom_generate=NGRAM, **options)

    first, other = draw(1), draw(2)
    assert torch.equal(first, draw(1))
    assert not torch.equal(first, other)
    several = draw(1, num_return_sequences=2)
    assert not torch.equal(several[0], several[1]), "rows draw independently"
    torch.manual_seed(1)
    state = torch.get_rng_state()
    both(llama)
    assert torch.equal(torch.get_rng_state(), state), "greedy draws nothing"


# --- what is returned, and when -----------------------------------------------------------------------------------


def test_scores_and_logits(llama):
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.3}
    expected, found = both(llama, **options)
    assert type(found) is type(expected)
    assert torch.equal(found.sequences, expected.sequences)
    for name in ("scores", "logits"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert len(ours) == len(theirs) == expected.sequences.shape[1] - 9
        for here, there in zip(ours, theirs, strict=True):
            torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-4)
    transitions = [llama.compute_transition_scores(each.sequences, each.scores) for each in (found, expected)]
    torch.testing.assert_close(*transitions, rtol=1e-4, atol=1e-4)
    plain = both(llama, return_dict_in_generate=True)[1]
    assert plain.scores is None
    assert plain.logits is None


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.put_, self.ended = [], False

    def put(self, value):
        self.put_.append(value.tolist())

    def end(self):
        self.ended = True


@pytest.mark.parametrize("rows", [1, 3])
def test_streamers_get_every_column(llama, rows):
    given = {name: each[-rows:] for name, each in batch().items()}
    ours, theirs = Recorder(), Recorder()
    llama.generate(**given, max_new_tokens=12, streamer=theirs)
    llama.generate(**given, max_new_tokens=12, streamer=ours, custom_generate=NGRAM)
    assert ours.ended
    assert ours.put_ == theirs.put_


def test_a_text_streamer_in_a_thread(stories):
    words, model = stories
    streamer = TextIteratorStreamer(words, skip_prompt=True, timeout=60)
    given = {**words("Once upon a time", return_tensors="pt"), "max_new_tokens": 12}
    whole = model.generate(**given)
    options = {**given, "streamer": streamer, "custom_generate": NGRAM}
    thread = threading.Thread(target=model.generate, kwargs=options)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == words.decode(whole[0, given["input_ids"].shape[1] :])


@pytest.fixture(scope="module")
def stories():
    words, model = tokenizer(), AutoModelForCausalLM.from_pretrained(target_dir(), dtype=torch.float32)
    words.pad_token = words.pad_token or words.eos_token
    return words, model


class After:
    """A stopping criterion: the last token of the row is divisible by n."""

    def __init__(self, n):
        self.n = n

    def __call__(self, input_ids, *_, **__):
        return input_ids[:, -1] % self.n == 0


def test_stopping_criteria(llama):
    expected, found = both(llama, stopping_criteria=StoppingCriteriaList([After(7)]))
    assert torch.equal(found, expected)
    assert (expected == 0).sum() > (both(llama)[0] == 0).sum(), "it ends some row"
    now = llama.generate(**batch(), max_new_tokens=30, max_time=0.0, custom_generate=NGRAM)
    assert now.shape[1] == 10, "a row has one token before its time is looked at"


def test_stop_strings(stories):
    words, model = stories
    given = {**words("Once upon a time", return_tensors="pt"), "max_new_tokens": 40}
    stop = words.decode(model.generate(**given)[0]).split()[12]
    expected = model.generate(**given, stop_strings=[stop], tokenizer=words)
    assert expected.shape[1] < 40
    ours = speculative(drafter="ngram:4", stop_strings=stop, tokenizer=words)
    assert torch.equal(model.generate(**given, custom_generate=ours), expected)
    criteria = StoppingCriteriaList([StopStringCriteria(words, [stop])])
    assert torch.equal(model.generate(**given, stopping_criteria=criteria, custom_generate=NGRAM), expected)


def test_pipelines(stories):
    words, model = stories
    pipe = pipeline("text-generation", model=model, tokenizer=words)
    prompts = ["Once upon a time", "The dog"]
    options = {"max_new_tokens": 12, "do_sample": False, "batch_size": 2}
    custom = speculative("embedded:draft", tokenizer=words)
    assert pipe(prompts, **options, custom_generate=custom) == pipe(prompts, **options)


# --- the model stays whole ----------------------------------------------------------------------------------------


def test_the_model_stays_whole(tmp_path):
    model = model_of()
    ids = batch()["input_ids"]
    names, twin = list(model.state_dict()), copy.deepcopy(model)
    logits = model(ids).logits
    both(model, speculative(drafter="early_exit:1"))
    assert torch.equal(model(ids).logits, logits)
    assert list(model.state_dict()) == names
    assert all(each.requires_grad for each in model.parameters())
    assert torch.equal(copy.deepcopy(model)(ids).logits, logits)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(ids).logits, logits)
    loss, other = (each(ids, labels=ids).loss for each in (model, twin))
    loss.backward(), other.backward()
    for here, there in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(here.grad, there.grad)


def test_engines_are_kept_until_the_weights_change(monkeypatch):
    model, made, keeping = model_of(), [], []
    original = held.EngineConfig.engine

    def engine(*args, **options):
        made.append(original(*args, **options))
        keeping.append(made[-1].target.keeps)
        return made[-1]

    monkeypatch.setattr(held.EngineConfig, "engine", engine)
    for _ in range(2):
        both(model, speculative(drafter="ngram:4"))
    assert len(made) == 1, "equal arguments share an engine"

    def changed(change):
        before = len(made)
        with torch.no_grad():
            change()
        expected, found = both(model)
        assert torch.equal(found, expected)
        assert len(made) == before + 1

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(batch()["input_ids"], labels=batch()["input_ids"]).loss.backward()
    changed(optimizer.step)
    changed(lambda: model.lm_head.weight[7].add_(0.5))
    changed(lambda: model.model.layers[0].mlp.down_proj.weight.data.mul_(1.5))
    changed(lambda: model.load_state_dict(model_of("llama").state_dict()))
    changed(lambda: model.to(torch.float64))
    changed(lambda: model.resize_token_embeddings(VOCAB + 8))
    mlp, handles = model.model.layers[0].mlp, []
    forward = mlp.forward
    for register in (mlp.register_forward_hook, mlp.register_forward_pre_hook):
        changed(lambda add=register: handles.append(add(lambda *given: given[-1] * 0.5 if len(given) == 3 else None)))
        changed(lambda: handles.pop().remove())
    changed(lambda: setattr(mlp, "forward", lambda given: 0.5 * forward(given)))
    changed(lambda: delattr(mlp, "forward"))
    changed(lambda: setattr(mlp, "act_fn", torch.nn.ReLU().eval()))
    assert keeping == [True, *[False] * 13], "calibration is not kept of weights that training changes"
    forget(model)
    changed(lambda: None)


class Counting(torch.nn.Module):
    """A part that counts its passes, and can be told to scale what it computes."""

    def __init__(self, part):
        super().__init__()
        self.part, self.passes, self.scale = part, 0, 1

    def forward(self, given):
        self.passes += 1
        return self.part(given) * self.scale


@pytest.mark.parametrize("check", [True, False])
def test_a_module_that_counts_its_passes_does_not_make_an_engine_for_each_call(check, monkeypatch):
    made, original = [], held.EngineConfig.engine

    def engine(*args, **options):
        made.append(original(*args, **options))
        return made[-1]

    monkeypatch.setattr(held.EngineConfig, "engine", engine)
    model, draft = model_of(), small()
    for each in (model, draft):
        each.model.layers[0].mlp = Counting(each.model.layers[0].mlp).eval()
    custom = speculative(draft, backend="hf", stopper="fixed:2", check=check)
    for _ in range(4):
        expected, found = both(model, custom)
        assert torch.equal(found, expected)
    assert len(made) == 1
    model.model.layers[0].mlp.scale = 2  # a control: a whole number that is a setting
    expected, found = both(model, custom)
    assert torch.equal(found, expected)
    assert len(made) == 2


@pytest.mark.parametrize(("options", "kept"), [({}, 3), ({"prefix_reuse": False}, 0), ({"kv_memory": "1MiB"}, 3)])
def test_what_is_kept_of_earlier_calls(options, kept):
    model, composition = model_of(), speculative(drafter="ngram:4", **options)
    expected, found = both(model, composition, max_new_tokens=40)
    assert torch.equal(found, expected)
    with held.engine_of(model, composition.composition) as engine:
        assert len(engine.scheduler.prefix_cache) == kept
        assert engine.memory.capacity == (2**20 if "kv_memory" in options else None)
    assert torch.equal(both(model, composition, max_new_tokens=40)[1], expected)


def test_a_memory_that_is_no_number_is_refused():
    with pytest.raises(UserError, match=r"kv_memory: expected a number of bytes above 0, .*got 'much'"):
        speculative(kv_memory="much")


def test_engines_go_with_the_model():
    for name in ("llama", "gpt2"):
        model = model_of(name)
        both(model)
        seen = weakref.ref(model)
        del model
        gc.collect()
        assert seen() is None


def test_a_compiled_model():
    for compile_it in (lambda model: model.compile(backend="eager"), _compiled_forward):
        model = model_of()
        expected = both(model)[0]
        compile_it(model)
        assert torch.equal(both_custom(model, {"max_new_tokens": 24}), expected)
        seen = weakref.ref(model)
        del model
        torch.compiler.reset()
        gc.collect()
        assert seen() is None, "nothing of the engine keeps the model"


def _compiled_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")


def test_counts_of_the_last_call(llama):
    custom = speculative(drafter="ngram:4")
    assert custom.stats is None
    found = both(llama, custom)[1]
    assert custom.stats.num_tokens == int((found[:, 9:] != 0).sum())
    assert custom.stats.num_target_calls < custom.stats.num_tokens
    assert custom.stats.num_accepted_tokens > 0


def test_a_row_that_fails_is_named(llama):
    class Breaks:
        def __call__(self, input_ids, scores):
            return scores * float("nan") if (input_ids[:, 0] != 0).all() else scores

    with pytest.raises(UserError, match=r"row 1 of the batch failed: .*NaN"):
        both_custom(llama, {"logits_processor": LogitsProcessorList([Breaks()])})
    expected, found = both(llama)
    assert torch.equal(found, expected), "the engine goes on"


def test_two_threads(llama):
    expected, found = both(llama)[0], {}

    def run(number):
        found[number] = both(llama)[1]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == 3
    assert all(torch.equal(each, expected) for each in found.values())


# --- refusals -----------------------------------------------------------------------------------------------------

NAMED = {
    "num_beams": {"num_beams": 2},
    "use_cache": {"use_cache": False},
    "cache_implementation": {"cache_implementation": "static"},
    "past_key_values": {"past_key_values": transformers.DynamicCache()},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "guidance_scale": {"guidance_scale": 1.5},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3, "num_return_sequences": 1},
    "assistant_early_exit": {"assistant_early_exit": 1},
    "synced_gpus": {"synced_gpus": True},
    "position_ids": {"position_ids": torch.arange(9).expand(3, 9) + 1},
    "attention_mask of row 0": {"attention_mask": torch.tensor([[1] * 8 + [0]] * 3)},
    "max_new_tokens": {"max_new_tokens": 1000},
    "without eos_token_id": {"stopping_criteria": StoppingCriteriaList([After(7)]), "eos_token_id": -1},
    "SynthIDTextWatermark": {
        "watermarking_config": transformers.SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3]),
        "do_sample": True,
    },
}


@pytest.mark.parametrize("name", NAMED)
def test_what_cannot_be_mapped_is_named(name):
    model = model_of()
    options = dict(NAMED[name])
    if options.pop("eos_token_id", 0) == -1:
        model.generation_config.eos_token_id = None
    if "watermarking_config" in options:
        model.config.vocab_size = VOCAB
    names = cache_names() if name == "past_key_values" else [name]  # transformers may hand it over by its new name
    with pytest.raises(UserError, match="|".join(map(re.escape, names))):
        both_custom(model, options)


def both_custom(model, options):
    return model.generate(**{**batch(), "max_new_tokens": 8, **options}, custom_generate=NGRAM)


def test_models_that_cannot_be_read(llama):
    with pytest.raises(UserError, match="assistant_model"):
        both_custom(llama, {"assistant_model": small()})
    llama.train()
    try:
        with pytest.raises(UserError, match=r"model\.eval\(\)"):
            both_custom(llama, {})
    finally:
        llama.eval()
    embeds = llama.get_input_embeddings()(batch()["input_ids"])
    with pytest.raises(UserError, match="inputs_embeds"):
        llama.generate(inputs_embeds=embeds.detach(), max_new_tokens=4, custom_generate=NGRAM)
    config = transformers.T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    config.decoder_start_token_id = 0
    t5 = transformers.T5ForConditionalGeneration(config).eval()
    with pytest.raises(UserError, match="encoder-decoder"):
        t5.generate(torch.tensor([[3, 4]]), max_new_tokens=4, custom_generate=NGRAM)


def test_names_are_read_at_once():
    for wrong in (
        {"verifier": "blok"},
        {"stopper": "fix:3"},
        {"draft_dtype": "int3"},
        {"stop_strings": "x"},
        {"draft": 3},
    ):
        with pytest.raises(UserError):
            speculative(**wrong)
    with pytest.raises(UserError, match="drafter"):
        both(model_of(), speculative(drafter="nothing"))
    with pytest.raises(UserError, match="backend"):
        both(model_of(), speculative(backend="graphs"))
    with pytest.raises(UserError, match="no lean forward"):
        both(model_of("gpt2"), speculative(backend="lean"))


def test_every_field_of_a_generation_config_is_known():
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    tables = [*MAPPED, *INERT, *REFUSED]
    assert len(tables) == len(set(tables))
    assert set(tables) == fields, "a field of this version of transformers is missing, or gone"
    page = PAGE.read_text(encoding="utf-8")
    rows = [f"| `{name}` | {text} |" for table in (MAPPED, INERT, REFUSED) for name, text in table.items()]
    assert [row for row in rows if row not in page] == [], "the guide lists every field, with its meaning"


def test_processors_in_another_order_are_called_as_they_are():
    made = [transformers.TopKLogitsWarper(3), transformers.TemperatureLogitsWarper(0.5)]
    common = {"width": 4, "padding": [0], "eos": (1,)}
    assert as_params(made, **common) is None
    assert as_params(made[::-1], **common) == {"temperature": 0.5, "top_k": 3}
    own = type("Own", (transformers.TopKLogitsWarper,), {"__module__": "mine"})(3)
    assert as_params([own], **common) is None
