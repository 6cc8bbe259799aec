"""The prediction layer in checkpoints of Qwen3-Next and Qwen3.5: found by its tensors, and computed as by hand."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed, Session, unread
from draftproof.backends.heads.published.mtp import MtpNet, _as_loaded, mtp_backend
from draftproof.backends.heads.published.mtp_head import mtp_head_backend
from draftproof.backends.heads.published.mtp_qwen import HybridMtpNet
from draftproof.backends.hf.generate import PlainBackend
from draftproof.backends.lean.snapshots import LeanSnapshotBackend
from draftproof.backends.products import packed_linear
from draftproof.backends.products.packed_linear import RescoredProduct
from draftproof.engine.drafter_parts import make_drafter
from draftproof.engine.verifier_parts import make_verifier
from draftproof.tree import TokenTree
from support import head_references
from support.architectures.tiny import tiny_config, tiny_model
from support.head_references import QWEN, read_folder, write_qwen_head
from support.helpers import assert_other_rows_are_seen, assert_output_distribution
from support.qwen_mtp import DATA, in_blocks, own_tensors, rows, written, written_with

IDS = json.loads((DATA / "provenance.json").read_text())["tokens"]
TOKENS = [5, 9, 2, 7, 11, 3, 60, 41, 17, 50, 22, 8, 30, 90, 4]
PROMPTS = [[5, 9, 2, 7, 11, 3, 60, 41], [8, 8, 1], [70, 12, 33, 4, 4]]
GREEDY = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
# Heads as many as those of Qwen3.8-27B, but narrow: 6 queries for a key, and 3 values for a key of the delta rule.
QWEN38 = {"num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 48}


def expected(target, folder, owner, count, tokens, tensors=None):
    """The rows by hand, from the first states of the target's session."""
    model = target.model
    return rows(
        own_tensors(folder) if tensors is None else tensors,
        model.config.get_text_config(),
        model.get_input_embeddings().weight,
        target.output_rows(torch.arange(target.vocab_size)),
        owner.states_at(range(count)),
        tokens,
    )


def drafted(head, session, known, further):
    found = [head.forward([Feed(session, known)])[0].logits[-1]]
    return torch.stack(found + [head.forward([Feed(session, [token])])[0].logits[-1] for token in further])


def largest(found, other):
    return float((found - other).abs().max() / other.abs().max())


@pytest.mark.parametrize("name", QWEN)
def test_the_first_step_is_that_of_speculators(name):
    assert head_references.qwen_first_step(name).share < 1e-5


@pytest.mark.grid(3)
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        *((name, {}) for name in QWEN),
        ("qwen3_5", {"multimodal": True}),
        ("qwen3_5_moe", {"multimodal": True}),
        ("qwen3_5_text", {"layer_types": ["full_attention", "linear_attention"]}),
        ("qwen3_5_text", QWEN38),
    ],
)
@torch.inference_mode()
def test_every_step_is_that_of_a_direct_computation(name, fields, tmp_path):
    """Before and after accepted tokens are read again; steps after the first read the layer's own normed states."""
    folder = written(tmp_path, name, **fields)
    target = read_folder(folder)
    head = mtp_backend(target)
    owner = target.open()
    session = head.follow(owner)
    wrong = [*TOKENS[7:9], 70, 71]
    target.forward([Feed(owner, TOKENS[:7], TokenTree.chain(torch.tensor(wrong)))])
    for known in (10, 13):
        unread(owner, TOKENS[:known])
        session.rewind()
        pending = unread(session, TOKENS[1:known])
        found = drafted(head, session, pending, TOKENS[known : known + 2])
        by_hand = expected(target, folder, owner, known - 1, TOKENS[: known + 2])
        assert largest(found, by_hand) < 1e-5
        assert found.abs().max() > 0.3
        target.forward([Feed(owner, unread(owner, TOKENS[:known]), TokenTree.chain(torch.tensor(TOKENS[known:])))])


