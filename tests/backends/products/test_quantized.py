"""Quantized weights: numbers and products beside float64, and a model that drafts for itself with them, exactly."""

import itertools

import pytest
import torch
import transformers

from draftproof import Engine, SamplingParams, UserError
from draftproof.backends.base import Feed
from draftproof.backends.heads.self_draft import QuantizedBackend
from draftproof.backends.hf.backend import HFBackend
from draftproof.backends.lean.backend import LeanBackend
from draftproof.backends.products import packed_linear as packed
from draftproof.backends.products.packed_linear import (
    MORE_RESCORED,
    RESCORED,
    ROUGH_BITS,
    ROUGH_GROUP,
    ROUGH_SHARE,
    PackedLinear,
    largest,
)
from draftproof.engine.drafter_parts import make_drafter, why_not
from draftproof.engine.verifier_parts import make_verifier
from draftproof.native.operations import NEIGHBOURS
from draftproof.native.tensors import BITS, GROUPS, STORED_BITS, Interleaved, Quantized
from support.helpers import CONFIGS, ROPE, assert_output_distribution, random_model
from support.lean_models import NATIVE, VARIANTS
from support.native_levels import OPERATIONS, drawn, needs_native
from support.quantized_drafts import WIDE, drafted, tiny

# --- weights ----------------------------------------------------------------------------------------------------------


def quantized(weight, bits, group):
    return OPERATIONS[weight.dtype].quantize(Interleaved.of(weight), bits, group)


@pytest.mark.parametrize(("bits", "group"), [*itertools.product(STORED_BITS, GROUPS)])
@pytest.mark.parametrize(("outs", "ins"), [(1, 2), (49, 130), (40, 256)])
def test_weights_are_near_their_numbers(outs, ins, bits, group, dtype):
    weight = drawn(1, outs, ins, dtype=dtype)
    made = quantized(weight, bits, group)
    assert made.to_dense().shape == weight.shape
    error = (made.to_dense() - weight.float()).abs()
    groups = torch.nn.functional.pad(weight.float(), (0, -ins % group)).unflatten(1, (-1, group))
    steps = (groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)
    steps = steps.repeat_interleave(group, 1)[:, :ins]
    rounding = 2**-7 * weight.abs().max()  # of scales and offsets, in bfloat16
    assert (error <= (0.51 if bits == 8 else 3.2) * steps + rounding).all()
    if ins >= 130:
        plain = (steps**2 / 12).mean()  # of rounding over the whole range
        assert (error**2).mean() < (1.6 if bits == 8 else 1.02) * plain, "narrower ranges have less error"


def test_weights_on_a_grid_of_8_bits_are_kept(dtype):
    draw = torch.Generator().manual_seed(0)
    numbers = torch.randint(0, 256, (32, 4, 32), generator=draw)
    numbers[..., 0], numbers[..., 1] = 0, 255
    scales = 2.0 ** torch.randint(-6, 0, (32, 4, 1), generator=draw)
    weight = (scales * (numbers - 128)).flatten(1)
    assert torch.equal(quantized(weight.to(dtype), 8, 32).to_dense(), weight.to(dtype).float())


def test_weights_on_a_grid_of_4_bits_are_kept(level):
    draw = torch.Generator().manual_seed(0)
    numbers, scales = (
        torch.randint(1, most, size, generator=draw) for most, size in ((15, (32, 5, 32)), (255, (32, 5)))
    )
    offsets = torch.randint(-127, 128, (32, 5), generator=draw)
    numbers[..., 0], numbers[..., 1], scales[:, 2], offsets[:, 3] = 0, 15, 255, -127
    weight = (
        offsets.unsqueeze(-1) / 16 + scales.unsqueeze(-1) / 256 * numbers
    )  # a byte each, in steps of the output's own
    assert torch.allclose(quantized(weight.flatten(1), 4, 32).to_dense(), weight.flatten(1), rtol=0, atol=1e-5)
    beside = quantized((weight + scales.unsqueeze(-1) / 512).flatten(1), 4, 32)  # offsets between two bytes
    assert not torch.allclose(beside.to_dense(), (weight + scales.unsqueeze(-1) / 512).flatten(1), rtol=0, atol=1e-3)


