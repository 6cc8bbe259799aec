"""The plug-in inside vLLM 0.32 on a CPU, with tiny random models; needs an environment with vLLM.

    pytest -m slow tests/integrations/test_vllm.py

Each engine runs in a process of its own. A chi-square test fails if a right rule would give such a statistic with
probability ALPHA = 1e-6 or less; there are eight, so a right plug-in had a chance of 8e-6 to fail when the seeds were
chosen. vLLM without the plug-in fails the same test, which is its negative control.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import support

pytest.importorskip("vllm")

from transformers import LlamaConfig, LlamaForCausalLM

from draftproof import Engine, SamplingParams
from draftproof.backends.loading.in_memory import backend_in_memory
from draftproof.bench.estimate import bootstrap
from draftproof.engine.verifier_parts import make_verifier
from draftproof.integrations.vllm import seams, second_runner
from support.chi_square import ALPHA, chi_square

pytestmark = pytest.mark.slow
DRIVER = Path(support.__file__).with_name("vllm_driver.py")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
PROPOSER = {"method": "custom_class", "model": "draftproof.integrations.vllm.Proposer", "num_speculative_tokens": 4}
SMALL = 8  # vocabulary of the models whose distributions are tested
PROMPT = [1, 5, 3, 5, 3, 6]


def save(folder, vocab, near=None, noise=0.0, seed=0):
    """A random model with lively rows; a draft model is another one with noise on its weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=vocab,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=256,
            bos_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=False,
        )
        model = LlamaForCausalLM(config)
        others = list(model.parameters() if near is None else near.parameters())
        with torch.no_grad():
            for own, other in zip(model.parameters(), others, strict=True):
                if own.ndim > 1 and near is None:
                    own.normal_(std=0.25 if own.shape[0] == vocab else 0.12)
                elif near is not None:
                    own.copy_(other + noise * other.std() * torch.randn_like(other) if own.ndim > 1 else other)
    model.eval().save_pretrained(folder)
    return model.eval()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Targets and draft models: `wide` of 64 tokens, `small` of 8."""
    root, made = tmp_path_factory.mktemp("models"), {}
    for name, vocab in (("wide", 64), ("small", SMALL)):
        made[name] = save(root / name, vocab)
        save(root / f"{name}-draft", vocab, made[name], 0.15, seed=1)
    return root, made


def drafting(root, name, length=3, **options):
    """A speculative config with a draft model."""
    sampled = {"draft_sample_method": "probabilistic"}
    model = {"method": "draft_model", "model": str(root / f"{name}-draft"), "num_speculative_tokens": length}
    return model | sampled | options


def run(tmp_path, root, name, lists, *, rule=None, speculative=None, options=None, **job):
    """What vLLM answers to lists of (prompt, parameters)."""
    section = {} if rule is None else {"rule": rule}
    engine = {"additional_config": {"draftproof": section | (options or {})}, **job.pop("engine", {})}
    if speculative is not None:
        engine["speculative_config"] = speculative
    requests = [[{"prompt": prompt, "params": params} for prompt, params in each] for each in lists]
    given, out = tmp_path / "job.json", tmp_path / "out.json"
    given.write_text(json.dumps({"model": str(root / name), "engine": engine, "lists": requests, **job}))
    command = [sys.executable, str(DRIVER), str(given), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(out.read_text()) | {"log": done.stdout + done.stderr}


# --- gumbel: the text follows from the seed ---------------------------------------------------------------------------


SEEDED = [
    *(([1, 5, 9, 5, 9, 7], {"temperature": 1.0, "max_tokens": 24, "seed": seed}) for seed in range(12)),
    *(([1, 3, 4, 8], {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "max_tokens": 24, "seed": s}) for s in range(6)),
    *(([1, 6, 2 + n], {"temperature": 0.0, "max_tokens": 24}) for n in range(3)),
]


@pytest.fixture(scope="module")
def plain(models, tmp_path_factory):
    """Plain decoding in vLLM with the noise of `gumbel`."""
    root, _ = models
    return run(tmp_path_factory.mktemp("plain"), root, "wide", [SEEDED], rule="gumbel")["tokens"][0]


@pytest.mark.parametrize("kind", ["ngram", "draft model", "greedy drafts", "proposer"])
def test_gumbel_gives_the_text_of_plain_decoding(kind, models, plain, tmp_path):
    root, _ = models
    speculative = {
        "ngram": NGRAM,
        "draft model": drafting(root, "wide"),
        "greedy drafts": drafting(root, "wide") | {"draft_sample_method": "greedy"},
        "proposer": PROPOSER,
    }[kind]
    found = run(tmp_path, root, "wide", [SEEDED], rule="gumbel", speculative=speculative)
    assert found["tokens"][0] == plain
    assert found["counters"][0]["num_accepted_tokens"] > 0


def test_gumbel_gives_the_text_of_our_own_engine(models, plain):
    _, made = models
    engine = Engine.assemble(backend_in_memory(made["wide"]), None, None, drafter="none", rule=make_verifier("gumbel"))
    for (prompt, params), tokens in zip(SEEDED, plain, strict=True):
        wanted = engine.generate([prompt], SamplingParams(**params, ignore_eos=True))[0]
        assert list(wanted.token_ids) == tokens


def test_tensor_parallel_ranks_agree(models, plain, tmp_path):
    root, _ = models
    engine = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    for rule in ("gumbel", "block"):
        found = run(
            tmp_path,
            root,
            "wide",
            [SEEDED],
            rule=rule,
            speculative=drafting(root, "wide") if rule == "gumbel" else NGRAM,
            engine=engine,
        )
        assert found["counters"][0]["num_accepted_tokens"] > 0
        greedy = slice(None) if rule == "gumbel" else slice(18, None)
        assert found["tokens"][0][greedy] == plain[greedy]


def test_a_seed_gives_the_same_text_again_and_alone(models, tmp_path):
    """With rules that are not `gumbel` too, as long as the drafts follow from the request's own text."""
    root, _ = models
    mixed = [[1, 2, 3, 2, 3], {"temperature": 1.0, "max_tokens": 24}]
    lists = [SEEDED[:4], [mixed, *SEEDED[:4], mixed], *([one] for one in SEEDED[:4])]
    found = run(tmp_path, root, "wide", lists, rule="block", speculative=NGRAM)["tokens"]
    assert found[0] == found[1][1:5] == [one[0] for one in found[2:]]


