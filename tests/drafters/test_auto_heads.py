"""The drafter `auto` with draft heads: those that a user names, and prediction layers that a target has of its own."""

import logging

import pytest
import torch
from transformers import AutoModelForCausalLM

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean.snapshots import LeanSnapshotBackend
from draftproof.backends.loading.by_name import load_backend
from draftproof.backends.loading.options import LoadOptions
from draftproof.drafters import auto as auto_module
from draftproof.drafters.auto import AutoDrafter, CandidateDrafter
from draftproof.drafters.suffix import SuffixDrafter
from draftproof.engine.drafter_parts import make_drafter
from draftproof.engine.verifier_parts import make_verifier
from draftproof.integrations.transformers import speculative
from draftproof.stoppers.base import AcceptanceRates
from draftproof.stoppers.costs import DraftCosts
from support import published
from support.helpers import assert_output_distribution, embedded_model, tiny_llama
from support.published import WRITERS
from support.qwen_mtp import written

TEXTS = ["Once upon a time", "The little dog", "one two three one two three one two"]
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
PROMPTS = [[5, 9, 2, 7, 11, 3, 60, 41], [8, 8, 1], [70, 12, 33, 4, 4]]


def embedded_target():
    return HFBackend(embedded_model("target"), name="target")


# --- lossless ---------------------------------------------------------------------------------------------------------


def qwen(folder):
    """A Qwen3.5 of three tokens with its prediction layer."""
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    where = written(folder, "qwen3_5_text", vocab=3, **ends)
    return LeanSnapshotBackend(AutoModelForCausalLM.from_pretrained(where, dtype=torch.float64), name="tiny")


# Heads whose steps cost little and are often accepted draft in nearly all rounds, and a lookup extends their chains;
# with others, all three take turns.
CASES = [
    ("eagle3", "block", False),
    ("dspark", "token", False),
    ("medusa", "block", True),
    *(
        pytest.param(*each, marks=pytest.mark.slow)
        for each in (("dflash2", "gumbel", False), ("mtp", "block", False), ("mtp", "block", True))
    ),
]


@pytest.mark.grid(1)
@pytest.mark.parametrize(("name", "rule", "extends"), CASES)
def test_the_distribution_with_a_head_a_lookup_and_nothing_in_turns(name, rule, extends, tmp_path, monkeypatch):
    """By enumeration, with chains that a lookup extends, too."""
    target = qwen(tmp_path / "target") if name == "mtp" else tiny_llama()
    spec = "mtp" if name == "mtp" else f"{name}:{WRITERS[name](tmp_path / 'head', target)}"
    monkeypatch.setattr(auto_module, "LEAST", 1)
    cost, rate, length = (0.05, 0.9, 4) if extends else (0.2, 0.6, 3)
    seen, extensions = set(), []

    def make():
        drawn = make_drafter(spec, target=target, draft=None, stopper=f"auto:{cost}")
        drawn.stopper.limit, drawn.stopper.assumed = 1, AcceptanceRates(rate, rate)
        lookup = SuffixDrafter(2, threshold=0.0, shared=False)
        drafter = AutoDrafter([CandidateDrafter(spec, drawn.stopper, iter([drawn]))], lookup, DraftCosts(0.05))
        spent = drafter.spent

        def noting(time):
            choice = drafter._choice
            seen.add("lookup" if choice.lookups else "head" if choice.source and time.depth else "none")
            extensions.extend(drafter._drawn_tokens)
            spent(time)

        drafter.spent = noting
        return drafter

    tolerance = 3e-7 if name == "mtp" else 1e-7  # the delta rule works in float32
    options = {"length": length, "tolerance": tolerance, "prompt": (0, 2, 1, 0, 2)}
    assert_output_distribution(target, make, rule, learns=True, **options)
    assert extensions if extends else seen == {"none", "lookup", "head"}, "each was chosen somewhere"


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", WRITERS)
def test_a_named_head_is_a_source_and_greedy_text_is_that_of_plain_decoding(name, tmp_path):
    """In a batch, in which a lookup and the head draft; the head is read before the first prompt."""
    folder = WRITERS[name](tmp_path / "head", embedded_target())
    plain = Engine.load("embedded:target", drafter="none", check=False).generate(TEXTS, GREEDY)
    named = {"drafter": f"auto:eagle:{folder}"} if name == "eagle" else {"draft": str(folder)}
    for options in ({}, {"drafter": "auto"}):
        made = Engine.load("embedded:target", check=False, **{**options, **named})
        assert made.drafter.name == "auto"
        assert [one.name for one in made.drafter.sources] == [f"{name}:{folder}", "quantized:4"]
        head = made.drafter.sources[0]
        assert head.drafter is not None, "made at once"
        counts = []
        propose = head.drafter.propose

        def counting(requests, rng, propose=propose, counts=counts):
            drafts = propose(requests, rng)
            counts.append(sum(map(len, drafts)))
            return drafts

        head.drafter.propose = counting
        found = made.generate(TEXTS, GREEDY)
        assert [one.token_ids for one in found] == [one.token_ids for one in plain]
        assert sum(counts) > 0
        assert not head.unable


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text"])
def test_prediction_layers_of_the_target_are_taken_without_a_name(name, tmp_path):
    folder = str(written(tmp_path, name))
    options = {"dtype": "float32", "check": False}
    plain = Engine.load(folder, drafter="none", **options).generate(PROMPTS, GREEDY)
    made = Engine.load(folder, **options)
    assert "mtp" in [one.name for one in made.drafter.sources]
    found = made.generate(PROMPTS, GREEDY)
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    source = next(one for one in made.drafter.sources if one.name == "mtp")
    assert source.stopper.shared_rates.counts, "it drafted"
    fixed = Engine.load(folder, stopper="fixed:2", **options)
    assert (fixed.drafter.name, fixed.drafter.stopper.name) == ("mtp", "fixed:2")


