"""Tiny models of every architecture generate what transformers generates, or are refused (see tests/architectures)."""

import random

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from support.architectures import check as check_module
from support.architectures.check import COMPOSITIONS, Generated, check, verdict
from support.architectures.configurations import configurations
from support.architectures.reference import LENGTHS, Reference
from support.architectures.table import check_quietly, exact_names, page, read_records
from support.programs import Mistakes

EVERY = {configuration.name: configuration for configuration in configurations()}
CHAINS, TREES = ("ngram:4", "model"), ("batch", "chains:2")
FAMILIES = {
    "bloom": TREES,
    "cohere2": CHAINS,
    "deepseek_v3": CHAINS,
    "falcon, alibi": TREES,
    "gemma2": TREES,
    "granitemoehybrid": CHAINS,
    "llama4_text, layers without rotary embedding, attention scaled by position": CHAINS,
    "mistral": TREES,
    "olmo_hybrid": CHAINS,
    "phi3, rope longrope": TREES,
    "qwen3, window from layer 1": CHAINS,
}
LATER = {"dory": ("model",), "sarvam_mla": ("chains:2",)}  # of later versions of transformers than the pinned one


@pytest.mark.grid(4)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_few_families_generate_what_transformers_generates(name):
    result = check(EVERY[name], compositions=FAMILIES[name])
    assert (result.outcome, result.detail) == ("exact", "")
    assert set(FAMILIES[name]) == {run.partition(", ")[2] for run in result.compositions}
    assert all(0 < accepted < 1 for accepted in result.acceptance.values()), "drafts must be rejected now and then"


@pytest.mark.parametrize("name", LATER)
def test_families_of_later_versions_generate_what_transformers_generates(name):
    if name not in EVERY:
        pytest.skip("this version of transformers does not have it")
    result = check(EVERY[name], compositions=LATER[name])
    assert (result.outcome, result.detail) == ("exact", "")
    assert set(LATER[name]) == {run.partition(", ")[2] for run in result.compositions}


def test_a_model_with_states_of_its_own_is_decoded_plainly():
    result = check(EVERY["rwkv"])
    assert result.outcome == "plain"
    assert any("keeps its past in its own form" in note for note in result.notes)
    assert set(result.compositions) == {"plain, alone", "plain, batch"}


def test_a_model_that_is_neither_drafted_for_nor_decoded_plainly_is_refused():
    result = check(EVERY["xlstm"])
    assert result.outcome == "refused"
    assert "keeps its past in its own form" in result.detail
    assert "nor can it be decoded plainly" in result.detail


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_every_configuration_is_exact_or_refused(name):
    result = check_quietly(EVERY[name])
    assert result.outcome not in {"wrong", "crash"}, result.detail
    if name in exact_names():
        assert result.outcome == "exact", f"it was exact before: {result.detail}"


# --- the check itself -------------------------------------------------------------------------------------------------


def test_every_model_type_is_in_the_table():
    assert {configuration.model_type for configuration in EVERY.values()} == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_names_are_unique_and_those_that_must_stay_exact_exist():
    assert len(EVERY) == len(configurations())
    assert set(exact_names()) <= set(EVERY)
    assert set(FAMILIES) <= set(exact_names())


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("mistake", "composition"),
    [
        ("mask_one_slot_short", "alone"),
        ("mask_one_slot_far", "model"),
        ("window_one_too_wide", "alone"),
        ("siblings_seen", "chains:2"),
        ("nodes_positioned_by_slot", "chains:2"),
        ("path_left_where_it_was", "chains:2"),
    ],
)
def test_mistakes_are_seen(mistake, composition, monkeypatch):
    monkeypatch.setattr(check_module, "LeanBackend", None)
    monkeypatch.setattr(check_module, "supports", lambda _: "not here")
    monkeypatch.setattr("draftproof.backends.hf.probe.Probe.check", lambda *_: None)
    getattr(Mistakes, mistake)(monkeypatch)
    result = check(EVERY["gemma2"], compositions=(composition,))
    assert result.outcome == "wrong", result


def reference_of(rows):
    tokens = [row.argmax(-1).tolist() for row in rows]
    return Reference(tokens=tokens, logits=rows)


def test_tokens_are_compared_before_logits_and_near_ties_do_not_count():
    source = random.Random(0)
    prompts = [[source.randrange(4, 9) for _ in range(3)] for _ in LENGTHS]
    rows = [torch.eye(9)[torch.tensor([4, 5, 6])] for _ in LENGTHS]
    right = reference_of(rows)
    assert verdict(Generated(right.tokens), prompts, right) == "exact"
    other = [list(tokens) for tokens in right.tokens]
    other[2][1] = 8
    assert verdict(Generated(other), prompts, right) == "wrong: prompt of 60, new token 1 is 8, not 5"
    rows[2][1, 8] = 1 - 5e-5
    assert verdict(Generated(other), prompts, right).startswith("tie: prompt of 60, new token 1")
    seen = {(*prompts[3], 4): torch.eye(9)[5] + 0.01}
    assert "right, but its logits are off" in verdict(Generated(right.tokens, seen), prompts, right)
    assert verdict(Generated([tokens[:2] for tokens in right.tokens]), prompts, right).startswith(
        "wrong: prompt of 3: 2 new"
    )


def test_every_composition_has_a_drafter_and_a_rule_of_the_engine():
    assert all(len(parts) == 3 for parts in COMPOSITIONS.values())


def test_records_survive_a_line_that_was_cut_off(tmp_path):
    file = tmp_path / "records.jsonl"
    file.write_text('{"name": "a", "outcome": "wrong"}\n{"name": "a", "outcome": "exact"}\n{"name": "b", "outc')
    assert read_records(file) == {"a": {"name": "a", "outcome": "exact"}}


def test_the_page_counts_outcomes_and_shows_details():
    record = {
        "type": "llama",
        "variant": "default",
        "outcome": "wrong",
        "detail": "hf, alone: a | b",
        "notes": ["a note"],
        "compositions": {"lean, alone": "exact"},
    }
    text = page([record, {**record, "outcome": "exact", "detail": ""}])
    assert "| wrong | 1 |" in text
    assert "| llama | default | lean | none | wrong | hf, alone: a \\| b; a note |" in text