def test_rows_of_one_value_are_kept(dtype):
    weight = torch.full((5, 40), 0.75, dtype=dtype)
    assert torch.equal(quantized(weight, 4, 32).to_dense(), weight.float())
    assert torch.equal(quantized(0 * weight, 4, 32).to_dense(), 0 * weight.float())


# --- products ---------------------------------------------------------------------------------------------------------


def product_in_float64(x, weight):
    """Inputs and weights as numbers, multiplied in float64."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % weight.group)).unflatten(-1, (-1, weight.group))
    scales = padded.abs().amax(-1, keepdim=True) / 127
    numbers = (padded * torch.where(scales > 0, 1 / scales, 0)).round()
    inputs = (numbers.double() * scales.double()).flatten(-2)[..., : x.shape[-1]]
    return inputs @ weight.to_dense().double().T, inputs.abs() @ weight.to_dense().double().abs().T


def near(found, expected, size):
    """Whether a product is the expected one, rounded; a few inputs may be rounded to the number beside."""
    unit = torch.finfo(found.dtype).eps
    return bool(((found.double() - expected).abs() <= unit * expected.abs() + 2e-4 * size + 1e-6).all())


@pytest.mark.grid(42)
@pytest.mark.parametrize(("bits", "group"), [(2, 16), (2, 64), (4, 16), (4, 32), (4, 128), (8, 32), (8, 64)])
@pytest.mark.parametrize(("outs", "ins"), [(1, 2), (49, 130), (200, 576)])
def test_products(outs, ins, bits, group, dtype):
    product = OPERATIONS[dtype].quantized_product
    for rows in (1, 3, 4, 5, 11):
        sizes = (rows, ins), (outs, ins), (outs,), (rows, outs)
        x, weight, bias, onto = (drawn(seed, *size, dtype=dtype) for seed, size in enumerate(sizes))
        made = quantized(weight, bits, group)
        expected, size = product_in_float64(x, made)
        plain, biased = product(x, made), product(x, made, bias)
        assert near(plain, expected, size), f"{rows} rows"
        assert near(biased, expected + bias, size), f"{rows} rows"
        assert not near(plain, expected + bias, size), f"{rows} rows: a bias left out is seen"
        assert torch.equal(product(x, made, bias, onto), biased + onto), f"{rows} rows"
        if ins > group:
            shifted = Quantized(made.blocks.roll(1, 1), outs, ins, bits, group)
            assert not near(product(x, shifted), expected, size), f"{rows} rows: groups in another order are seen"


@pytest.mark.parametrize("outs", [128, 4096, 5003, 20000])
def test_the_largest_outputs_are_found_by_pieces(outs):
    logits = torch.randn(3, outs, generator=torch.Generator().manual_seed(outs))
    logits[1, :70], logits[2, -5:] = 9 + torch.arange(70) / 100, 7  # many in one piece; behind the last whole piece
    for count in (1, 5, 64):
        found = logits.gather(-1, largest(logits, count)).sort(descending=True).values
        assert torch.equal(found, logits.topk(count).values)
        assert all(len(set(row)) == count for row in largest(logits, count).tolist()), "each once"


def first_largest(rows, count):
    """The largest entries of each row, and of those that equal the last of them the first ones."""
    least = rows.topk(count).values[:, -1:]
    equal, larger = rows == least, rows > least
    return larger | (equal & (equal.cumsum(-1) <= count - larger.sum(-1, keepdim=True)))


@pytest.mark.parametrize("outs", [1, 63, 64, 65, 5003])
@pytest.mark.parametrize("blocked", [False, True])
def test_outputs_are_computed_again_where_rows_are_short_or_equal_or_not_numbers(blocked, outs, dtype, level):
    weight, bias, x = (drawn(seed, *size, dtype=dtype) for seed, size in enumerate([(outs, 66), (outs,), (4, 66)]))
    given = drawn(7, 4, outs, dtype=dtype).mul(4).round()  # many are equal
    given[1], given[2, ::3] = 2.0, float("nan")
    exact = (x.double() @ weight.double().T + bias.double()).to(dtype)
    for count in {1, min(2, outs), min(64, outs)}:
        found = given.clone()
        OPERATIONS[dtype].rescore(found, x, Interleaved.of(weight) if blocked else weight, bias, count=count)
        chosen = first_largest(given.nan_to_num(float("-inf")), count) & ~given.isnan()
        assert torch.equal(found[~chosen].nan_to_num(99.0), given[~chosen].nan_to_num(99.0))
        assert torch.allclose(found[chosen].double(), exact[chosen].double(), rtol=0.01, atol=1e-4)
        assert (found[2].isnan() == given[2].isnan()).all(), "what is not a number stays, and is refused later"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_largest_outputs_of_a_4_bit_output_layer_are_the_whole_layers(with_bias, tied, dtype, level):
    outs, ins = 9001, 66
    weight, bias, x = (drawn(seed, *size, dtype=dtype) for seed, size in enumerate([(outs, ins), (outs,), (5, ins)]))
    whole = PackedLinear(weight, bias if with_bias else None)
    rough, made = whole.quantized(4)(x), whole.quantized_output(4, weight if tied else None)(x)
    chosen = first_largest(rough, MORE_RESCORED if tied else RESCORED)
    assert torch.equal(made[~chosen], rough[~chosen])
    exact, sizes = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if with_bias:
        exact, sizes = exact + bias.double(), sizes + bias.double().abs()
    # Any order of float32 additions keeps to the first part; orders differ between processors and libraries.
    limit = (ins + 1) * torch.finfo(torch.float32).eps / 2 * sizes + torch.finfo(dtype).eps / 2 * exact.abs()

    def within(found):
        return ((found.double() - exact)[chosen].abs() <= limit[chosen]).all()

    assert within(made)
    assert within(whole(x))
    assert not within(rough), "rough ones are seen"
    if dtype == torch.float32:
        assert not within(whole(x.bfloat16().float())), "rounded inputs are seen"
    assert torch.equal(whole.quantized_output(8)(x), whole.quantized(8)(x)), "8 bits are near enough"


@pytest.mark.parametrize("blocked", [False, True])
def test_a_large_output_layer_has_2_bits_where_rows_can_be_read_alone(blocked, dtype, level, monkeypatch):
    monkeypatch.setattr(packed, "ROUGH_OUTPUTS", 2000)
    weight, x = drawn(1, 2000, 66, dtype=dtype), drawn(2, 3, 66, dtype=dtype)
    whole = PackedLinear(weight)
    made = whole.quantized_output(4, None if blocked else weight)
    assert made.weight.bits == (4 if blocked else ROUGH_BITS)
    if blocked:
        return
    rough = whole.quantized(ROUGH_BITS, ROUGH_GROUP)(x)
    chosen = first_largest(rough, 2000 // ROUGH_SHARE)
    assert torch.equal(made(x)[~chosen], rough[~chosen])
    assert torch.allclose(made(x)[chosen].float(), whole(x)[chosen].float(), rtol=0.01, atol=0.02)
    assert not torch.allclose(rough[chosen].float(), whole(x)[chosen].float(), rtol=0.01, atol=0.02)
    assert whole.quantized_output(8, weight).weight.bits == 8


@pytest.mark.parametrize("count", [1, 2, 300])
def test_choosing_outputs_stays_in_its_memory_with_any_number_of_them(count, dtype, monkeypatch):
    outs, given, empty = 200 * NEIGHBOURS + 3, [], torch.empty
    rescore = OPERATIONS[dtype].rescore  # made now: their first check needs memory, too

    def fenced(*size, **kinds):
        if kinds.get("dtype") != torch.float32:
            return empty(*size, **kinds)
        given.append(torch.full((size[0] + 4096,), 12345.0))
        return given[-1][: size[0]]

    weight, x = drawn(1, outs, 64, dtype=dtype), drawn(2, 1, 64, dtype=dtype)
    for values in (drawn(3, 1, outs, dtype=dtype), torch.full((1, outs), 2.0, dtype=dtype)):
        monkeypatch.setattr(torch, "empty", fenced)
        rescore(values.clone(), x, weight, None, count=count)
        monkeypatch.undo()
        assert given, "its memory was seen"
        assert (given[-1][-4096:] == 12345.0).all()


def test_inputs_of_any_size_and_zeros(dtype):
    made, product = quantized(drawn(1, 20, 64, dtype=dtype), 4, 32), OPERATIONS[dtype].quantized_product
    assert torch.equal(product(torch.zeros(2, 64, dtype=dtype), made), torch.zeros(2, 20, dtype=dtype))
    for scale in (1e-6, 1e6):
        x = drawn(2, 3, 64, scale=scale, dtype=dtype)
        assert near(product(x, made) / scale, *(part / scale for part in product_in_float64(x, made)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_show_in_their_row_alone(value, dtype):
    x, made = drawn(1, 5, 130, dtype=dtype), quantized(drawn(2, 20, 130, dtype=dtype), 4, 32)
    product = OPERATIONS[dtype].quantized_product
    whole = product(x, made)
    x[2, 100] = value
    found = product(x, made)
    assert not found[2].isfinite().any()
    others = [0, 1, 3, 4]
    assert torch.equal(found[others], whole[others])


def test_a_rows_product_does_not_depend_on_the_rows_beside_it_or_the_threads(dtype):
    x, made = drawn(1, 11, 576, dtype=dtype), quantized(drawn(2, 400, 576, dtype=dtype), 4, 32)
    product, threads = OPERATIONS[dtype].quantized_product, torch.get_num_threads()
    whole = product(x, made)
    for size in (1, 2, 3, 5):
        assert torch.equal(product(x[4 : 4 + size], made), whole[4 : 4 + size])
    try:
        for some in (1, 2, 3):
            torch.set_num_threads(some)
            assert torch.equal(product(x, made), whole)
            assert torch.equal(quantized(drawn(2, 400, 576, dtype=dtype), 4, 32).blocks, made.blocks)
    finally:
        torch.set_num_threads(threads)


# --- models -----------------------------------------------------------------------------------------------------------


def dense_twin(config, target, bits):
    """A transformers model whose linear weights are what the quantized ones stand for."""
    twin = random_model(config())
    part = QuantizedBackend(target, bits).part.lean
    with torch.no_grad():
        for layer, made in zip(twin.model.layers, part.layers, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            for modules, product in (
                ((attention.q_proj, attention.k_proj, attention.v_proj), made.qkv),
                ((attention.o_proj,), made.out),
                ((mlp.gate_proj, mlp.up_proj), made.gate_up),
                ((mlp.down_proj,), made.down),
            ):
                sizes = [module.out_features for module in modules]
                for module, weight in zip(modules, product.weight.to_dense().split(sizes), strict=True):
                    module.weight.copy_(weight)
                if product.bias is not None:
                    for module, bias in zip(modules, product.bias.split(sizes), strict=True):
                        module.bias = torch.nn.Parameter(bias)
        if bits == 8:  # with 4, all outputs are computed again
            twin.lm_head.weight = torch.nn.Parameter(part.head.weight.to_dense())
    return twin


@needs_native
@pytest.mark.parametrize("bits", BITS)
def test_all_weights_are_quantized_and_the_rest_is_the_models(bits, monkeypatch):
    monkeypatch.setattr(packed, "RESCORED", 97)  # all outputs
    monkeypatch.setattr(packed, "MORE_RESCORED", 97)
    config = lambda: transformers.LlamaConfig(**WIDE)  # noqa: E731
    target = LeanBackend(random_model(config()), name="llama")
    made, tokens = QuantizedBackend(target, bits), [5, 9, 2, 7, 11, 3]
    session = target.open()
    rows = made.forward([Feed(made.borrow(session), tokens)])[0].logits
    twin = dense_twin(config, target, bits)
    expected = twin(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1:]
    plain = random_model(config())(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1:]
    error = (rows - expected).norm() / expected.norm()
    assert error < 0.03, "only inputs are rounded besides"
    if bits == 4:
        assert (rows - plain).norm() / plain.norm() > 2 * error, "the weights are not the plain ones"


@needs_native
def test_the_target_overwrites_what_the_draft_wrote():
    target = LeanBackend(random_model(transformers.LlamaConfig(**WIDE)), name="llama")
    made, tokens = QuantizedBackend(target, 4), [5, 9, 2, 7, 11]
    own, alone = target.open(), target.open()
    target.forward([Feed(own, tokens[:3])])
    borrowed = made.borrow(own)
    made.forward([Feed(borrowed, [*tokens[3:], 1, 2])])
    borrowed.close()
    target.forward([Feed(alone, tokens[:3])])
    rows = [target.forward([Feed(session, tokens[3:])])[0].logits for session in (own, alone)]
    assert torch.equal(*rows)


FAMILIES = {
    "llama, biases": lambda: transformers.LlamaConfig(**WIDE, attention_bias=True, mlp_bias=True),
    "mistral, a window": lambda: transformers.MistralConfig(**WIDE, sliding_window=7),
    "qwen2, both kinds of layer": lambda: transformers.Qwen2Config(
        **WIDE, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**WIDE),
    **{name: VARIANTS[name] for name in NATIVE},
}


def in_kinds(family):
    """A family with the ways to draft; of those beside Llama's, most are slow, since products know no family."""
    often = [(4, 1, torch.bfloat16), (4, 3, torch.bfloat16)]
    often += [] if family in NATIVE else [(4, 1, torch.float32), (8, 1, torch.bfloat16)]
    for kind in itertools.product((4, 8), (1, 3), (torch.float32, torch.bfloat16)):
        if kind[:2] != (8, 3):
            yield pytest.param(family, *kind, marks=[pytest.mark.slow] * (kind not in often))