@pytest.mark.parametrize("name", QWEN)
@torch.inference_mode()
def test_native_code_computes_what_transformers_modules_do(name, tmp_path, monkeypatch):
    """Over a prompt and over single tokens; the second head is that of a target that native code does not read."""
    target = read_folder(written(tmp_path, name))
    native = mtp_backend(target)
    owner = target.open()
    target.forward([Feed(owner, TOKENS[:9])])
    monkeypatch.setattr(target, "lean", None)
    monkeypatch.setattr(target, "packs", False)
    heads = native, mtp_backend(target)
    assert [type(head.net) for head in heads] == [HybridMtpNet, MtpNet]
    assert 0 < largest(*(drafted(head, head.follow(owner), TOKENS[1:10], TOKENS[10:13]) for head in heads)) < 1e-5


def test_the_states_are_those_after_the_final_norm(tmp_path):
    """What the output layer scores; an exchange would only be seen in the number of accepted tokens."""
    target = read_folder(written(tmp_path, "qwen3_5_text"))
    target.record_states((2,))
    head = mtp_backend(target)
    assert head.layers == ()
    owner = target.open()
    logits = target.forward([Feed(owner, TOKENS)])[0].logits[-1]
    output = target.output_rows(torch.arange(target.vocab_size))
    assert largest(owner.states[-1] @ output.T, logits) < 1e-5
    assert largest(owner.states_of((2,))[-1] @ output.T, logits) > 0.1, "before the norm"


@pytest.mark.parametrize("name", QWEN)
@torch.inference_mode()
def test_a_layer_in_fp8_has_the_numbers_of_its_blocks(name, tmp_path):
    folder = written(tmp_path, name)
    plain, stands = own_tensors(folder), in_blocks(folder)
    target = read_folder(folder)
    head, owner = mtp_backend(target), target.open()
    target.forward([Feed(owner, TOKENS[:7])])
    found = drafted(head, head.follow(owner), TOKENS[1:8], TOKENS[8:10])
    assert largest(found, expected(target, folder, owner, 7, TOKENS[:10], stands)) < 1e-5
    assert largest(found, expected(target, folder, owner, 7, TOKENS[:10], plain)) > 1e-3, "it was rounded"
    greedy, drafter = (
        Engine(target).generate(PROMPTS, GREEDY),
        make_drafter("mtp", target=target, draft=None, stopper="fixed:3"),
    )
    outs = Engine(target, drafter, make_verifier("block")).generate(PROMPTS, GREEDY)
    assert [out.token_ids for out in outs] == [out.token_ids for out in greedy]
    assert all(out.stats.num_draft_tokens > out.stats.num_drafts > 10 for out in outs)


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_next"])
def test_the_scales_of_a_layer_are_read_where_transformers_forgot_how_it_read_the_model(name, tmp_path):
    """As it does from 5.24 on; without its scales the layer would be refused, which the next test shows."""
    folder = written(tmp_path, name)
    in_blocks(folder)
    target = read_folder(folder)
    vars(target.model).pop("_weight_conversions", None)
    assert mtp_backend(target).deepest is None


def _dequantizes_alone(conversion):
    names = [type(each).__name__ for each in getattr(conversion, "operations", [])]
    return names == ["Fp8Dequantize"]


@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_next"])
def test_a_layer_in_fp8_that_was_read_without_its_scales_is_refused(name, tmp_path):
    """As transformers does where it computes the model itself in FP8, on a GPU."""
    folder = written(tmp_path, name)
    in_blocks(folder)
    target = read_folder(folder)
    assert mtp_backend(target).deepest is None
    read = _as_loaded(target.model)._weight_conversions
    target.model._weight_conversions = [each for each in read if not _dequantizes_alone(each)]
    with pytest.raises(UserError, match="was read without its scales"):
        mtp_backend(target)


def _swapped(value, dim):
    return torch.cat(value.chunk(2, dim)[::-1], dim)


