"""What a draft model must read before it drafts: its cost is learned from prompts, and counts in what `auto` does."""

import random
import statistics

import pytest

from draftproof import Engine, SamplingParams
from draftproof.drafters.auto import AutoDrafter, CandidateDrafter
from draftproof.drafters.draft_model import DraftModel
from draftproof.drafters.model import ModelDrafter
from draftproof.stoppers.auto import CHEAP, Auto, DraftPlan
from draftproof.stoppers.base import AcceptanceRates, Outlook, RoundTime
from draftproof.stoppers.costs import UNKNOWN, DraftCosts, LearnedCosts
from draftproof.testing import TableModel
from draftproof.theory.cost import RoundCosts
from support.distributions import joint_distance

LEARN = LearnedCosts.learn  # before tests/conftest.py replaces it


@pytest.fixture
def clock(monkeypatch):
    """Costs are learned in this test."""
    monkeypatch.setattr(LearnedCosts, "learn", LEARN)


class Machine:
    """A pass for n tokens takes `weights` + `products` n; that of a draft model takes a share of both."""

    def __init__(self, weights, products):
        self.weights, self.products = weights, products

    def seconds(self, tokens, share=1.0):
        return share * (self.weights + self.products * tokens) if tokens else 0.0


CPU, MATRIX_UNIT = Machine(18.0, 2.6), Machine(20.0, 0.3)