@pytest.mark.grid(6)
@needs_native
@pytest.mark.parametrize(
    ("family", "bits", "chains", "dtype"), [each for family in FAMILIES for each in in_kinds(family)]
)
def test_greedy_output_is_the_targets(family, bits, chains, dtype):
    """Prompts of uneven lengths in one batch, one of them past every window."""
    target = LeanBackend(random_model(FAMILIES[family]()).to(dtype), name=family)
    prompts, greedy = [[1, 2, 3], [7], [5, 9, 11, 4, 2, 8] * 7], SamplingParams(max_tokens=16, temperature=0)
    plain = Engine(target).generate(prompts, greedy)
    rule = make_verifier("trie_block" if chains > 1 else "block")
    outs = Engine(target, drafted(target, bits, chains=chains), rule).generate(prompts, greedy)
    assert [out.token_ids for out in outs] == [out.token_ids for out in plain]
    assert sum(out.stats.num_accepted_tokens for out in outs) > 0
    assert outs[0].drafter == f"quantized:{bits}" + ("x3" if chains > 1 else "")


@pytest.mark.grid(1)
@needs_native
@pytest.mark.parametrize(
    ("chains", "rule", "length"),
    [
        pytest.param(1, "token", 3, marks=pytest.mark.slow),
        (1, "block", 3),
        (1, "match", 2),
        pytest.param(1, "match", 3, marks=pytest.mark.slow),  # two minutes
        (2, "trie_block", 2),
        pytest.param(2, "spectr", 2, marks=pytest.mark.slow),
        pytest.param(2, "traversal", 2, marks=pytest.mark.slow),
    ],
)
def test_exact_output_distribution(chains, rule, length):
    target = tiny()
    assert_output_distribution(
        target, lambda: drafted(target, chains=chains, length=2), rule, length=length, tolerance=1e-5
    )