# --- what is at hand --------------------------------------------------------------------------------------------------


def test_a_target_without_prediction_layers_and_one_whose_layer_is_refused(tmp_path, caplog):
    load = lambda folder: load_backend(str(folder), LoadOptions(dtype="float32"))  # noqa: E731
    without = load(written(tmp_path / "without", "qwen3_5_text", change=lambda _: {}))
    with caplog.at_level(logging.WARNING):
        made = make_drafter("auto", target=without, draft=None, stopper="auto")
    assert "mtp" not in [one.name for one in made.sources]
    assert not caplog.text
    several = load(
        written(
            tmp_path / "several",
            "qwen3_5_text",
            change=lambda own: {**own, "mtp.layers.1.input_layernorm.weight": own["mtp.norm.weight"].clone()},
        )
    )
    for stopper in ("auto", "fixed:2"):
        caplog.clear()
        made = make_drafter("auto", target=several, draft=None, stopper=stopper)
        assert "drafter mtp cannot be used" in caplog.text
        assert "several layers mtp.layers.*: expected one" in caplog.text
    assert made.name != "mtp"


def test_a_head_promises_no_more_tokens_than_it_drafts(tmp_path):
    """A block of five places, of which four draft; a stopper that plans more would take the head for a better one."""
    target = embedded_target()
    folder = published.dflash(tmp_path / "head", target)
    for spec in (f"dflash:{folder}", f"auto:dflash:{folder}"):
        assert make_drafter(spec, target=target, draft=None, stopper="auto").stopper.limit == 4
    chain = published.eagle3(tmp_path / "chain", target)
    assert make_drafter(f"eagle3:{chain}", target=target, draft=None, stopper="auto").stopper.limit == 16


def test_with_another_stopper_or_rule_the_named_head_is_taken_or_refused(tmp_path):
    folder = published.dspark(tmp_path / "head", embedded_target())
    made = Engine.load("embedded:target", str(folder), stopper="predicted:0.1", check=False)
    assert (made.drafter.name, made.drafter.stopper.name) == ("dspark", "predicted:0.1")
    with pytest.raises(UserError, match="rule greedy_block is exact only for drafts of constant length"):
        Engine.load("embedded:target", str(folder), verifier="greedy_block", check=False)


@pytest.mark.parametrize("argument", ["4", "ngram:4", "model", "quantized:4", "auto", "eagle3:HEADx3"])
def test_what_is_no_head_of_one_chain_is_refused(argument):
    with pytest.raises(UserError, match=r"drafter auto: expected the drafter of a head|drafter: expected one of"):
        make_drafter(f"auto:{argument}", target=embedded_target(), draft=None, stopper="auto")


def test_a_head_that_does_not_fit_is_an_error_and_no_warning(tmp_path):
    folder = published.eagle3(tmp_path / "head", tiny_llama())
    with pytest.raises(UserError, match="expected a target with hidden states of width"):
        Engine.load("embedded:target", str(folder), check=False)
    with pytest.raises(UserError, match="expected the directory or hub id of a head"):
        Engine.load("embedded:target", drafter="auto:eagle3", check=False)


def test_the_draft_of_transformers_generate_may_be_a_head(tmp_path):
    model = embedded_model("target")
    folder = published.eagle3(tmp_path / "head", HFBackend(model, name="target"))
    ids = torch.tensor([[5, 9, 2, 7, 11, 3]])
    asked = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(ids, custom_generate=speculative(draft=str(folder), check=False), **asked)
    assert torch.equal(found, model.generate(ids, **asked))
    assert make_verifier("block").lossless