# --- distributions ----------------------------------------------------------------------------------------------------


def p_value(model, texts, temperature=1.0, top_k=0):
    """Of texts of three tokens after PROMPT against the distribution that transformers' logits give."""
    share = torch.zeros(SMALL, SMALL, SMALL, dtype=torch.float64)
    contexts = [[*PROMPT, *more] for size in range(3) for more in itertools.product(range(SMALL), repeat=size)]
    rows = {}
    with torch.no_grad():
        for size, group in itertools.groupby(contexts, len):
            several = list(group)
            logits = model(torch.tensor(several)).logits[:, -1].double() / temperature
            if top_k:
                logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
            rows[size] = logits.softmax(-1)
    share = rows[6][0][:, None, None] * rows[7][:, :, None] * rows[8].view(SMALL, SMALL, SMALL)
    counts = torch.zeros(SMALL**3, dtype=torch.int64)
    for a, b, c in texts:
        counts[(a * SMALL + b) * SMALL + c] += 1
    return chi_square(counts, share.flatten())


def sampled(number, *, seeded=False, **params):
    """Requests for four tokens, so that three of them come from whole rounds."""
    return [(PROMPT, {"max_tokens": 4, **params} | ({"seed": n} if seeded else {})) for n in range(number)]


@pytest.mark.parametrize("rule", ["token", "block", "gumbel"])
@pytest.mark.parametrize("kind", ["draft model", "proposer"])
def test_short_texts_have_the_target_s_distribution(rule, kind, models, tmp_path):
    root, made = models
    speculative = drafting(root, "small") if kind == "draft model" else PROPOSER
    lists = [[*sampled(3000, seeded=rule != "gumbel"), *sampled(3000)], sampled(4000, temperature=0.7, top_k=3)]
    found = run(tmp_path, root, "small", lists, rule=rule, speculative=speculative)["tokens"]
    assert p_value(made["small"], [text[:3] for text in found[0]]) > ALPHA
    assert p_value(made["small"], [text[:3] for text in found[1]], 0.7, 3) > ALPHA


def test_vllm_on_a_cpu_needs_the_repair(models, tmp_path):
    """vLLM's own rule with n-gram drafts: right with the plug-in, wrong without it."""
    root, made = models
    for plugin in (True, False):
        found = run(tmp_path, root, "small", [sampled(6000, temperature=0.7)], speculative=NGRAM, plugin=plugin)
        assert found["changed"] is plugin
        value = p_value(made["small"], [text[:3] for text in found["tokens"][0]], 0.7)
        assert value > ALPHA if plugin else value < ALPHA