@pytest.mark.grid(1)
@needs_native
@pytest.mark.parametrize("rule", ["token", "block"])
def test_exact_output_distribution_with_an_output_layer_of_2_bits(rule, monkeypatch):
    monkeypatch.setattr(packed, "ROUGH_OUTPUTS", 3)
    monkeypatch.setattr(packed, "ROUGH_SHARE", 3)  # one output of three is computed again
    target = tiny(tie_word_embeddings=True)
    made = target.quantized(4)
    assert made.lean.head.weight.bits == ROUGH_BITS
    first = made.forward([Feed(made.open(), [1])])[0].logits.softmax(-1)
    own = target.forward([Feed(target.open(), [1])])[0].logits.softmax(-1)
    assert (first - own).abs().sum() > 0.01, "the draft differs, so that there is something to correct"
    assert_output_distribution(target, lambda: drafted(target, length=2), rule, length=3, tolerance=1e-5)


@needs_native
def test_a_lossy_rule_is_seen_there():
    target = tiny()
    with pytest.raises(AssertionError, match="the rules work on"):
        assert_output_distribution(target, lambda: drafted(target, length=2), "last_token", length=3, tolerance=1e-5)


@needs_native
def test_a_rule_that_remembers_rounds_is_refused():
    target, rule = tiny(), "greedy_block"
    with pytest.raises(UserError, match=r"greedy_block is exact only for drafts .* the same in every round"):
        Engine(target, drafted(target), make_verifier(rule))
    assert "the same in every round" in why_not("quantized:4", "fixed:4", rule)


