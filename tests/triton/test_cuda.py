"""On a CUDA device: texts, graphs, kernels and draws against transformers and the CPU. Without a device: skipped.

`pytest -m cuda` runs these tests alone. tests/triton/test_pretended_cuda.py is about the same code without a device.
"""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from draftproof import Engine, SamplingParams
from draftproof.backends.base import Feed
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean.backend import LeanBackend
from draftproof.backends.lean.graph_backend import GraphBackend
from draftproof.engine.drafter_parts import make_drafter
from draftproof.engine.verifier_parts import make_verifier
from draftproof.rng import TorchRng
from support.chi_square import ALPHA, chi_square
from support.helpers import CONFIGS, embedded_model, random_model

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
BACKENDS = {"hf": HFBackend, "lean": LeanBackend, "graphs": GraphBackend}
PROMPTS = [[3, 4, 5], [7], list(range(20, 60)), [9, 8, 40, 77, 2, 1, 5, 6]]
TOKENS = 32
NEAR = 1e-3  # logits this near may change places between two ways to add up the same numbers


def generated(model, ids):
    """Greedy tokens of transformers' own generation."""
    prompt = torch.tensor([ids], device=model.device)
    made = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        max_new_tokens=TOKENS,
        pad_token_id=0,
        eos_token_id=None,
    )
    return made[0, len(ids) :].tolist()


@functools.cache
def expected(family):
    """A model on the device and transformers' continuations of the prompts."""
    model = random_model(CONFIGS[family]()).cuda()
    return model, [generated(model, ids) for ids in PROMPTS]


def assert_same(model, prompts, found, wanted, near=NEAR):
    """Equal tokens, up to the first place where the two best logits are the same to rounding."""
    for ids, mine, theirs in zip(prompts, found, wanted, strict=True):
        if mine == theirs:
            continue
        place = next(i for i, (one, other) in enumerate(zip(mine, theirs, strict=True)) if one != other)
        with torch.inference_mode():
            rows = model(torch.tensor([[*ids, *theirs[:place]]], device=model.device), use_cache=False).logits
        best, second = rows[0, -1].float().topk(2).values.tolist()
        assert best - second < near, (
            f"token {place} of {len(theirs)} differs, and the best logit leads by {best - second}"
        )


def texts(engine, prompts, params):
    return [list(output.token_ids) for output in engine.generate(prompts, params)]


