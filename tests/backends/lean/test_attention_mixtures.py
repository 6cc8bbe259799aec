"""Models that are like Llama but for their experts, by the lean forward: transformers' logits, same bits, drafts."""

import copy
import functools
import itertools

import pytest
import torch
import transformers

from draftproof import SamplingParams, UserError
from draftproof.backends.base import rounding
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.hf.probe import Probe
from draftproof.backends.lean.hybrid import HybridLayer
from draftproof.backends.lean.mixture_modules import mixture_of
from draftproof.backends.lean.module_backend import LeanModulesBackend, why_unread
from draftproof.backends.loading.by_name import load_backend
from draftproof.backends.loading.in_memory import backend_in_memory
from support.chain_rows import assert_same_bits, off, read
from support.helpers import engine, random_model
from support.native_levels import needs_native

pytestmark = needs_native
IDS = [5, 9, 2, 7, 11, 3, 80, 41, 17, 8, 26, 77, 30, 31, 32]
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": None,
    "initializer_range": 0.1,
}
CHOSEN = {"num_experts": 8, "num_experts_per_tok": 3}
WITH_SHARED = {"shared_expert_intermediate_size": 48, "moe_intermediate_size": 32}
FAMILIES = {
    "qwen3_moe": transformers.Qwen3MoeConfig(**SHAPE, **CHOSEN, head_dim=16, moe_intermediate_size=32),
    "qwen3_moe, one layer dense": transformers.Qwen3MoeConfig(
        **SHAPE, **CHOSEN, head_dim=16, moe_intermediate_size=32, mlp_only_layers=[1]
    ),
    "qwen2_moe": transformers.Qwen2MoeConfig(**SHAPE, **CHOSEN, **WITH_SHARED),
    "mixtral": transformers.MixtralConfig(**SHAPE, num_local_experts=8, num_experts_per_tok=3, sliding_window=6),
    "olmoe": transformers.OlmoeConfig(**SHAPE, **CHOSEN),  # norms of all heads together
    "granitemoe": transformers.GraniteMoeConfig(
        **SHAPE,
        num_local_experts=8,
        num_experts_per_tok=3,
        embedding_multiplier=3.0,
        logits_scaling=2.0,
        residual_multiplier=0.5,
    ),
    "granitemoeshared": transformers.GraniteMoeSharedConfig(
        **SHAPE, num_local_experts=8, num_experts_per_tok=3, shared_intermediate_size=48
    ),
}


@functools.cache
def model(name, dtype=torch.float32):
    """With norms that are not ones, so that leaving one out shows."""
    made = random_model(copy.deepcopy(FAMILIES[name]), seed=3)
    source = torch.Generator().manual_seed(1)
    for place, each in made.named_parameters():
        if "norm" in place:
            each.data.add_(0.3 * torch.randn(each.shape, generator=source))
    return made.to(dtype)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name):
    assert why_unread(model(name)) is None
    with torch.inference_mode():
        right = model(name)(torch.tensor([IDS])).logits[0]
    for pack in (True, False):
        target = LeanModulesBackend(copy.deepcopy(model(name)), pack=pack, name=name)
        assert off(read(target, target.open(), IDS[:1], IDS[1:]), right) < 1e-5


@pytest.mark.parametrize("part", ["turned", "mixture", "shared"])
def test_other_layers_have_other_logits(part, monkeypatch):
    """Negative control: a part is left out, or experts get other shares."""
    name = "qwen2_moe" if part == "shared" else "qwen3_moe"
    begin = HybridLayer.__init__

    def changed(self, *given, **more):
        begin(self, *given, **more)
        if part == "turned":
            self.turned = None
        elif part == "mixture":
            self.mixture.arguments.factor = 1.5
        else:
            self.mixture.arguments.shared_down.weight = None

    monkeypatch.setattr(HybridLayer, "__init__", changed)
    target = LeanModulesBackend(copy.deepcopy(model(name)), name=name, check=False)
    with torch.inference_mode():
        right = model(name)(torch.tensor([IDS])).logits[0]
    assert off(read(target, target.open(), IDS[:1], IDS[1:]), right) > 1e-3


