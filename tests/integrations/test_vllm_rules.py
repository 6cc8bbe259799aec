"""The vLLM plug-in without vLLM: rules on its tensors by enumeration, its options, its proposer on a made-up runner."""

import functools
import itertools
import logging
import subprocess
import sys
from collections import defaultdict
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from draftproof import UserError
from draftproof.integrations import vllm as plugin
from draftproof.integrations.vllm import rules, runner, seams
from draftproof.integrations.vllm.options import PluginOptions
from draftproof.integrations.vllm.proposer import Proposer
from draftproof.integrations.vllm.rules import GeneratorRng, matched_rows, verify_rows
from draftproof.rng import NoiseRng, Purpose, fold
from draftproof.testing import EnumeratedNoise, exact_distribution

VOCAB, EXACT = 3, 1e-12
PAST = (0, 2)  # the context of the request in the middle


def row(context, kind):
    """A fixed row of p or q for each context."""
    number = fold(ord(kind), *context) >> 32
    values = torch.rand(VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    return values / values.sum()


def chance(tokens, kind="p", context=()):
    """The probability of tokens after a context."""
    return float(np.prod([row((*context, *tokens[:i]), kind)[x] for i, x in enumerate(tokens)]))


def rows_of(drafts, kind):
    """Rows of p or q before each drafted token of several (context, tokens), one after another, as vLLM has them."""
    found = [row((*context, *tokens[:i]), kind) for context, tokens in drafts for i in range(len(tokens))]
    return torch.stack(found) if found else torch.zeros(0, VOCAB, dtype=torch.float64)


def emitted_in_the_middle(rule, drafted, last, *, masses=False, cut=None, **options):
    """Distribution of what a request emits between two others with longer and shorter drafts."""
    batch = [((1,), (0, 2, 1)), (PAST, drafted), ((2, 2), ()), ((0,), (1,))]
    flat = [x for _, tokens in batch for x in tokens]
    if cut is not None:
        flat[3 + cut] = -1
    q = None if masses else rows_of(batch, "q")

    def program(rng):
        found = verify_rows(
            rule,
            torch.tensor(flat, dtype=torch.int32),
            [len(tokens) for _, tokens in batch],
            q,
            rows_of(batch, "p"),
            torch.tensor([1, last, 0, 2], dtype=torch.int32),
            rng=lambda _: rng,
            **options,
        )
        return tuple(x for x in found[1].tolist() if x >= 0)

    return exact_distribution(program)


def output_distribution(rule, length, *, masses=False, cut=None, **options):
    """Distribution of the next tokens: a round of the rule over all drafts, then plain decoding."""
    found = defaultdict(float)
    lengths = length + 1
    for drafted in itertools.product(range(VOCAB), repeat=length):
        weight = 1.0 if masses else chance(drafted, "q", PAST)
        if masses and drafted != (1, 2, 0)[:length]:
            continue
        for last in range(VOCAB):
            chosen = weight * row((*PAST, *drafted), "p")[last].item()
            for tokens, share in emitted_in_the_middle(rule, drafted, last, masses=masses, cut=cut, **options).items():
                for rest in itertools.product(range(VOCAB), repeat=lengths - len(tokens)):
                    found[*tokens, *rest] += chosen * share * chance(rest, "p", (*PAST, *tokens))
    return found


def distance(found, length):
    """The largest difference from the target's probabilities of all texts of length + 1 tokens."""
    texts = itertools.product(range(VOCAB), repeat=length + 1)
    return max(abs(found[text] - chance(text, "p", PAST)) for text in texts)


@pytest.mark.grid(2)
@pytest.mark.parametrize("masses", [False, True])
@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_output_distribution_is_the_target_s(rule, length, masses):
    assert distance(output_distribution(rule, length, masses=masses), length) < EXACT


@pytest.mark.grid(1)
@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_draft_that_vllm_cuts_ends_at_its_mark(rule):
    for cut in (0, 1):
        assert distance(output_distribution(rule, 2, cut=cut), 2) < EXACT


@pytest.mark.parametrize("rule", ["token", "block"])
def test_wrong_rows_are_found(rule, monkeypatch):
    """Negative controls: q of another place, p of another place, a draft kept though it was refused."""
    right, emitted = rules._padded, rules.emitted
    for ours in (True, False):  # the first call pads tokens, the second p, the third q
        calls = itertools.count()

        def shifted(flat, counts, width, ours=ours, calls=calls):
            wrong = flat.ndim > 1 and (next(calls) % 2 == 0) == ours
            return right(flat.roll(1, 0) if wrong else flat, counts, width)

        monkeypatch.setattr(rules, "_padded", shifted)
        assert distance(output_distribution(rule, 1), 1) > 1e-3
    monkeypatch.setattr(rules, "_padded", right)
    monkeypatch.setattr(rules, "emitted", lambda tokens, kept, token: emitted(tokens, kept.clamp(min=1), token))
    assert distance(output_distribution(rule, 1), 1) > 1e-3


def test_drafts_whose_probabilities_are_missing_stay_exact():
    """Where vLLM has lost the q of drawn tokens, they are verified as point masses: fewer are accepted."""
    found = defaultdict(float)
    for drafted, last in itertools.product(range(VOCAB), repeat=2):
        weight = chance((drafted,), "q", PAST) * row((*PAST, drafted), "p")[last].item()
        for tokens, share in emitted_in_the_middle("block", (drafted,), last, masses=True).items():
            for rest in itertools.product(range(VOCAB), repeat=2 - len(tokens)):
                found[*tokens, *rest] += weight * share * chance(rest, "p", (*PAST, *tokens))
    assert distance(found, 1) < EXACT


def test_greedy_requests_beside_sampled_ones_take_the_most_likely_token():
    greedy = torch.tensor([False, True, False, False])
    for rule, masses in itertools.product(("token", "block"), (False, True)):
        for drafted in itertools.product(range(VOCAB), repeat=2):
            best = [int(row((*PAST, *drafted[:i]), "p").argmax()) for i in range(3)]
            kept = next((i for i in range(2) if drafted[i] != best[i]), 2)
            found = emitted_in_the_middle(rule, drafted, best[2], masses=masses, greedy=greedy)
            assert found == {(*drafted[:kept], best[kept]): pytest.approx(1)}


def test_gumbel_emits_what_plain_decoding_draws_whatever_is_drafted():
    for drafted in itertools.product(range(VOCAB), repeat=2):

        def program(rng, drafted=drafted):
            noise = EnumeratedNoise(rng)
            last = noise.draw(7, 6, row((*PAST, *drafted), "p").tolist())  # by vLLM's sampler, before the rule
            found = verify_rows(
                "gumbel",
                torch.tensor([*drafted]),
                [2],
                None,
                rows_of([(PAST, drafted)], "p"),
                torch.tensor([last]),
                rng=lambda _: noise.round([7], [4]).at(Purpose.VERIFY),
            )
            text = []
            while len(text) < 3:
                text.append(noise.draw(7, 4 + len(text), row((*PAST, *text), "p").tolist()))
            tokens = [x for x in found[0].tolist() if x >= 0]
            assert tokens == text[: len(tokens)]
            return tuple(text)

        found = exact_distribution(program)
        for text, share in found.items():
            assert share == pytest.approx(chance(text, "p", PAST), abs=1e-9)


def test_batches_in_portions_give_the_same(monkeypatch):
    counts, size = [2, 0, 3, 1], 16
    made = torch.Generator().manual_seed(1)
    p, q = (torch.rand(6, size, generator=made).softmax(-1) for _ in range(2))
    arguments = torch.randint(size, (6,), generator=made), counts, q, p, torch.tensor([1, 2, 3, 4])
    for rule in ("token", "block", "gumbel"):

        def run(rule=rule):
            seen = []

            def rng(part):
                seen.append(part)
                return NoiseRng([5, 6, 7, 8][part], [0, 1, 2, 3][part], Purpose.VERIFY)

            return verify_rows(rule, *arguments, rng=rng).tolist(), seen

        whole, one = run()
        monkeypatch.setattr(rules, "_TOGETHER", 100)
        parts, several = run()
        monkeypatch.undo()
        assert whole == parts
        assert (len(one), len(several)) == (1, 4)


@pytest.mark.parametrize("rule", rules.RULES)
def test_a_batch_without_any_draft_emits_the_last_tokens(rule):
    arguments = torch.zeros(0, dtype=torch.int32), [0, 0], None, torch.zeros(0, VOCAB), torch.tensor([2, 1])
    found = verify_rows(rule, *arguments, rng=lambda _: NoiseRng([1, 2], [0, 0], Purpose.VERIFY))
    assert found.tolist() == [[2], [1]]


# --- randomness -------------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_draws_alone_and_in_any_batch():
    def draws(lengths, place, other):
        torch.manual_seed(other)
        rng = GeneratorRng({place: torch.Generator().manual_seed(11)}, lengths)
        prob = torch.full((len(lengths), max(lengths)), 0.5, dtype=torch.float64)
        weights = torch.ones(len(lengths), 50)
        return rng.bernoulli(prob)[place, :2].tolist(), int(rng.categorical(weights)[place])

    alone = draws([2], 0, 1)
    assert draws([4, 2, 0], 1, 2) == alone
    assert draws([1, 1, 3, 2], 3, 3) == alone


def test_a_request_without_a_draft_takes_nothing_from_its_generator():
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    rng = GeneratorRng({0: generator}, [0, 2])
    rng.bernoulli(torch.rand(2, 2))
    rng.categorical(torch.rand(2, 5))
    assert torch.equal(generator.get_state(), before)


def test_uniforms_have_the_probabilities():
    """Each count is within 5 standard deviations: a right Rng had a chance below 1e-5 to fail at this seed."""
    torch.manual_seed(0)
    rng = GeneratorRng({0: torch.Generator().manual_seed(1)}, [20000, 20000])
    found = rng.bernoulli(torch.full((2, 20000), 0.3)).sum(-1)
    assert (found - 6000).abs().max() < 5 * (20000 * 0.21) ** 0.5


def test_rows_of_the_second_runner():
    made = torch.Generator().manual_seed(5)
    for _ in range(50):
        counts = torch.randint(0, 4, (5,), generator=made).tolist()
        bounds = [0, *itertools.accumulate(n + 1 for n in counts)]
        drawn, drafted = (torch.randint(2, (bounds[-1],), generator=made) for _ in range(2))
        tokens, number = matched_rows(drawn, drafted, torch.tensor(bounds, dtype=torch.int32), 5)
        for request, count in enumerate(counts):
            rows = range(bounds[request], bounds[request + 1])
            kept = next((i for i in range(count) if drawn[rows[i]] != drafted[rows[i + 1]]), count)
            assert number[request] == kept + 1
            assert tokens[request, : kept + 1].tolist() == [int(drawn[rows[i]]) for i in range(kept + 1)]


# --- options and versions ---------------------------------------------------------------------------------------------


def config(section=None, method="standard", tokens=4, **speculative):
    made = SimpleNamespace(rejection_sample_method=method, num_speculative_tokens=tokens, **speculative)
    model = SimpleNamespace(max_model_len=32, get_vocab_size=lambda: 50)
    extra = {} if section is None else {"draftproof": section}
    return SimpleNamespace(additional_config=extra, speculative_config=made, model_config=model)


def test_options_are_read():
    assert PluginOptions.of(config()) == PluginOptions()
    assert PluginOptions.of(config(method="block")).rule == "block"
    assert PluginOptions.of(config({"rule": "gumbel"})).rule == "gumbel"
    assert PluginOptions.of(config({"rule": "block"}, method="block")).rule == "block"
    assert PluginOptions.of(config({"stopper": "schedule:3", "shared": False})).stopper == "schedule:3"
    plain = SimpleNamespace(additional_config={"draftproof": {"rule": "gumbel"}}, speculative_config=None)
    assert PluginOptions.of(plain).rule == "gumbel"


@pytest.mark.parametrize(
    ("section", "method", "message"),
    [
        ({"rules": "block"}, "standard", "expected options rule, drafter, stopper, shared, got 'rules'"),
        ({"rule": "spectr"}, "standard", "rule: expected one of token, block, gumbel, got 'spectr'"),
        ({"rule": "token"}, "block", "contradict each other"),
        ({"rule": "block"}, "synthetic", "contradict each other"),
        ({"drafter": "model"}, "standard", "drafter: expected one of suffix, ngram, auto, got 'model'"),
        ({"stopper": "entropy"}, "standard", "stopper: expected one of fixed, schedule, auto"),
        ({"stopper": "auto", "drafter": "auto"}, "standard", "leave the stopper out"),
        ({"shared": "no"}, "standard", "shared: expected true or false, got 'no'"),
        ("block", "standard", "expected an object such as"),
    ],
)
def test_wrong_options_are_refused(section, method, message):
    with pytest.raises(UserError, match=message):
        PluginOptions.of(config(section, method))


def test_without_vllm_the_log_says_so(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with caplog.at_level(logging.INFO, "vllm.draftproof"):
        plugin.register()
    assert caplog.messages == ["draftproof changes nothing in vLLM: there is no package vllm; install it"]


@pytest.mark.parametrize("version", ["0.33.0", "0.9.2", "1.0.0rc1", "dev"])
def test_an_unknown_version_changes_nothing_and_is_said_in_one_line(version, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    monkeypatch.setattr(seams, "prepare", lambda: pytest.fail("vLLM was changed"))
    with caplog.at_level(logging.INFO, "vllm.draftproof"):
        plugin.register()
    (line,) = caplog.messages
    assert version in line
    assert "changes nothing" in line


def test_a_vllm_with_other_seams_is_left_alone(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.7"))
    with caplog.at_level(logging.INFO, "vllm.draftproof"):
        plugin.register()
    (line,) = caplog.messages
    assert "EngineArgs.create_engine_config" in line
    assert "changes nothing" in line


class Fails:
    """A vLLM whose version cannot be read."""

    @property
    def __version__(self):
        raise RuntimeError("broken\nin two lines")


@pytest.mark.parametrize("vllm", [SimpleNamespace(), SimpleNamespace(__version__=None), Fails()], ids=range(3))
def test_a_vllm_without_a_version_is_left_alone(vllm, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    with caplog.at_level(logging.INFO, "vllm.draftproof"):
        plugin.register()
    (line,) = caplog.messages
    assert "changes nothing" in line
    assert "\n" not in line


@pytest.mark.grid(1)
@pytest.mark.parametrize("package", ["jaxtyping", "torch", "safetensors"])
def test_a_package_that_is_missing_does_not_end_the_start_of_vllm(package, tmp_path):
    """vLLM calls plug-ins outside of any try, and the plug-in is installed without its dependencies."""
    code = (
        "import sys, types, logging\n"
        "logging.basicConfig(format='LOG %(message)s')\n"
        f"sys.modules[{package!r}] = None\n"
        "sys.modules['vllm'] = types.SimpleNamespace(__version__='0.32.1')\n"
        "from importlib.metadata import entry_points\n"
        "found = [each for each in entry_points(group='vllm.general_plugins') if each.name == 'draftproof']\n"
        "from draftproof.integrations.vllm import register\n"
        "register()\n"
        "print('vLLM goes on')"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.stdout == "vLLM goes on\n", found.stderr
    assert found.stderr.count("LOG") == 1
    assert "changes nothing" in found.stderr


def test_an_error_of_any_kind_is_one_line(monkeypatch, caplog):
    def fails():
        raise ZeroDivisionError("a\nb")

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.32.0"))
    monkeypatch.setattr(seams, "prepare", fails)
    with caplog.at_level(logging.INFO, "vllm.draftproof"):
        plugin.register()
    assert caplog.messages == ["draftproof changes nothing in vLLM: ZeroDivisionError: a"]


# --- what is changed --------------------------------------------------------------------------------------------------


@pytest.fixture
def made_up(monkeypatch):
    """Modules with the functions of vLLM's first model runner, by name."""
    found = {}
    for name in (*seams._SEAMS, "vllm.platforms"):
        module = ModuleType(name)
        for path, arguments in seams._SEAMS.get(name, {}).items():
            owner, _, method = path.rpartition(".")
            space = {}
            exec(f"def made({', '.join((arguments or '').split())}): pass", space)  # noqa: S102 - names of arguments
            if owner and not hasattr(module, owner):
                setattr(module, owner, type(owner, (), {}))
            setattr(getattr(module, owner) if owner else module, method, space["made"])
        monkeypatch.setitem(sys.modules, name, module)
        found[name] = module
    found["vllm.platforms"].current_platform = SimpleNamespace(is_cpu=lambda: found["cpu"])
    found["cpu"] = False
    return found


def changed(modules):
    """Names of the functions that were replaced."""
    names = set()
    for module, paths in seams._SEAMS.items():
        for path in paths:
            if hasattr(functools.reduce(getattr, path.split("."), modules[module]), seams._DONE):
                names.add(path.rpartition(".")[2])
    return names


def wanted(rule=None, model=None, **more):
    speculative = None if model is None else SimpleNamespace(rejection_sample_method="standard", model=model)
    section = {} if rule is None else {"draftproof": {"rule": rule}}
    return SimpleNamespace(additional_config=section, speculative_config=speculative, use_v2_model_runner=False, **more)


OF_ROUNDS = {"__init__", "propose_draft_token_ids"}
OF_RULES = OF_ROUNDS | {"_sample", "rejection_sample", "compute_probs_and_sample_next_token"}
REPAIR = {"expand_batch_to_tokens", "apply_sampling_constraints"}


@pytest.mark.parametrize("cpu", [False, True])
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (wanted(), set()),
        (wanted(model="some/draft"), set()),
        (wanted(model="draftproof.integrations.vllm.Proposer"), OF_ROUNDS),
        (wanted("block"), OF_RULES),
        (wanted("gumbel", "draftproof.integrations.vllm.Proposer"), OF_RULES),
    ],
    ids=["nothing", "another draft", "our proposer", "a rule", "both"],
)
def test_only_what_is_asked_for_is_changed(asked, expected, cpu, made_up):
    made_up["cpu"] = cpu
    seams.change(asked)
    assert changed(made_up) == expected | (REPAIR if cpu else set())
    seams.change(wanted())
    assert changed(made_up) == expected | (REPAIR if cpu else set()), "another engine of the process changes nothing"


@pytest.mark.parametrize("strange", [{}, {"additional_config": None, "speculative_config": None}])
def test_a_config_of_another_form_changes_nothing(strange, made_up, caplog):
    with caplog.at_level(logging.INFO, "vllm.draftproof"):
        seams.change(SimpleNamespace(**strange))
    assert changed(made_up) == set()
    assert "changes nothing" in caplog.text


def test_a_runner_that_was_made_before_the_change_has_vllms_own_rule():
    assert runner.Round(SimpleNamespace()).rule is None


# --- the proposer -----------------------------------------------------------------------------------------------------


class Runner:
    """What the proposer reads of a model runner: requests with their tokens, in rows that may change places."""

    def __init__(self, **prompts):
        self.draftproof_rule = None
        self.tokens = {name: list(prompt) for name, prompt in prompts.items()}
        self.sizes = {name: len(prompt) for name, prompt in prompts.items()}
        self.params = {name: SimpleNamespace(temperature=1.0, seed=None) for name in prompts}

    @property
    def requests(self):
        return {name: SimpleNamespace(sampling_params=self.params[name]) for name in self.tokens}

    def propose(self, proposer, **emitted):
        """One round: the rows in the order given, each with what it has emitted."""
        stored = np.zeros((len(emitted), 40), dtype=np.int32)
        for place, (name, tokens) in enumerate(emitted.items()):
            self.tokens[name] += tokens
            stored[place, : len(self.tokens[name])] = self.tokens[name]
        sizes = np.array([len(self.tokens[name]) for name in emitted])
        self.input_batch = SimpleNamespace(
            req_ids=list(emitted), num_prompt_tokens=np.array([self.sizes[name] for name in emitted])
        )
        with runner.within(runner.Round(self)):
            return proposer.propose(list(emitted.values()), sizes, stored)


def test_the_proposer_follows_requests_that_change_rows():
    proposer, model = Proposer(config({"shared": False})), Runner(a=[1, 2, 3, 4], b=[5, 6, 7, 8])
    assert model.propose(proposer, a=[1], b=[5]) == [[2, 3, 4, 1], [6, 7, 8, 5]]
    assert model.propose(proposer, b=[6], a=[2, 3]) == [[7, 8, 5, 6], [4, 1, 2, 3]]
    del model.tokens["b"]
    assert model.propose(proposer, a=[4]) == [[1, 2, 3, 4]]
    assert len(proposer._rows) == 1


def test_the_proposer_drafts_from_other_requests_unless_told_not_to():
    for shared, wanted in ((True, [8, 9]), (False, [])):
        proposer, model = Proposer(config({"shared": shared}, tokens=2)), Runner(a=[6, 7, 8, 9], b=[1, 2, 6])
        model.propose(proposer, a=[3])
        assert model.propose(proposer, b=[7]) == [wanted]


def test_a_request_with_a_seed_drafts_from_its_own_tokens():
    proposer, model = Proposer(config(tokens=2)), Runner(a=[6, 7, 8, 9], b=[1, 2, 6])
    model.params["b"] = SimpleNamespace(temperature=1.0, seed=3)
    model.propose(proposer, a=[3])
    assert model.propose(proposer, b=[7]) == [[]]


def test_the_proposer_drafts_nothing_for_prompts_that_are_read_and_at_the_longest_text():
    proposer, model = Proposer(config()), Runner(a=[1, 2] * 5, b=[1, 2] * 14 + [1])
    assert model.propose(proposer, a=[], b=[2]) == [[], [1]]
    assert model.propose(proposer, a=[1], b=[1, 2]) == [[2, 1, 2, 1], []]


def test_a_stopper_cuts_drafts_and_learns_from_rounds():
    proposer, model = Proposer(config({"stopper": "schedule:3"}, tokens=8)), Runner(a=[1, 2] * 6)
    assert [len(one) for one in model.propose(proposer, a=[1])] == [3]
    assert [len(one) for one in model.propose(proposer, a=[2, 1, 2, 1])] == [5]
    assert [len(one) for one in model.propose(proposer, a=[2])] == [4]


@pytest.mark.parametrize("section", [{"drafter": "auto"}, {"stopper": "auto"}, {"drafter": "ngram"}])
def test_every_drafter_works_round_after_round(section):
    proposer, model = Proposer(config(section)), Runner(a=[1, 2, 3] * 2, b=[4, 5, 4, 5])
    for token in (1, 2, 3, 1, 2):
        found = model.propose(proposer, a=[token], b=[4 + token % 2])
        assert all(len(one) <= 4 for one in found)


def test_the_proposer_without_the_plug_in_is_refused():
    with pytest.raises(UserError, match="needs draftproof's plug-in"):
        Proposer(config()).propose([[1]], np.array([1]), np.zeros((1, 4)))