# --- accepted tokens --------------------------------------------------------------------------------------------------


def test_block_verification_accepts_more_than_vllm_s_own_rule(models, tmp_path):
    """The 95% interval of the ratio of tokens per target call is above 1; batches of equal requests are paired."""
    root, _ = models
    lists = [
        [([1, *context], {"max_tokens": 48}) for context in itertools.product([batch], range(64))]
        for batch in range(24)
    ]
    pairs = []
    for method in ("standard", "block"):
        speculative = drafting(root, "wide", 6, rejection_sample_method=method)
        counters = run(tmp_path, root, "wide", lists, speculative=speculative)["counters"]
        steps = zip([{"num_drafts": 0, "num_accepted_tokens": 0}, *counters], counters, strict=False)
        pairs.append([1 + _gain("num_accepted_tokens", step) / _gain("num_drafts", step) for step in steps])
    ratio = bootstrap(list(zip(*pairs, strict=True)), lambda rows: sum(b for _, b in rows) / sum(a for a, _ in rows))
    assert ratio.low > 1, f"{sum(pairs[0]) / 24:.3f} tokens per target call by vLLM, {sum(pairs[1]) / 24:.3f} by block"


def _gain(name, step):
    return step[1][name] - step[0][name]


# --- what it leaves alone ---------------------------------------------------------------------------------------------


def test_an_unknown_version_is_left_alone(models, tmp_path):
    root, _ = models
    found = run(tmp_path, root, "wide", [SEEDED[-3:]], rule="block", speculative=NGRAM, known=["0.99"])
    assert not found["changed"]
    (line,) = [line for line in found["log"].splitlines() if "draftproof does not know" in line]
    assert "0.32" in line
    assert "it changes nothing" in line


def test_wrong_options_end_the_start_with_a_reason(models, tmp_path):
    root, _ = models
    with pytest.raises(AssertionError, match=r"rule: expected one of token, block, gumbel, got 'spectr'"):
        run(tmp_path, root, "wide", [SEEDED[-1:]], rule="spectr")


# --- the second model runner, whose kernels run in Triton's interpreter -----------------------------------------------


def test_the_second_runner_emits_what_its_plain_sampler_draws(monkeypatch):
    pytest.importorskip("triton")
    import triton.language
    import vllm.triton_utils

    import triton

    monkeypatch.setattr(vllm.triton_utils, "triton", triton)
    monkeypatch.setattr(vllm.triton_utils, "tl", triton.language)
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    made = torch.Generator().manual_seed(2)
    counts, first, vocab = [2, 0, 3, 3], [10, 20, 5, 7], 50
    rows = [(request, place) for request, count in enumerate(counts) for place in range(count + 1)]
    logits = 2 * torch.randn(len(rows), vocab, generator=made)
    owner = torch.tensor([request for request, _ in rows], dtype=torch.int32)
    pos = torch.tensor([first[request] + place for request, place in rows])
    temperature, seeds = torch.tensor([1.0, 0.7, 0.0, 1.0]), torch.tensor([3, 4, 5, 6])
    plain = [
        int(gumbel_sample(logits[i : i + 1], owner[i : i + 1], temperature, seeds, pos[i : i + 1], False, False))
        for i in range(len(rows))
    ]
    assert plain[5] == int(logits[5].argmax())  # temperature 0
    drafted = [
        0,
        *plain[0:2],
        0,
        0,
        plain[4],
        (plain[5] + 1) % vocab,
        plain[6],
        0,
        *[(x + 1) % vocab for x in plain[8:11]],
    ]
    bounds = torch.tensor([0, 3, 4, 8, 12], dtype=torch.int32)
    states = SimpleNamespace(temperature=SimpleNamespace(gpu=temperature), seeds=SimpleNamespace(gpu=seeds))
    sampler = SimpleNamespace(
        sampling_states=states, use_fp64_gumbel=False, apply_sampling_params=lambda given, *_: given
    )
    verifier = SimpleNamespace(sampler=sampler, num_speculative_steps=4)
    tokens = torch.tensor(drafted)
    arguments = (logits, None, tokens, pos, bounds, owner, None, owner, owner, None, tokens)
    _, found, number = second_runner.verify(verifier, *arguments)
    assert number.tolist() == [3, 1, 2, 1]
    for request, start in enumerate(bounds[:-1].tolist()):
        size = int(number[request])
        assert found[request, :size].tolist() == plain[start : start + size]


def test_the_second_runner_has_the_seams_that_are_changed():
    assert seams.missing(*seams._SECOND_SEAMS) == ""
