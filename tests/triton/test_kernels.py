"""Kernels agree with the torch functions, keep the distributions exact, and compile for CUDA: without a GPU.

They run through Triton's interpreter. Where there is a GPU, `TRITON_INTERPRET=0 pytest tests/triton/test_kernels.py`
runs the comparisons on it. As a script this file compiles every kernel, since Triton decides once a process whether it
compiles or interprets.
"""

import contextlib
import importlib.util
import itertools
import math
import os
import subprocess
import sys
import warnings

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed: pip install 'draftproof[triton]' (Linux only)", allow_module_level=True)

from draftproof import reference, rng
from draftproof.audit.distributions import as_paths
from draftproof.errors import UserError
from draftproof.functional import chain, coupling, kseq_select, spectr_verify, trie_block_verify
from draftproof.rng import TorchRng
from draftproof.testing import total_variation
from draftproof.triton import blocks, choose, draw
from draftproof.triton import chain as chain_kernels
from draftproof.triton import coupling as coupling_kernels
from support.distributions import KINDS, Toy, _pair, rule_distribution

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
CLOSE = {torch.float32: 2e-6, torch.float64: 1e-14}
DTYPES = pytest.mark.parametrize("dtype", CLOSE, ids=str)
distributions_need_the_interpreter = pytest.mark.skipif(
    not INTERPRETED, reason="distributions are enumerated on CPU tensors"
)


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Kernels are on, rows of more than 16 entries have several blocks; the names of the kernels that ran."""
    monkeypatch.setenv(choose.VARIABLE, "interpret" if INTERPRETED else "1")
    monkeypatch.setattr(blocks, "BLOCK", 16)
    names, plain = [], choose._kernel

    def recorded(module, function):
        names.append(function.__name__)
        return plain(module, function)

    monkeypatch.setattr(choose, "_kernel", recorded)
    return names


def pairs(rows, vocab, dtype, seed=0):
    """Rows of p and q: every one of KINDS, in turns."""
    gen = torch.Generator().manual_seed(seed)
    kinds = [kind for kind in KINDS if kind != "disjoint" or vocab > 1]
    made = [_pair(kind, vocab, gen, dtype) for kind, _ in zip(itertools.cycle(kinds), range(rows), strict=False)]
    return torch.stack([p for p, _ in made]).to(DEVICE), torch.stack([q for _, q in made]).to(DEVICE)


def chains(rows, n, vocab, dtype, seed=0):
    """tokens, q, p and lengths of a ragged batch; rows of q beyond a row's length are zeros."""
    p, q = pairs(rows * (n + 1), vocab, dtype, seed)
    p, q = p.reshape(rows, n + 1, vocab), q.reshape(rows, n + 1, vocab)[:, :n].clone()
    gen = torch.Generator().manual_seed(seed)
    tokens = torch.multinomial(q.reshape(-1, vocab).double().cpu(), 1, generator=gen).reshape(rows, n).to(DEVICE)
    lengths = n - torch.arange(rows, device=DEVICE) % (n + 1)
    q[torch.arange(n, device=DEVICE) >= lengths.unsqueeze(-1)] = 0
    return tokens, q, p, lengths


def uniforms(*shape, seed=0):
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@contextlib.contextmanager
def kernels_off():
    with pytest.MonkeyPatch.context() as without:
        without.setenv(choose.VARIABLE, "0")
        yield


def error(function, *args):
    """How far the kernel is from the torch function, as a share of the largest entry; 0 for equal indices."""
    found = function(*args)
    with kernels_off():
        expected = function(*args)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        if not found.is_floating_point():
            return float((found != expected).any())
        if function is coupling.kseq_gamma:
            found, expected = both_sides(found, *args), both_sides(expected, *args)
    if not torch.isfinite(found).all():  # as when entries are left unwritten
        return math.inf
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-3))


def both_sides(gamma, p, q, k, weight=None):
    """The sides of the equation whose root gamma is: where p is nearly q, many gammas solve it up to rounding."""
    plan = coupling.kseq_plan(p, q, k, weight, gamma=gamma)
    return torch.stack([plan.accept, gamma * plan.accept / plan.share.clamp(min=1e-300)])


