"""Models that cannot be drafted for: decoded plainly, as transformers decodes them, and that is said."""

import json
import logging
import math

import pytest
import torch
import transformers

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed, unread
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.hf.generate import PlainBackend
from draftproof.backends.loading.by_name import load_backend
from draftproof.backends.loading.options import LoadOptions
from draftproof.bench.cell import Cell
from draftproof.drafters.ngram import NgramDrafter
from draftproof.embedded import target_dir
from draftproof.tree import TokenTree
from support.commands import call
from support.helpers import CONFIGS, embedded_model, random_model

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = [[3, 5, 7], [(5 * i) % 97 for i in range(20)], [11, 2]]


def rwkv(seed=0):
    config = transformers.RwkvConfig(
        vocab_size=97, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32, context_length=64, eos_token_id=0
    )
    model = random_model(config, seed)
    random = torch.Generator().manual_seed(
        seed
    )  # with some weights the first token is EOS, and one step shows no fault
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() == 2:
                weights.normal_(0, 0.4, generator=random)
    return model


def generated(model, prompt, count):
    ids = torch.tensor([prompt])
    options = transformers.GenerationConfig(max_new_tokens=count, do_sample=False)
    model.generation_config = transformers.GenerationConfig()
    return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)[
        0, len(prompt) :
    ].tolist()