@pytest.mark.parametrize("name", ["qwen3_moe", "granitemoe"])
def test_a_chain_has_the_same_bits_however_it_is_read(name):
    for dtype, pack in itertools.product((torch.float32, torch.bfloat16), (True, False)):
        target = LeanModulesBackend(copy.deepcopy(model(name, dtype)), pack=pack, name=name)
        assert (rounding(target) == "") == target.reads_all
        if pack or target.reads_all:  # else long passes are those of transformers' modules
            assert_same_bits(target, IDS * 3)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_texts_are_those_of_transformers_with_and_without_drafts(name):
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with torch.inference_mode():
        right = model(name).generate(torch.tensor([IDS]), max_new_tokens=24, do_sample=False)[0, len(IDS) :].tolist()
    target = backend_in_memory(model(name))
    assert isinstance(target, LeanModulesBackend)
    few = target.quantized(4)
    assert few.lean is not None
    for draft in (None, few):
        output = engine(target, draft, tokenizer=None, eos_token_ids=()).generate([IDS], params)[0]
        assert list(output.token_ids) == right
    assert output.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_no_fault_hides_in_the_tolerance_of_16_bits(name):
    whole = model(name, torch.bfloat16)
    probe = Probe(whole, name)
    probe.check(LeanModulesBackend(copy.deepcopy(whole), pack=True, name=name, check=False))
    for part in ("self_attn.o_proj.weight", "mlp.experts.down_proj"):
        wrong = copy.deepcopy(whole)
        with torch.no_grad():
            wrong.model.layers[1].get_parameter(part).neg_()
        with pytest.raises(UserError, match="does not reproduce its own logits"):
            probe.check(LeanModulesBackend(wrong, pack=True, name=name, check=False))


STRANGE = {
    "parts not known here (clip_qkv)": transformers.OlmoeConfig(**SHAPE, **CHOSEN, clip_qkv=0.05),
    "numbers not known here (attn_alpha_factor": transformers.MiniMaxConfig(
        **SHAPE, num_local_experts=8, num_experts_per_tok=3, layer_types=["full_attention"] * 3
    ),
}


@pytest.mark.parametrize("said", STRANGE)
def test_what_changes_sums_and_is_not_known_is_refused_by_its_parts(said):
    """Also without the check at load."""
    strange = random_model(STRANGE[said], seed=3)
    assert said in why_unread(strange)
    assert type(backend_in_memory(strange, check=False)) is HFBackend


def test_what_the_check_finds_is_left_to_transformers(tmp_path, monkeypatch):
    """Experts get other shares by mistake: backend hf reads the model, and it stays as it is."""
    whole = copy.deepcopy(model("qwen3_moe"))
    whole.save_pretrained(tmp_path)
    before = [each.clone() for each in whole.parameters()]
    begin = HybridLayer.__init__

    def changed(self, *given, **more):
        begin(self, *given, **more)
        self.mixture.arguments.factor = 1.5

    monkeypatch.setattr(HybridLayer, "__init__", changed)
    with torch.inference_mode():
        right = whole(torch.tensor([IDS])).logits[0]
    for made in (backend_in_memory(whole), load_backend(str(tmp_path))):
        assert type(made) is HFBackend
        assert off(read(made, made.open(), IDS[:1], IDS[1:]), right) < 1e-5
    assert all(torch.equal(*each) for each in zip(before, whole.parameters(), strict=True))


def test_routers_are_compared_where_rounding_changes_no_choice():
    """With 256 experts and scores in 16 bits, many rows have a neighbour within rounding of the last one chosen."""
    sizes = {"hidden_size": 512, "num_hidden_layers": 6, "initializer_range": 0.02, "intermediate_size": 32}
    config = transformers.Qwen3MoeConfig(
        **SHAPE | sizes, num_experts=256, num_experts_per_tok=8, head_dim=16, moe_intermediate_size=8
    )
    wide = random_model(config, seed=5).to(torch.bfloat16)
    for layer in wide.model.layers:
        mixture_of(layer.mlp)
