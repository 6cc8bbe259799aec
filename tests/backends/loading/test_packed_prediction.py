"""Prediction layers `mtp.*` whose matrices are packed: they draft in the checkpoint's own numbers."""

import pytest
import torch

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed
from draftproof.backends.heads.published.mtp import has_prediction_layers, mtp_backend
from draftproof.backends.loading.load import load
from draftproof.backends.loading.options import LoadOptions
from draftproof.backends.products.packed_linear import LinearSlice, StoredProduct
from draftproof.engine.drafter_parts import make_drafter
from draftproof.engine.verifier_parts import make_verifier
from support.gguf_modules import module_model
from support.packed_checkpoints import checkpoint, off, with_prediction
from support.qwen_mtp import rows, tensors_of

TOKENS = [5, 9, 2, 7, 11, 3, 60, 41, 17, 50]
PROMPTS = [[5, 9, 2, 7] * 4, [8, 8, 1], [70, 12, 33, 4, 4]]
AT = "mtp.layers.0."


def written(folder, method, change=lambda own: own):
    """A checkpoint of Qwen3.5, and the numbers that its prediction layer stands for."""
    config = module_model("qwen35").config
    checkpoint(folder, method, 64, config=config)
    return with_prediction(folder, method, change(tensors_of(config)))


def read(folder, **options):
    return load(str(folder), LoadOptions(dtype="float32", **options)).backend


def drafted(target):
    """The states of the target, and logits of a draft after the seventh token and the further ones."""
    head, owner = mtp_backend(target), target.open()
    session = head.follow(owner)
    target.forward([Feed(owner, TOKENS[:7])])
    found = [head.forward([Feed(session, TOKENS[1:8])])[0].logits[-1]]
    found += [head.forward([Feed(session, [token])])[0].logits[-1] for token in TOKENS[8:]]
    return owner.states_at(range(7)), torch.stack(found)


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("method", "options", "most"),
    [
        ("nf4", {}, 1e-5),
        *((method, {"activations": "float"}, 1e-5) for method in ("gptq", "awq", "compressed-tensors", "w8a16-packed")),
        ("gptq", {}, 0.05),
    ],
)
@torch.inference_mode()
def test_drafts_are_those_of_the_numbers_that_it_stands_for(method, options, most, tmp_path):
    stands = written(tmp_path, method)
    target = read(tmp_path, **options)
    assert has_prediction_layers(target)
    states, found = drafted(target)
    every = torch.arange(target.vocab_size)

    def by_hand(own):
        config = target.model.config.get_text_config()
        return rows(own, config, target.embed(every), target.output_rows(every), states, TOKENS)

    assert off(found, by_hand(stands)) < most
    enorm, hnorm = (f"mtp.pre_fc_norm_{kind}.weight" for kind in ("embedding", "hidden"))
    assert off(found, by_hand({**stands, enorm: stands[hnorm], hnorm: stands[enorm]})) > 0.05, "negative control"


def test_its_matrices_stay_packed(tmp_path):
    written(tmp_path, "gptq")
    target = read(tmp_path)
    layers = target.prediction.read(target.model).layers.modules()
    kept = [each.product for each in layers if isinstance(each, LinearSlice)]
    assert len(kept) == 7
    assert all(isinstance(each, StoredProduct) for each in kept)


@pytest.mark.parametrize("method", ["gptq", "nf4"])
def test_texts_are_those_of_plain_decoding(method, tmp_path):
    written(tmp_path, method)
    target = read(tmp_path)
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=12, temperature=temperature, seed=4, ignore_eos=True)
        plain = Engine(target, None, make_verifier("gumbel")).generate(PROMPTS, params)
        drafter = make_drafter("mtp", target=target, draft=None, stopper="fixed:3")
        made = Engine(target, drafter, make_verifier("gumbel")).generate(PROMPTS, params)
        assert [each.token_ids for each in made] == [each.token_ids for each in plain]
        assert all(each.stats.num_draft_tokens > each.stats.num_drafts > 0 for each in made)


def _without(part):
    return lambda own: {name: value for name, value in own.items() if part not in name}


REFUSED = {
    "a missing matrix": (_without("v_proj"), "lacks mtp.layers.0.self_attn.v_proj.weight"),
    "a missing norm": (_without("mtp.norm"), "lacks mtp.norm.weight"),
    "another shape": (
        lambda own: {**own, f"{AT}mlp.up_proj.weight": own[f"{AT}mlp.up_proj.weight"][:-64].contiguous()},
        "its mtp.layers.0.mlp.up_proj.weight has the shape .448, 256., not .512, 256.",
    ),
    "more": (lambda own: {**own, f"{AT}more.weight": own["mtp.norm.weight"].clone()}, "has mtp.layers.0.more.weight"),
    "several layers": (
        lambda own: {**own, "mtp.layers.1.input_layernorm.weight": own["mtp.norm.weight"].clone()},
        "several layers",
    ),
    "its own embedding": (
        lambda own: {**own, "mtp.embed_tokens.weight": own["mtp.fc.weight"].clone()},
        "has mtp.embed_tokens.weight beside",
    ),
}


@pytest.mark.grid(2)
@pytest.mark.parametrize("what", REFUSED)
def test_other_layers_are_refused_in_words_and_plain_decoding_goes_on(what, tmp_path):
    change, message = REFUSED[what]
    written(tmp_path / "other", "gptq", change)
    written(tmp_path / "whole", "gptq")
    target = read(tmp_path / "other")
    with pytest.raises(UserError, match=f"drafter mtp: .*{message}"):
        make_drafter("mtp", target=target, draft=None, stopper="fixed:2")
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    made, plain = (Engine(each).generate(PROMPTS, params) for each in (target, read(tmp_path / "whole")))
    assert [each.token_ids for each in made] == [each.token_ids for each in plain]