@pytest.fixture
def saved(tmp_path):
    """A directory with a tiny RWKV that speaks the embedded tokenizer's tokens."""
    config = transformers.RwkvConfig(
        vocab_size=embedded_model("target").config.vocab_size,
        hidden_size=32,
        num_hidden_layers=2,
        attention_hidden_size=32,
        context_length=64,
        eos_token_id=1,
    )
    random_model(config).save_pretrained(tmp_path)
    for path in target_dir().glob("tokenizer*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_plain_decoding_gives_what_transformers_generates_alone_and_in_company():
    model = rwkv()
    made = PlainBackend(model, name="rwkv")
    outs = Engine(made, max_batch=2).generate(PROMPTS, GREEDY)
    assert [list(out.token_ids) for out in outs] == [generated(model, prompt, 12) for prompt in PROMPTS]
    assert len({out.token_ids for out in outs}) == len(PROMPTS)


def test_requests_that_begin_alike_share_nothing_and_long_prompts_are_read_at_once():
    model, prompt = rwkv(), [5, 9, 2, 7] * 11
    engine = Engine(PlainBackend(model), max_batch=3)
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    first = engine.generate([prompt], greedy)[0].token_ids
    assert len(engine.scheduler.prefix_cache) == 0
    requests = [*engine.add(prompt[:2], greedy)]
    engine.step()
    requests += [*engine.add(prompt, greedy), *engine.add([*prompt, *first[:2]], greedy)]
    while engine.busy:
        engine.step()
    assert [each.reused for each in requests] == [0, 0, 0]
    for each in requests:
        start = each.tokens[: each.prompt_length]
        assert each.output_ids == generated(model, start, 6)


def test_a_session_that_goes_back_begins_again():
    model = rwkv()
    made = PlainBackend(model, name="rwkv")
    session, fresh = made.open(), made.open()
    made.forward([Feed(session, PROMPTS[1])])
    for tokens in ([*PROMPTS[1], 4], [*PROMPTS[1][:10], 9], [*PROMPTS[1][:10], 9, 8, 7], PROMPTS[1][:4]):
        row = made.forward([Feed(session, unread(session, tokens))])[0].logits[0]
        assert session.tokens == tokens
        with torch.inference_mode():
            expected = model(input_ids=torch.tensor([tokens])).logits[0, -1]
        assert torch.allclose(row, expected, atol=1e-4)
        fresh.keep(0)
        assert torch.allclose(made.forward([Feed(fresh, tokens)])[0].logits[0], expected, atol=1e-4)


def test_a_pass_that_fails_leaves_nothing_behind(monkeypatch):
    model = rwkv()
    made = PlainBackend(model, name="rwkv")
    session = made.open()
    made.forward([Feed(session, [1, 2, 3])])
    forward = model.rwkv.blocks[1].forward

    def broken(*args, **options):
        forward(*args, **options)
        raise RuntimeError("in the middle")

    with monkeypatch.context() as patch:
        patch.setattr(model.rwkv.blocks[1], "forward", broken)
        with pytest.raises(RuntimeError):
            made.forward([Feed(session, [4])])
    row = made.forward([Feed(session, unread(session, [1, 2, 3, 4]))])[0].logits[0]
    with torch.inference_mode():
        assert torch.allclose(row, model(input_ids=torch.tensor([[1, 2, 3, 4]])).logits[0, -1], atol=1e-4)


def test_drafts_are_refused_when_an_engine_is_made_and_when_they_are_fed():
    made = PlainBackend(rwkv(), name="rwkv", because="it has no cache")
    with pytest.raises(
        UserError, match=r"drafter ngram:4 cannot be used, because .* from rwkv \(it has no cache\): use drafter none"
    ):
        Engine(made, NgramDrafter(4))
    with pytest.raises(ValueError, match="reads no drafts"):
        made.forward([Feed(made.open(), [1], TokenTree.chain(torch.tensor([2])))])
    with pytest.raises(UserError, match="cannot draft for itself"):
        made.first_layers(1)


def test_auto_takes_it_by_itself_and_says_so(saved, caplog):
    with caplog.at_level(logging.WARNING, "draftproof"):
        engine = Engine.load(str(saved))
    assert [
        record.getMessage() for record in caplog.records if "decoded plainly, without drafts" in record.getMessage()
    ]
    assert (engine.target.kind, engine.drafter.name) == ("generate", "none")
    assert "keeps its past in its own form" in engine.plain_because
    (out,) = engine.generate("Once", GREEDY)
    model = transformers.AutoModelForCausalLM.from_pretrained(saved)
    assert list(out.token_ids) == generated(model, engine.encode("Once")[1], 12)
    assert not Engine(HFBackend(embedded_model("draft"))).plain_because


def test_a_named_drafter_or_draft_model_is_refused(saved):
    with pytest.raises(UserError, match="use drafter none"):
        Engine.load(str(saved), drafter="ngram:4")
    with pytest.raises(UserError, match="leave out the draft model 'embedded:draft'"):
        Engine.load(str(saved), "embedded:draft")
    with pytest.raises(UserError, match="drafted tokens cannot be taken back"):
        Engine.load(str(saved), drafter="quantized:4")


def test_only_a_target_is_decoded_plainly(saved):
    with pytest.raises(UserError, match="keeps its past in its own form"):
        load_backend(str(saved))
    with pytest.raises(UserError, match="keeps its past in its own form"):
        Engine.load("embedded:target", str(saved))
    assert load_backend(str(saved), LoadOptions(backend="generate")).kind == "generate"


def test_the_name_of_the_version_before_works_with_a_warning(saved, caplog):
    assert load_backend(str(saved), LoadOptions(backend="plain")).kind == "generate"
    assert "backend plain is now called generate" in caplog.text
    assert Cell(str(saved), backend="plain").backend == "generate"


def test_the_command_says_it_in_a_line_and_in_json(saved):
    shown = call("generate", "Once", "--target", str(saved), "--temperature", "0", "--max-tokens", "4")
    assert "decoded plainly, without drafts: " in shown.stderr
    found = call("generate", "Once", "--target", str(saved), "--json", "--max-tokens", "4")
    row = json.loads(found.stdout)
    assert row["drafter"] == "none"
    assert "keeps its past in its own form" in row["plain_because"]


def test_damaged_weights_are_no_reason_to_decode_plainly(tmp_path):
    model = random_model(CONFIGS["gpt2"]())
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[3, 4] = math.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="not finite"):
        load_backend(str(tmp_path), LoadOptions(plainly=True))


def test_the_check_sees_a_step_that_differs(monkeypatch):
    def off(self, ids, options):
        row, options = self._call(ids, 1, options)
        return row.roll(1), options

    monkeypatch.setattr(PlainBackend, "_next", off)
    with pytest.raises(UserError, match="does not reproduce what transformers generates"):
        PlainBackend(rwkv(), name="rwkv")


def test_a_model_that_keeps_its_states_in_itself_is_right_in_company():
    """RecurrentGemma's layers hold the states of the sequence that was read last."""
    from support.architectures.check import make_model
    from support.architectures.configurations import Configuration

    model = make_model(Configuration("recurrent_gemma"), 0)
    made = PlainBackend(model, name="recurrent")
    prompts = [[5, 6, 7], [9, 4, 8, 6, 5], [11, 12]]
    outs = Engine(made, max_batch=3).generate(prompts, GREEDY)
    assert [list(out.token_ids) for out in outs] == [generated(model, prompt, 12) for prompt in prompts]