def after_a_prompt(machine, rows=8, tokens=800):
    """Costs after one round that read prompts, and one plain round."""
    passes = DraftCosts()
    passes.learn_reading(
        RoundTime(0.0, machine.seconds(rows + tokens), rows, 0, 0, reads=tokens // rows, prompt=tokens)
    )
    passes.learn(RoundTime(0.0, machine.seconds(rows), rows, 0, 0))
    return passes


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("machine", [CPU, MATRIX_UNIT])
def test_a_prompt_and_a_plain_round_tell_what_reading_costs(machine, rows):
    """For other numbers of requests it follows from the form of passes."""
    expected = machine.products / machine.seconds(rows)
    assert after_a_prompt(machine).read(rows) == pytest.approx(expected)
    assert DraftCosts().read(rows) is None


def test_a_drafted_token_is_assumed_to_cost_at_least_half_of_reading_one():
    passes = after_a_prompt(CPU)
    assert passes.line(8).fitted[1] == pytest.approx(0.5 * 8 * 2.6 / CPU.seconds(8))
    assert passes.is_foretold(8)
    assert passes.ratio(8, 1) > 1.2, "a plain round of eight requests takes longer than that of one"
    for tokens in (8, 16, 24):
        passes.learn(RoundTime(0.1, CPU.seconds(8 + tokens), 8, tokens // 8, tokens / 8))
        passes.learn(RoundTime(0.0, CPU.seconds(8), 8, 0, 0))
    assert passes.line(8).fitted[1] == pytest.approx(8 * 2.6 / CPU.seconds(8), rel=0.05), "until it is measured"
    assert passes.ratio(8, 2) == pytest.approx(CPU.seconds(8) / CPU.seconds(2), rel=0.05)


def test_rounds_with_drafts_and_short_prompts_say_nothing_about_reading():
    passes = DraftCosts()
    for time in (RoundTime(0.1, 99.0, 8, 4, 4, prompt=100), RoundTime(0.0, 99.0, 8, 0, 0, prompt=15)):
        passes.learn_reading(time)
        passes.learn(RoundTime(0.0, 1.0, 8, 0, 0))
        assert passes.read(8) is None
    passes.learn_reading(RoundTime(0.0, 0.5, 8, 0, 0, prompt=100))  # the plain round was an outlier
    passes.learn(RoundTime(0.0, 1.0, 8, 0, 0))
    assert passes.read(8) is None


def test_the_cost_of_reading_is_kept():
    costs, other = LearnedCosts(passes=after_a_prompt(CPU)), LearnedCosts()
    other.restore(costs.to_dict())
    assert other.passes.read(8) == costs.passes.read(8)
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="costs of reading"):
            LearnedCosts().restore({"draft": {}, "rest": {}, "read": {"8": wrong}})


def test_weights_of_few_bits_save_nothing_where_products_take_the_time():
    passes = after_a_prompt(CPU)
    passes.restore({"8": [1.0, 0.6]})
    assumed = RoundCosts(1.0, 0.3)
    assert LearnedCosts(assumed, passes).at(8).draft == pytest.approx(0.3)
    assert LearnedCosts(assumed, passes, all_products=True).at(8).draft == pytest.approx(0.3 * 0.4 + 0.6)
    assert LearnedCosts(assumed, DraftCosts(0.0), all_products=True).at(1).draft == pytest.approx(0.3)


class Queue:
    """Rounds of requests from a queue, so many at once, with a draft model that reads prompts when it first drafts.

    Attributes:
        seconds: of all rounds so far.
        read: prompt tokens that the draft model has read.
    """

    def __init__(self, machine, share, rate, *, prompt=100, seed=0):
        self.machine, self.share, self.rate, self.prompt = machine, share, rate, prompt
        self.random = random.Random(seed)
        self.seconds, self.read, self.drafting = 0.0, 0, []

    def play(self, stopper, number, batch):
        """Decode so many requests; the answers have 16 to 64 tokens."""
        draws = random.Random(number)
        waiting = [draws.randint(16, 64) for _ in range(number)]
        rows, ids = {}, iter(range(number))
        while waiting or rows:
            while waiting and len(rows) < batch:
                rows[next(ids)] = {"left": waiting.pop(), "tokens": self.prompt, "seen": 0, "fresh": True}
            self._round(stopper, rows)
            for row in [row for row, each in rows.items() if each["left"] <= 0]:
                del rows[row]
                if stopper is not None:
                    stopper.release(row)

    def _round(self, stopper, rows):
        lengths = dict.fromkeys(rows, 0)
        if stopper is not None:
            stopper.expect(
                {
                    row: Outlook(each["tokens"] - 1 - each["seen"], each["left"] - 1, each["fresh"])
                    for row, each in rows.items()
                }
            )
            stopper.begin(list(rows))
            lengths = {row: min(stopper.length(row), each["left"] - 1) for row, each in rows.items()}
        draft = 0.0
        for step in range(max(lengths.values())):
            active = [row for row, length in lengths.items() if length > step]
            unread = sum(rows[row]["tokens"] - rows[row]["seen"] for row in active) if not step else len(active)
            self.read += unread - len(active)
            draft += self.machine.seconds(unread, self.share)
        self.drafting.append(sum(map(bool, lengths.values())))
        prompt = sum(each["tokens"] - 1 for each in rows.values() if each["fresh"])
        drafted = sum(lengths.values())
        rest = self.machine.seconds(len(rows) + prompt + drafted)
        noise = [self.random.lognormvariate(0, 0.03) for _ in range(2)]
        reads = max(each["tokens"] if each["fresh"] else 1 for each in rows.values())
        for row, each in rows.items():
            accepted = 0
            while accepted < lengths[row] and self.random.random() < self.rate:
                accepted += 1
            if lengths[row]:
                each["seen"] = each["tokens"]
            each["tokens"] += accepted + 1
            each["left"] -= accepted + 1
            each["fresh"] = False
            if stopper is not None:
                stopper.observe(row, lengths[row], accepted)
        if stopper is not None:
            stopper.spent(
                RoundTime(
                    draft * noise[0],
                    rest * noise[1],
                    len(rows),
                    max(lengths.values()),
                    drafted / len(rows),
                    reads,
                    prompt,
                )
            )
        self.seconds += draft + rest


def speed(machine, share, rate, batch, seed, stopper=None, **options):
    """Plain decoding's time over that with a draft model, of two batches; and the tokens that this read."""
    stopper = Auto(LearnedCosts(RoundCosts(1.0, share, UNKNOWN.token, UNKNOWN.more))) if stopper is None else stopper
    drafted = Queue(machine, share, rate, seed=seed, **options)
    plain = Queue(machine, share, rate, seed=seed, **options)
    drafted.play(stopper, 2 * batch, batch)
    plain.play(None, 2 * batch, batch)
    return plain.seconds / drafted.seconds, drafted


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("batch", [4, 8, 16])
@pytest.mark.parametrize(("share", "rate"), [(0.8, 0.5), (0.3, 0.6), (0.1, 0.5)])
def test_the_first_batch_with_a_draft_model_loses_little_where_it_does_not_pay(share, rate, batch):
    """Nothing is known before it; the plain rounds and prompts of the batch itself say what drafts would cost."""
    speeds = [speed(CPU, share, rate, batch, seed)[0] for seed in range(4)]
    assert statistics.geometric_mean(speeds) > (0.97 if (share, batch) == (0.1, 4) else 0.98), "it nearly pays there"


@pytest.mark.usefixtures("clock")
def test_a_draft_model_that_cannot_pay_reads_no_prompt():
    _, seen = speed(CPU, 0.8, 0.5, 8, 0)
    assert seen.read == 0


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("pays", [False, True])
def test_figures_of_an_earlier_run_are_believed_till_they_are_old(pays):
    found = {"draft": {"8": [0.0, 0.1]}, "rest": {"8": [1.0, 0.05 if pays else 0.9]}, "read": {"8": 0.01}}
    stopper = Auto()
    stopper.costs.restore(found)
    lengths = []
    for _ in range(40):
        stopper.begin(list(range(8)))
        lengths.append(stopper.length(0))
        for row in range(8):
            stopper.observe(row, lengths[-1], lengths[-1])
        n = lengths[-1]
        stopper.spent(RoundTime(0.1 * n, 1 + (0.05 if pays else 0.9) * n, 8, n, n))
    assert any(lengths[:4]) is pays
    assert any(lengths), "old figures are looked at"


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("batch", [2, 4, 8])
def test_a_draft_model_is_used_in_the_first_batch_where_it_pays(batch):
    speeds = [speed(MATRIX_UNIT, 0.1, 0.7, batch, seed)[0] for seed in range(4)]
    assert statistics.geometric_mean(speeds) > 1.2


@pytest.mark.usefixtures("clock")
def test_one_request_tries_for_all_where_the_draft_model_has_much_to_read():
    stopper = Auto(LearnedCosts(RoundCosts(1.0, 0.1), after_a_prompt(CPU)), assumed=AcceptanceRates(0.7, 0.7))
    stopper.expect({row: Outlook(100 + row, 60, fresh=False) for row in (3, 1, 2, 0, 4, 5, 6, 7)})
    stopper.begin([3, 1, 2, 0, 4, 5, 6, 7])
    assert stopper.plan.measures
    assert stopper.plan.only == 0, "the one with least to read"
    assert [row for row in range(8) if stopper.length(row)] == [0]
    cheap = Auto(LearnedCosts(RoundCosts(1.0, 0.1), after_a_prompt(CPU)), assumed=AcceptanceRates(0.7, 0.7))
    cheap.expect({row: Outlook(3, 60, fresh=False) for row in range(8)})
    cheap.begin(list(range(8)))
    assert cheap.plan.length
    assert cheap.plan.only is None
    assert cheap._missed([cheap._state(row) for row in range(8)]) <= CHEAP


@pytest.mark.usefixtures("clock")
def test_what_one_request_of_a_batch_shows_is_a_figure_of_one_request():
    costs = LearnedCosts(passes=after_a_prompt(CPU))
    for _ in range(4):
        costs.learn(RoundTime(2 * CPU.seconds(1, 0.3), CPU.seconds(10), 8, 2, 0.25), rows=1)
        costs.learn(RoundTime(0.0, CPU.seconds(8), 8, 0, 0))
    assert costs.at(1).of(2) - 2 * costs.at(1).token == pytest.approx(1.6, rel=0.15)
    assert costs.at(8).draft == pytest.approx(costs.at(1).draft), "and what is assumed of more"


def test_nothing_is_tried_beside_prompts():
    """The time of such a round would show nothing."""
    stopper = Auto(LearnedCosts(RoundCosts(1.0, 0.1)))
    stopper.expect({row: Outlook(50, 60, fresh=row == 3) for row in range(4)})
    stopper.begin(list(range(4)))
    assert not stopper.plan.length


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("limit", "drafts"), [(4, False), (200, True)])
def test_a_draft_model_reads_for_requests_that_have_time_to_pay_for_it(limit, drafts):
    costs = LearnedCosts(RoundCosts(1.0, 0.1), after_a_prompt(CPU))
    costs.restore({"draft": {"2": [0.0, 0.1]}, "rest": {"2": [1.0, 0.1]}})
    stopper = Auto(costs, assumed=AcceptanceRates(0.7, 0.7))
    for row in range(2):
        stopper.shared_rates.learn(1, 200, 140)
        stopper._state(row)
    costs._line(2).kept = costs.passes.line(2).kept = 0  # as if learned now
    costs._line(2).figures = [(1, 1, 0.1)] * 3
    costs.passes.line(2).figures = [(1, 1, 1.1)] * 3
    stopper.expect({row: Outlook(200, limit, fresh=False) for row in range(2)})
    assert (stopper.make_plan([0, 1], batch=2).length > 0) is drafts


class OneAtATime(Auto):
    """In turns all requests draft, and the one with least to read alone."""

    def make_plan(self, rows, most=1, batch=1):
        plan = super().make_plan(rows, most, batch)
        self.turn = not getattr(self, "turn", False)
        only = min(rows, key=lambda row: (self._state(row).unread, row)) if self.turn else None
        return DraftPlan(2, measures=plan.measures, only=only)


@pytest.mark.grid(1)
@pytest.mark.parametrize("rule", ["token", "block"])
def test_the_distribution_where_one_request_of_two_drafts(rule):
    from draftproof.engine.verifier_parts import make_verifier

    seen = set()

    def make(round_rng):
        stopper = OneAtATime(LearnedCosts(), 2)
        made = ModelDrafter(DraftModel(TableModel(3, 2, order=2), vocab_size=3), stopper)
        propose = made.propose

        def watched(requests, rng):
            drafts = propose(requests, rng)
            seen.add(tuple(map(bool, map(len, drafts))))
            return drafts

        made.propose = watched
        return Engine(TableModel(3, 1, zeros=0.4), made, make_verifier(rule), round_rng=round_rng)

    params = [SamplingParams(max_tokens=3), SamplingParams(max_tokens=2)]
    assert joint_distance(make, [[0], [0, 2, 1]], params) < 1e-12
    assert {(True, False), (False, True)} & seen


@pytest.mark.parametrize("drafting", [True, False])
def test_parts_of_prompts_are_read_ahead_only_while_drafts_are_made(drafting):
    stopper = Auto(LearnedCosts())
    made = ModelDrafter(DraftModel(TableModel(3, 2), vocab_size=3), stopper)
    read = []
    made.model.read = read.append
    stopper.plan = DraftPlan(3 * drafting)
    made.read([])
    assert len(read) == drafting
    stopper.plan = DraftPlan(1, measures=True)
    made.read([])
    assert len(read) == drafting, "one try does not make it likely"


@pytest.mark.parametrize(("costs", "made"), [(RoundCosts(1.0, 0.05), True), (RoundCosts(1.0, 3.0), False)])
def test_weights_are_made_for_a_batch_only_where_drafts_are_expected_to_pay(costs, made):
    steps = []

    def building():
        while True:
            steps.append(1)
            yield None

    drafter = AutoDrafter([CandidateDrafter("slow", Auto(costs, 4), building())], None, DraftCosts())
    engine = Engine(TableModel(3, 1), drafter, max_batch=4)
    engine.generate([[0, 1]] * 4, SamplingParams(max_tokens=40, ignore_eos=True))
    assert bool(steps) is made


def test_the_engine_counts_prompt_tokens():
    times = []
    engine = Engine(TableModel(5, 1), max_batch=2)
    engine.drafter.spent = times.append
    engine.generate([[0, 1, 2, 3], [1, 2]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert [time.prompt for time in times] == [4, 0, 0]