def cases(vocab, dtype, n=3):
    """One call of every function that a kernel stands in for."""
    tokens, q, p, lengths = chains(8, n, vocab, dtype)
    scale = uniforms(8, n + 1)
    scale[::3] = 1
    kept = (torch.arange(8, device=DEVICE) * 5 % 7).minimum(lengths)
    rows_p, rows_q = pairs(16, vocab, dtype)
    draws = 1 + torch.arange(16, device=DEVICE) // 2
    weight = uniforms(16, seed=1)
    weight[:8], weight[8] = 1, 0
    weights = rows_p * uniforms(16, seed=2).unsqueeze(-1).to(dtype)
    yield chain.surplus_mass, (p[:, 1 : n + 1], q, scale[:, 1:])
    yield chain.bonus_weights, (p, q, tokens, kept, lengths, scale[:, 0])
    yield chain.bonus_weights, (p, None, tokens, kept, lengths, scale[:, 0])
    yield chain.bonus_weights, (p, q[:, :0], tokens[:, :0], kept * 0, lengths * 0, scale[:, 0])
    yield coupling.capped_mass, (rows_p, rows_q, weight * 4)
    yield coupling.kseq_gamma, (rows_p, rows_q, draws, weight)
    yield coupling.kseq_gamma, (rows_p, rows_q, 4)
    yield rng.inverse_cdf, (weights, uniforms(16, seed=3))
    yield rng.inverse_cdf, (p, uniforms(8, n + 1, seed=4))


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    ("vocab", "n", "dtype"),
    [
        pytest.param(*shape, dtype, marks=[pytest.mark.slow] * ((row + column) % 2))
        for row, shape in enumerate([(1, 2), (5, 1), (33, 2), (300, 1)])
        for column, dtype in enumerate(CLOSE)
    ],
    ids=str,
)
def test_kernels_say_what_torch_says(vocab, n, dtype, launched, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 128 if vocab > 100 else 16)
    for function, args in cases(vocab, dtype, n):
        assert error(function, *args) <= CLOSE[dtype], function.__name__
        assert launched.pop() == function.__name__
    assert not launched


def test_every_kernel_has_a_case():
    called = {function.__name__ for function, _ in cases(5, torch.float64)}
    public = {
        name
        for module in (chain_kernels, coupling_kernels, draw)
        for name, found in vars(module).items()
        if callable(found) and getattr(found, "__module__", "") == module.__name__ and name[0] != "_"
    }
    assert public == called