WRONG = {
    "hidden state first": lambda at: {"mtp.fc.weight": _swapped(at["mtp.fc.weight"], 1)},
    "norms that are not centred": lambda at: {name: each - 1 for name, each in at.items() if each.ndim == 1},
    "one norm not applied": lambda at: {"mtp.norm.weight": torch.zeros_like(at["mtp.norm.weight"])},
    "gates for queries": lambda at: {
        f"mtp.layers.0.self_attn.{name}.weight": _swapped(at[f"mtp.layers.0.self_attn.{name}.weight"], 0)
        for name in ("q_proj",)
    },
}


@pytest.mark.parametrize("what", WRONG)
@torch.inference_mode()
def test_another_structure_is_seen(what, tmp_path):
    """Negative control of the computation by hand."""
    folder = written(tmp_path, "qwen3_5_text")
    target, own = read_folder(folder), own_tensors(folder)
    head, owner = mtp_backend(target), target.open()
    target.forward([Feed(owner, TOKENS[:7])])
    found = drafted(head, head.follow(owner), TOKENS[1:8], [])
    other = expected(target, folder, owner, 7, TOKENS[:8], {**own, **WRONG[what](own)})
    assert largest(found, other) > 0.05


@pytest.mark.parametrize(("name", "fields"), [*((name, {}) for name in QWEN), ("qwen3_5_text", QWEN38)])
def test_greedy_output_equals_transformers_token_for_token(name, fields, tmp_path):
    """A batch of prompts of different lengths, by the name that `draftproof generate --drafter mtp` gives."""
    target = read_folder(written(tmp_path, name, **fields))
    wanted = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        made = target.model.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
        wanted.append(made[0, len(prompt) :].tolist())
    drafter = make_drafter("mtp", target=target, draft=None, stopper="fixed:3")
    outs = Engine(target, drafter, make_verifier("block")).generate(PROMPTS, GREEDY)
    assert [list(out.token_ids) for out in outs] == wanted
    assert all(out.stats.num_draft_tokens > out.stats.num_drafts > 10 for out in outs)


def enumerable(folder, name):
    """A target of three tokens in float64 with its prediction layer, and the layer's tensors."""
    where = written(folder, name, vocab=3, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float64, experts_implementation="eager")
    return LeanSnapshotBackend(model, name="tiny"), own_tensors(where)


@pytest.mark.grid(3)
@pytest.mark.parametrize("rule", ["block", "token"])
@pytest.mark.parametrize("spec", ["mtp", "mtp:HEAD"])
@pytest.mark.parametrize("name", QWEN)
def test_exact_output_distribution(name, spec, rule, tmp_path):
    """By enumeration, on models with three tokens, with their own layer and with one that speculators trains."""
    target, own = enumerable(tmp_path / "target", name)
    if spec == "mtp:HEAD":
        spec = f"mtp:{write_qwen_head(tmp_path / 'head', name, own, **target.model.config.get_text_config().to_dict())}"

    def drafter():
        return make_drafter(spec, target=target, draft=None, stopper="fixed:2")

    # The delta rule works in float32 in every dtype: 1.3e-7 apart, and 1e-16 if it is made to work in float64. So do
    # the shares of experts: 3.2e-7 apart at most, as without drafts, from which the outputs differ by 1e-16.
    tolerance = 3e-7 if name == "qwen3_5_text" else 5e-7
    assert_output_distribution(target, drafter, rule, length=3, tolerance=tolerance)
    assert_other_rows_are_seen(target, drafter, rule, length=3, tolerance=1e-4)


def test_exact_output_distribution_with_a_rounded_output_layer(tmp_path, monkeypatch):
    """Natively, where a vocabulary of three tokens is a large one, and one output is whole."""
    monkeypatch.setattr(packed_linear, "ROUGH_OUTPUTS", 3)
    monkeypatch.setattr(packed_linear, "ROUGH_SHARE", 3)
    target = read_folder(written(tmp_path, "qwen3_5_text", vocab=3, pad_token_id=0, bos_token_id=1, eos_token_id=2))

    def drafter():
        return make_drafter("mtp", target=target, draft=None, stopper="fixed:2")

    assert isinstance(drafter().model.backend.net, HybridMtpNet)
    assert_output_distribution(target, drafter, "block", length=3, tolerance=1e-5)