@pytest.mark.parametrize("drafter", ["none", "ngram:4", "early_exit:1", "early_exit:1x3"])
@pytest.mark.parametrize(
    ("family", "backend"),
    [(family, "hf") for family in CONFIGS]
    + [(family, kind) for family in ("llama", "qwen2", "qwen3", "mistral", "gemma3") for kind in ("lean", "graphs")],
)
def test_greedy_text_is_that_of_transformers(family, backend, drafter):
    model, wanted = expected(family)
    target = BACKENDS[backend](random_model(CONFIGS[family]()).cuda(), name=family)
    part = make_drafter(drafter, target=target, draft=None, stopper="fixed:3")
    engine = Engine(target, part, make_verifier("trie_block" if part.branching else "block"))
    found = texts(engine, PROMPTS, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
    assert_same(model, PROMPTS, found, wanted)


PAIRS = [
    *[("model", rule) for rule in ("block", "token", "greedy_block", "match")],
    *[(drafter, rule) for drafter in ("chains:3", "tree:3x2") for rule in ("trie_block", "spectr", "multi_round")],
    ("chains:3", "traversal"),
]


@pytest.mark.parametrize(("drafter", "verifier"), PAIRS)
@pytest.mark.parametrize("backend", ["lean", "graphs"])
def test_the_embedded_pair_keeps_the_text(drafter, verifier, backend, tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTPROOF_HOME", str(tmp_path))
    options = {"dtype": "float32", "device": "cuda", "backend": backend}
    plain = Engine.load("embedded:target", **options)
    engine = Engine.load(
        "embedded:target", "embedded:draft", drafter=drafter, verifier=verifier, stopper="fixed:3", **options
    )
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    assert_same(embedded_model("target").cuda(), PROMPTS, texts(engine, PROMPTS, greedy), texts(plain, PROMPTS, greedy))
    drawn = SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_tokens=TOKENS, ignore_eos=True)
    together = texts(engine, PROMPTS, drawn)
    assert together == [texts(engine, [ids], drawn)[0] for ids in PROMPTS]  # a seed's text does not depend on a batch


@pytest.mark.parametrize("backend", ["hf", "lean", "graphs"])
@pytest.mark.parametrize("drafter", ["quantized:4", "quantized:8", "quantized:4x2"])
def test_rounded_weights_draft_for_their_target(drafter, backend, tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTPROOF_HOME", str(tmp_path))
    options = {"dtype": "bfloat16", "device": "cuda", "backend": backend}
    plain = Engine.load("embedded:stories", drafter="none", **options)
    verifier = "trie_block" if "x" in drafter else "block"
    engine = Engine.load("embedded:stories", drafter=drafter, verifier=verifier, stopper="fixed:3", **options)
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    found = engine.generate(PROMPTS, greedy)
    assert_same(
        plain.target.model, PROMPTS, [list(each.token_ids) for each in found], texts(plain, PROMPTS, greedy), near=0.2
    )
    calls = sum(each.stats.num_target_calls for each in found)
    assert len(PROMPTS) * TOKENS > 1.5 * calls, "rounded weights draft much of what the whole ones say"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bits", [4, 8])
def test_products_with_rounded_weights(bits, dtype):
    from draftproof.triton import weights

    for outs, ins in ((40, 320), (1000, 576), (64, 8960), (5000, 96), (70000, 64)):
        plain = torch.randn(outs, ins, device="cuda", dtype=getattr(torch, dtype))
        made = weights.quantize(plain, bits, 32)
        dense = made.to_dense().double()
        assert (dense - plain.double()).norm() < {4: 0.1, 8: 0.01}[bits] * plain.double().norm()
        for rows in (1, 2, 16, 37):
            x = torch.randn(rows, ins, device="cuda", dtype=plain.dtype)
            wanted = x.double() @ dense.T
            assert (weights.product(x, made).double() - wanted).norm() < 0.01 * wanted.norm(), (outs, ins, rows)
        few = weights.product(x[: weights.MOST], made)
        assert torch.equal(few, weights.product(x[: weights.MOST], made))
        for rows in (1, 2, 3, 5):  # a row's sums do not depend on the others
            assert torch.equal(few[:rows], weights.product(x[:rows], made)), (outs, ins, rows)


def test_the_default_is_recorded_and_drafts_by_itself():
    engine = Engine.load("embedded:stories", device="cuda")
    assert (engine.target.kind, engine.target.device.type) == ("graphs", "cuda")
    assert [one.name for one in engine.drafter.sources] == ["quantized:4"]


def test_weights_of_a_recorded_model_are_changed():
    old, new = (random_model(CONFIGS["llama"](), seed=seed).cuda() for seed in (0, 1))
    made = GraphBackend(old).with_weights(new.state_dict())
    wanted = texts(Engine(HFBackend(new)), PROMPTS, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True))
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    for _ in range(2):  # passes are recorded when their shapes come again
        assert_same(new, PROMPTS, texts(Engine(made), PROMPTS, greedy), wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("backend", ["hf", "lean", "graphs"])
def test_half_precision_is_near_float32(dtype, backend):
    made = BACKENDS[backend](random_model(CONFIGS["qwen3"](), dtype=getattr(torch, dtype)).cuda())
    plain = HFBackend(random_model(CONFIGS["qwen3"](), dtype=getattr(torch, dtype)).float())
    rows = []
    for each in (made, plain):
        session = each.open()
        each.forward([Feed(session, PROMPTS[2])])
        rows.append(each.forward([Feed(session, [5])])[0].logits.float().cpu())
    assert (rows[0] - rows[1]).norm() < 0.05 * rows[1].norm()


def test_a_round_of_graphs_copies_nothing_that_waits():
    backend = GraphBackend(random_model(CONFIGS["llama"]()).cuda())
    session = backend.open()
    for token in range(4):
        backend.forward([Feed(session, [token])])
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.forward([Feed(session, [5])])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_draws_are_those_of_the_cpu():
    weights = torch.rand(64, 5000, generator=torch.Generator().manual_seed(1)) ** 8
    here, there = TorchRng(3).categorical(weights), TorchRng(3).categorical(weights.cuda())
    assert (here == there.cpu()).float().mean() > 0.98  # sums in another order may give the neighbour


SAMPLED = [
    *[("model", rule) for rule in ("token", "block")],
    ("early_exit:1", "block"),
    ("chains:2", "trie_block"),
    ("ngram:3", "block"),
]


def first_two(engine, temperature=1.0):
    """The first two tokens of many texts."""
    engine.max_batch = 64
    found = []
    for seed in range(60):
        params = SamplingParams(temperature=temperature, max_tokens=3, ignore_eos=True, seed=seed, n=64)
        found += [list(each.token_ids[:2]) for each in engine.generate([PROMPTS[3]], params)]
    return torch.tensor(found)


@functools.cache
def shares(most=12):
    """The likeliest first tokens, and the probabilities of (first, second) of those, then of any other first token."""
    model, prompt = embedded_model("target").double(), torch.tensor([PROMPTS[3]])
    with torch.inference_mode():
        first = model(prompt).logits[0, -1].softmax(-1)
        best = first.topk(most).indices
        after = torch.cat([prompt.expand(most, -1), best.unsqueeze(1)], 1)
        both = first[best].unsqueeze(1) * model(after).logits[:, -1].softmax(-1)
    return best, torch.cat((both.flatten(), (1 - first[best].sum()).view(1)))


def chance(drawn):
    """The chance of draws that differ as much from the target's probabilities."""
    best, probs = shares()
    vocab, place = (len(probs) - 1) // len(best), (drawn[:, :1] == best).int()
    cells = torch.where(place.any(1), place.argmax(1) * vocab + drawn[:, 1], len(probs) - 1)
    return chi_square(torch.bincount(cells, minlength=len(probs)), probs)


@pytest.mark.parametrize(("drafter", "verifier"), SAMPLED)
def test_samples_follow_the_target(drafter, verifier, tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTPROOF_HOME", str(tmp_path))
    parts = {"drafter": drafter, "verifier": verifier, "dtype": "float32", "device": "cuda"}
    stopper = {} if drafter.startswith("ngram") else {"stopper": "fixed:2"}
    draft = "embedded:draft" if drafter in ("model", "chains:2") else None
    assert chance(first_two(Engine.load("embedded:target", draft, **parts, **stopper))) > ALPHA


def test_other_samples_are_seen():
    engine = Engine.load("embedded:target", drafter="none", dtype="float32", device="cuda")
    assert chance(first_two(engine, temperature=0.8)) < ALPHA


def test_the_kernels_run_compiled():
    """tests/triton/test_kernels.py in a process of its own: Triton decides once whether it compiles or interprets."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_kernels.py", "test_layer_kernels.py"],
        cwd=Path(__file__).parent,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