@needs_native
@pytest.mark.slow
def test_a_rule_that_remembers_rounds_would_not_be_exact(monkeypatch):
    target, rule = tiny(), "greedy_block"
    monkeypatch.setattr(QuantizedBackend, "stationary", True)
    with pytest.raises(AssertionError, match="the rules work on"):
        assert_output_distribution(target, lambda: drafted(target, length=2), rule, length=3, tolerance=1e-5)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("quantized:3", "expected the bits of a weight, quantized:4, quantized:8"),
        ("quantized:4x2x1", "expected the bits of a weight, quantized:4, quantized:8"),
        ("quantized:four", "expected integers separated by x, .* got 'four'"),
        ("quantized:4", r"no native products of torch.float16"),
    ],
)
def test_bad_arguments_and_weights_say_what_is_legal(spec, words):
    target = HFBackend(random_model(CONFIGS["llama"]()).half(), name="llama")
    with pytest.raises(UserError, match=words):
        make_drafter(spec, target=target, draft=None, stopper="fixed:4")


def test_without_native_layers_it_is_refused(monkeypatch):
    monkeypatch.setenv("DRAFTPROOF_NATIVE", "0")
    target = LeanBackend(random_model(transformers.LlamaConfig(**WIDE)), name="llama")
    with pytest.raises(UserError, match="llama cannot be quantized: its layers are not native"):
        make_drafter("quantized", target=target, draft=None, stopper="fixed:4")


def test_heads_that_native_attention_does_not_read_are_refused():
    target = LeanBackend(random_model(transformers.LlamaConfig(**ROPE, head_dim=514)), name="llama")
    with pytest.raises(UserError, match=r"backend lean needs a model in .* whose heads have at most 512 numbers"):
        make_drafter("quantized:8", target=target, draft=None, stopper="fixed:4")