def test_a_large_output_layer_is_rounded_for_drafts(tmp_path, monkeypatch):
    """Other drafts' probabilities, the same likeliest tokens and text, and a target that stays whole."""
    target, made = read_folder(written(tmp_path, "qwen3_5_text")), []
    for outputs in (packed_linear.ROUGH_OUTPUTS, 50):
        monkeypatch.setattr(packed_linear, "ROUGH_OUTPUTS", outputs)
        monkeypatch.setattr(packed_linear, "ROUGH_SHARE", 3)
        drafter = make_drafter("mtp", target=target, draft=None, stopper="fixed:3")
        net = drafter.model.backend.net
        assert isinstance(net, HybridMtpNet)
        (out,) = Engine(target, drafter).generate([TOKENS[:7]], GREEDY)
        made.append((net.logits(target.embed(torch.tensor(TOKENS))), out.token_ids, out.stats.num_draft_tokens))
    (whole, *texts), (rough, *again) = made
    assert texts == again
    assert torch.equal(whole.argmax(-1), rough.argmax(-1))
    assert 0.01 < largest(rough, whole) < 0.6
    assert not isinstance(target.lean.head, RescoredProduct)


# --- heads in the layout of speculators ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", QWEN)
def test_a_head_has_the_logits_of_speculators_at_every_step(name):
    assert head_references.qwen_head(name).share < 1e-5


@pytest.mark.parametrize("name", QWEN)
def test_a_head_drafts_for_its_target(name, tmp_path):
    folder = written(tmp_path / "target", name)
    own, target = own_tensors(folder), read_folder(folder)
    config = target.model.config.get_text_config().to_dict()
    head = write_qwen_head(tmp_path / "head", name, own, **config)
    plain = Engine(target).generate(PROMPTS, GREEDY)
    drafter = make_drafter(f"mtp:{head}", target=target, draft=None, stopper="fixed:3")
    outs = Engine(target, drafter).generate(PROMPTS, GREEDY)
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    assert all(out.stats.num_draft_tokens > out.stats.num_drafts > 10 for out in outs)


def test_heads_that_do_not_fit_are_refused(tmp_path):
    folder = written(tmp_path / "target", "qwen3_5_text")
    own, target = own_tensors(folder), read_folder(folder)
    config = target.model.config.get_text_config().to_dict()

    def made(name, own=own, **fields):
        return str(write_qwen_head(tmp_path / name, "qwen3_5_text", own, **{**config, **fields}))

    other = read_folder(written(tmp_path / "other", "qwen3_next"))
    with pytest.raises(UserError, match=r"layer of type qwen3_5_text, and .* is qwen3_next"):
        mtp_head_backend(made("head"), other)
    with pytest.raises(UserError, match="expected a target with hidden states of width 48"):
        mtp_head_backend(made("wide", hidden_size=48), target)
    with pytest.raises(UserError, match=r"no mtp_layers.0.self_attn.v_proj.weight"):
        mtp_head_backend(made("less", _without(own)), target)
    with pytest.raises(UserError, match=r"does not name here: mtp_layers.0.more.weight"):
        mtp_head_backend(made("more", {**own, "mtp.layers.0.more.weight": own["mtp.norm.weight"].clone()}), target)
    with pytest.raises(UserError, match="type 'llama': expected qwen3, qwen3_next"):
        mtp_head_backend(made("llama", model_type="llama"), target)


# --- what decides, and what is refused -------------------------------------------------------------------------------


def test_the_tensors_decide_and_not_the_config(tmp_path):
    named = read_folder(written(tmp_path / "named", "qwen3_5_text", change=lambda _: {}, mtp_num_hidden_layers=1))
    with pytest.raises(
        UserError, match=r"has no prediction layer \(no tensor mtp.fc.weight\), whatever its config says"
    ):
        mtp_backend(named)
    unnamed = read_folder(written(tmp_path / "unnamed", "qwen3_5_text", mtp_num_hidden_layers=0))
    assert mtp_backend(unnamed).deepest is None, "it drafts any number of tokens"