@pytest.mark.grid(1)
@pytest.mark.parametrize(("block", "vocab"), [(1, 3), pytest.param(8, 9, marks=pytest.mark.slow), (64, 64)])
def test_any_block_will_do(block, vocab, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", block)
    for function, args in cases(vocab, torch.float32, 1):
        assert error(function, *args) <= CLOSE[torch.float32], function.__name__


def test_rows_of_a_batch_equal_rows_alone():
    tokens, q, p, lengths = chains(6, 3, 33, torch.float32)
    scale = uniforms(6, 3)
    batch = chain.surplus_mass(p[:, 1:], q, scale)
    gamma = coupling.kseq_gamma(p[:, 0], q[:, 0], 4)
    bonus = chain.bonus_weights(p, q, tokens, lengths // 2, lengths, scale[:, 0])
    for i in range(6):
        row = slice(i, i + 1)
        assert torch.equal(chain.surplus_mass(p[row, 1:], q[row], scale[row]), batch[row])
        assert torch.equal(coupling.kseq_gamma(p[row, 0], q[row, 0], 4), gamma[row])
        alone = chain.bonus_weights(p[row], q[row], tokens[row], lengths[row] // 2, lengths[row], scale[row, 0])
        assert torch.equal(alone, bonus[row])


WRONG = {
    "half of each row": (blocks, "block_of", lambda right: lambda vocab: max(right(vocab) // 2, 1)),
    "one pass of the search": (
        coupling_kernels,
        "kseq_gamma",
        lambda right: lambda *args, **_: right(*args, passes=1),
    ),
    "a cap on every ratio": (coupling_kernels, "_most", lambda _: lambda _: 0.9),
    "the token residual": (
        chain_kernels,
        "bonus_weights",
        lambda right: lambda *args: right(*args[:-1], torch.ones_like(args[-1])),
    ),
    "the row before": (
        chain_kernels,
        "bonus_weights",
        lambda right: lambda p, q, t, kept, *rest: right(p, q, t, (kept - 1).clamp(min=0), *rest),
    ),
    "a uniform a little less": (draw, "inverse_cdf", lambda right: lambda weights, u: right(weights, u - 0.02)),
    "unscaled surplus": (
        chain_kernels,
        "surplus_mass",
        lambda right: lambda p, q, scale: right(p, q, torch.ones_like(scale)),
    ),
}


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernels_are_seen(name, monkeypatch):
    """Negative controls: the comparison above fails for each of these, or it proves nothing."""
    module, attribute, wrong = WRONG[name]
    broken = wrong(getattr(module, attribute))
    if module is blocks:  # the grid stays right, so that half of each row goes unread
        module = chain_kernels
    monkeypatch.setattr(module, attribute, broken)
    called = [case for case in cases(20, torch.float32, 2) if hasattr(module, case[0].__name__)]
    assert max(error(function, *args) for function, args in called) > 100 * CLOSE[torch.float32]


@pytest.mark.grid(2)
@DTYPES
@pytest.mark.parametrize("rule", [chain.token_verify, chain.block_verify])
def test_chain_rules_decide_as_without_kernels(rule, dtype, launched):
    for vocab, n, masses in ((5, 1, False), (20, 3, False), (20, 3, True)):
        tokens, q, p, lengths = chains(12, n, vocab, dtype, seed=vocab)
        drawn = (tokens, None if masses else q, p)
        found = [rule(*drawn, rng=TorchRng(seed), lengths=lengths, validate=False) for seed in range(2)]
        with kernels_off():
            plain = [rule(*drawn, rng=TorchRng(seed), lengths=lengths, validate=False) for seed in range(2)]
        for left, right in zip(found, plain, strict=True):
            assert torch.equal(left.accepted, right.accepted)
            assert torch.equal(left.token, right.token)
    assert {"bonus_weights", "inverse_cdf"} <= set(launched)
    assert ("surplus_mass" in launched) == (rule is chain.block_verify)


@pytest.mark.grid(1)
@DTYPES
def test_kseq_decides_as_without_kernels(dtype, launched):
    p, q = pairs(16, 20, dtype)
    tokens = torch.multinomial(q.double().cpu(), 4, replacement=True, generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(DEVICE)
    found = [kseq_select(tokens, q, p, rng=TorchRng(seed)) for seed in range(2)]
    with kernels_off():
        plain = [kseq_select(tokens, q, p, rng=TorchRng(seed)) for seed in range(2)]
    for left, right in zip(found, plain, strict=True):
        assert torch.equal(left.accepted, right.accepted)
        assert torch.equal(left.token, right.token)
    assert {"kseq_gamma", "capped_mass", "inverse_cdf"} == set(launched)


def test_the_division_factor_is_the_upper_end():
    p, q = pairs(16, 20, torch.float64)
    weight = uniforms(16, seed=1)
    assert (coupling.kseq_gamma(p, q, torch.zeros(16, device=DEVICE)) == 1).all()
    for k in (1, 2, 7):
        found = coupling.kseq_gamma(p, q, k, weight)
        with kernels_off():
            root = coupling.kseq_gamma(p, q, k, weight, passes=60)
            accept, most = both_sides(found, p, q, k, weight)
        assert (accept <= most + 1e-14).all()
        assert (found - root).max() < 1e-2


def test_block_acceptance_is_the_references():
    tokens, q, p, _ = chains(16, 4, 20, torch.float64)
    q[q.sum(-1) == 0] = 1 / 20  # padding is drawn from here: the reference knows no padding
    running, h = chain.block_acceptance(tokens, q, p, torch.full((16,), 4, device=DEVICE))
    for row in range(16):
        expected = reference.block_acceptance(tokens[row].tolist(), q[row].tolist(), p[row].tolist())
        assert running[row].tolist() == pytest.approx(expected[0], abs=1e-13)
        assert h[row].tolist() == pytest.approx(expected[1], abs=1e-9)


token, block = as_paths(chain.token_verify), as_paths(chain.block_verify)


def distance(rule, count, length, toy):
    return total_variation(rule_distribution(rule, toy, count, length), toy.target_distribution(length + 1))


@pytest.mark.grid(2)
@distributions_need_the_interpreter
@pytest.mark.parametrize(
    ("rule", "count", "length", "kind"),
    [
        *((rule, 1, 2, kind) for rule in (token, block) for kind in ("peaked", "sparse", "equal", "onehot")),
        (spectr_verify, 2, 1, "sparse"),
        (trie_block_verify, 2, 1, "sparse"),
    ],
)
def test_output_distributions_stay_exact(rule, count, length, kind, launched):
    assert distance(rule, count, length, Toy.random(1, kind=kind, depth=length)) < 1e-12
    assert launched


@distributions_need_the_interpreter
def test_a_token_residual_in_the_block_kernel_is_found(monkeypatch):
    wrong = WRONG["the token residual"][2](chain_kernels.bonus_weights)
    monkeypatch.setattr(chain_kernels, "bonus_weights", wrong)
    # most models hide this mistake (see test_rule_mutants.py); this one shows it
    assert distance(block, 1, 2, Toy.random(22, kind="peaked", depth=2)) > 1e-3


def test_a_grid_of_uniforms_draws_each_index_by_its_weight(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 4)
    weights = torch.tensor([0, 3, 0, 0, 17, 1, 0, 21, 22, 0], dtype=torch.float32, device=DEVICE)
    goals = (torch.arange(64, dtype=torch.float64, device=DEVICE) + 0.5) / 64
    drawn = rng.inverse_cdf(weights.expand(64, -1), goals)
    assert torch.equal(torch.bincount(drawn, minlength=10), weights.long())


@pytest.mark.parametrize("last", [0.5, 5e-324])
def test_the_largest_uniform_draws_the_last_index_with_weight(last):
    row = torch.tensor([[0.0] * 20 + [last] + [0.0] * 20], dtype=torch.float64, device=DEVICE)
    largest = torch.tensor([1 - 2.0**-53], dtype=torch.float64, device=DEVICE)
    assert rng.inverse_cdf(row, largest).item() == 20
    assert rng.inverse_cdf(row, largest * 0 + 2.0**-53).item() == 20


CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def test_who_uses_kernels(monkeypatch):
    expected = {
        "auto": choose.Implementation.COMPARED,
        "": choose.Implementation.COMPARED,
        "0": choose.Implementation.TORCH,
        "1": choose.Implementation.KERNEL,
    }
    for value, by in expected.items():
        monkeypatch.setenv(choose.VARIABLE, value)
        assert choose.implementation(CUDA) is by
        assert choose.implementation(CPU) is choose.Implementation.TORCH
    monkeypatch.setenv(choose.VARIABLE, "yes")
    with pytest.raises(UserError, match="expected one of auto, 0, 1, interpret, got 'yes'"):
        choose.implementation(CPU)


def test_the_interpreter_must_be_asked_for_in_time(monkeypatch):
    monkeypatch.setenv(choose.VARIABLE, "interpret")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(UserError, match="set TRITON_INTERPRET=1 before the start"):
        choose.implementation(CPU)


def test_without_triton(monkeypatch):
    monkeypatch.setattr(choose, "installed", lambda: False)
    monkeypatch.setenv(choose.VARIABLE, "auto")
    assert choose.implementation(CUDA) is choose.Implementation.TORCH
    for value in ("1", "interpret"):
        monkeypatch.setenv(choose.VARIABLE, value)
        with pytest.raises(UserError, match="Triton is not installed"):
            choose.implementation(CUDA)


@choose.fused("draw")
def doubled(rows):
    return rows * 2


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (lambda rows: rows * 2, None),
        (lambda rows: rows * 2.01, "differs from the torch function"),
        (lambda rows: rows[:0], "differs from the torch function"),
        (lambda _: 1 / 0, "division by zero"),
    ],
)
def test_the_first_use_is_compared(kernel, said, monkeypatch):
    fresh = choose.fused("draw")(doubled.__wrapped__)
    calls = []

    def counted(rows):
        calls.append(rows)
        return kernel(rows)

    monkeypatch.setattr(choose, "implementation", lambda _: choose.Implementation.COMPARED)
    monkeypatch.setattr(choose, "_kernel", lambda *_: counted)
    assert fresh(torch.ones(0)).shape == (0,)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        results = [fresh(torch.full((3,), 1e-5)) for _ in range(3)]
    assert all(torch.equal(result, torch.full((3,), 2e-5)) for result in results)
    assert [said in str(warning.message) for warning in seen] == ([] if said is None else [True])
    assert len(calls) == (4 if said is None else 1)


def run(code, **environment):
    left = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", choose.VARIABLE)}
    return subprocess.run(
        [sys.executable, *code], env={**left, **environment}, capture_output=True, text=True, check=False
    )


VERIFY = """
import sys, torch
from draftproof.functional import block_verify
from draftproof.rng import TorchRng
row = torch.full((1, 3, 5), 0.2)
assert block_verify(torch.tensor([[1, 2]]), row[:, 1:], row, rng=TorchRng(0)).accepted.item() == 2
print("triton" in sys.modules)
"""


@pytest.mark.grid(1)
@pytest.mark.parametrize(("value", "loaded"), [("auto", "False"), ("interpret", "True")])
def test_triton_is_loaded_where_it_is_used(value, loaded):
    done = run(["-c", VERIFY], **{choose.VARIABLE: value})
    assert (done.stdout.strip(), done.stderr) == (loaded, "")


@pytest.mark.slow
def test_every_kernel_compiles_for_cuda(tmp_path):
    done = run([__file__], TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert {line.split()[0] for line in done.stdout.splitlines()} == {
        "_surplus", "_residual", "_fall_back", "_capped", "_gamma", "_sums", "_inverse",
    }  # fmt: skip


def compile_all():
    """Compile every kernel to machine code, as called for ordinary tensors and with every number 1, in both dtypes."""
    from triton.backends.compiler import GPUTarget

    import triton

    outs = {chain_kernels: None, coupling_kernels: "*fp64", draw: "*i64"}
    for (module, out), dtype, ones in itertools.product(outs.items(), ("fp32", "fp64"), (False, True)):
        kinds = dict.fromkeys(("scale", "ratio", "sums", "mass", "draws", "weight", "uniforms"), "*fp64")
        kinds |= dict.fromkeys(("tokens", "accepted", "lengths"), "*i64")
        kinds |= dict.fromkeys(("p", "q", "weights"), f"*{dtype}") | {"out": out or f"*{dtype}"}
        for kernel in vars(module).values():
            if not isinstance(kernel, triton.JITFunction) or "BLOCK" not in kernel.arg_names:
                continue  # the others are called by kernels
            for masses in (False, True) if "POINT_MASSES" in kernel.arg_names else (False,):
                fixed = {"BLOCK": 1 if ones else 4096, "BLOCKS": 64, "PASSES": 12, "POINT_MASSES": masses}
                fixed["MOST"] = torch.finfo(torch.float32 if dtype == "fp32" else torch.float64).max / 4
                fixed |= {n: 1 for n in kernel.arg_names if n not in kinds and n not in fixed and (ones or "_id" in n)}
                fixed = {name: value for name, value in fixed.items() if name in kernel.arg_names}
                signature = {n: "constexpr" if n in fixed else kinds.get(n, "i32") for n in kernel.arg_names}
                places = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
                source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=places)
                made = triton.compile(source, target=GPUTarget("cuda", 80, 32))
                print(kernel.__name__, dtype, len(made.asm["cubin"]))  # noqa: T201 - read by the test


if __name__ == "__main__":
    compile_all()