def test_a_checkpoint_in_several_files_is_found_by_its_index(tmp_path):
    folder = written(tmp_path, "qwen3_5_text")
    tensors = load_file(folder / "model.safetensors")
    whole = mtp_backend(read_folder(folder))
    parts = {"mtp.safetensors": {}, "rest.safetensors": {}}
    for key, value in tensors.items():
        parts["mtp.safetensors" if key.startswith("mtp.") else "rest.safetensors"][key] = value
    for file, part in parts.items():
        save_file(part, folder / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: file for file, part in parts.items() for key in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    divided = mtp_backend(read_folder(folder))
    owner = Session()
    owner.remember(torch.randn(3, whole.net.width, generator=torch.Generator().manual_seed(1)))
    owner.read(TOKENS[:3])
    one, other = (head.forward([Feed(head.follow(owner), TOKENS[1:4])])[0].logits for head in (whole, divided))
    assert torch.equal(one, other)


def _beside(name, like):
    return lambda own: {**own, name: own[like].clone()}


def _without(own):
    return {key: value for key, value in own.items() if "v_proj" not in key}


def _narrow(own):
    return {**own, "mtp.layers.0.mlp.up_proj.weight": own["mtp.layers.0.mlp.up_proj.weight"][:-1].contiguous()}


REFUSED = {
    "its own embedding": (_beside("mtp.embed_tokens.weight", "mtp.fc.weight"), "has mtp.embed_tokens.weight beside"),
    "several layers": (_beside("mtp.layers.1.input_layernorm.weight", "mtp.norm.weight"), "several layers"),
    "scales of another form": (
        _beside("mtp.fc.weight_scale", "mtp.norm.weight"),
        "hold .* numbers, and its prediction",
    ),
    "a missing tensor": (_without, "cannot be read .*weights are missing"),
    "another shape": (_narrow, "cannot be read"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_layouts_are_refused(what, tmp_path):
    change, message = REFUSED[what]
    target = read_folder(written(tmp_path, "qwen3_5_text", change=change))
    with pytest.raises(UserError, match=f"drafter mtp: .*{message}"):
        mtp_backend(target)


def test_models_without_such_a_checkpoint_are_refused(tmp_path):
    own = written(tmp_path / "own", "qwen3_5_text", mtp_use_dedicated_embeddings=True)
    with pytest.raises(UserError, match="has an embedding of its own"):
        mtp_backend(read_folder(own))
    unsaved = LeanSnapshotBackend(tiny_model(tiny_config("qwen3_5_text")), name="unsaved")
    with pytest.raises(UserError, match="the checkpoint of unsaved cannot be read"):
        mtp_backend(unsaved)
    other = LeanSnapshotBackend(tiny_model(tiny_config("lfm2")), name="lfm2")
    with pytest.raises(UserError, match="lfm2 has no prediction layers of its own that are read here"):
        mtp_backend(other)


@pytest.mark.parametrize("name", ["qwen4_exp_text", "deepseek_v4"])
def test_models_whose_states_are_their_own_are_refused_whatever_is_in_mtp(name, tmp_path):
    """DeepSeek-V4 has a DSpark head there."""
    model = tiny_model(tiny_config(name))
    folder = written_with(
        tmp_path, model, {"mtp.0.markov_head.markov_w1.weight": torch.zeros(model.config.vocab_size, 4)}
    )
    with pytest.raises(
        UserError, match="speculative decoding needs a decoder-only model whose keys, values and states are in"
    ):
        read_folder(folder)
    with pytest.raises(UserError, match=f"drafted tokens cannot be taken back from {name}"):
        make_drafter("mtp", target=PlainBackend(model, name=name), draft=None, stopper="fixed:2")
