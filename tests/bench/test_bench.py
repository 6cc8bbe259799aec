"""The benchmark: cells, turns, records that survive a kill, figures computed by hand, competitors."""

import json
import math
import random
from dataclasses import replace

import pytest
import torch

from draftproof import UserError
from draftproof.audit.compositions import compositions
from draftproof.bench import competitors, measures, quality
from draftproof.bench.cell import ENGINES, Cell, canonical, matrix, refused
from draftproof.bench.competitors import COMPETITORS, format_setting, parse_setting, search
from draftproof.bench.estimate import Estimate, bootstrap, geometric_mean, t_quantile
from draftproof.bench.measures import answer_flops, pass_flops, shape_of
from draftproof.bench.model_cache import ModelCache
from draftproof.bench.questions import Question, read_questions
from draftproof.bench.record import FILE, Generation, Log, Record, by_cell, read_records
from draftproof.bench.report import COUNT_HEADS, FIGURES, REPORT, by_setting, count_table, markdown, write_report
from draftproof.bench.run import question_seed, run, turns
from draftproof.bench.summary import summaries, summarize
from draftproof.engine.drafter_parts import DRAFTERS
from draftproof.provenance import KEY, header
from support.helpers import CONFIGS, embedded_model

COMMON = {"target": "embedded:target", "dtype": "float32", "dataset": "tinystories", "max_tokens": 8}
PAIR = {**COMMON, "draft": "embedded:draft"}


@pytest.fixture(scope="module")
def cache():
    """Models loaded once for the whole file."""
    return ModelCache(device="cpu")


@pytest.fixture(scope="module")
def questions():
    return {"tinystories": read_questions("tinystories", 2)}


# --- cells ------------------------------------------------------------------------------------------------------------


def test_a_matrix_is_every_combination_in_the_order_of_its_lists():
    cells = matrix(**PAIR, drafter=["model", "ngram:4"], temperature=[0, 1], seed=[1, 2], verifier="token").cells
    found = [(cell.drafter, cell.temperature, cell.seed) for cell in cells]
    assert found == [(d, t, s) for d in ("model", "ngram:4") for t in (0.0, 1.0) for s in (1, 2)]


def test_values_without_effect_make_no_second_cell():
    cells = matrix(
        **PAIR, drafter=["none", "ngram:4"], stopper=["fixed:2", "fixed:4"], verifier=["block", "token"]
    ).cells
    assert [cell.method for cell in cells] == ["plain", "ngram:4, block", "ngram:4, token"]
    assert [cell.draft for cell in cells] == [None, None, None]
    theirs = matrix(**PAIR, engine="transformers", drafter=["none", "model"], verifier=["", "block"]).cells
    assert [cell.method for cell in theirs] == ["transformers"]


@pytest.mark.parametrize("part", DRAFTERS.values(), ids=lambda part: part.name)
def test_what_a_cell_keeps_is_what_the_registry_declares(part):
    made = canonical(Cell("t", draft="d", drafter=part.name, stopper="fixed:2"))
    assert (made.draft is not None) == part.traits.reads_draft
    assert bool(made.stopper) == part.stops
    if part.traits.reads_draft:
        assert "needs a draft model" in refused(replace(made, draft=None))


@pytest.mark.parametrize(
    ("drafter", "chains", "branches"),
    [
        ("model", 1, False),
        ("chains", 4, True),
        ("chains:2", 2, True),
        ("tree:2x2", 1, True),
        ("early_exit:3", 1, False),
        ("early_exit:3x4", 4, True),
        ("feature_head:boxes/mine", 1, False),
        ("feature_head:heads/minex3", 3, True),
        ("ngram:8", 1, False),
    ],
)
def test_numbers_of_drafts_and_branching_are_read_from_the_argument(drafter, chains, branches):
    assert Cell("t", drafter=drafter).drafts == chains
    made = canonical(Cell("t", draft="d", drafter=drafter))
    assert made.verifier == ("trie_block" if branches else "block")
    why = refused(replace(made, verifier="token")) or ""
    assert ("drafts trees, but rule token verifies chains only" in why) == branches


def test_each_drafter_gets_its_default_rule():
    cells = matrix(**PAIR, drafter=["model", "chains:2", "early_exit:2x2"]).cells
    assert [cell.verifier for cell in cells] == ["block", "trie_block", "trie_block"]
    assert [cell.stopper for cell in cells] == ["fixed:4"] * 3


def test_a_directory_is_shown_by_its_last_part_unless_two_share_it():
    cells = [
        Cell(**COMMON, drafter=f"feature_head:{folder}/mine", stopper="fixed:2", verifier="block") for folder in "ab"
    ]
    assert cells[0].method == cells[1].method == "feature_head:mine, fixed:2, block"
    found = summaries([record("q", tokens=4, calls=2, cell=cell) for cell in cells[:1]], {})
    assert [one.method for one in found] == ["feature_head:mine, fixed:2, block"]
    found = summaries([record("q", tokens=4, calls=2, cell=cell) for cell in cells], {})
    assert [one.method for one in found] == [
        f"feature_head:mine, fixed:2, block [feature_head:{folder}/mine, fixed:2]" for folder in "ab"
    ]


def test_a_cell_gives_draft_length_and_number_of_drafts():
    cell = Cell(**PAIR, drafter="chains:3", stopper="fixed:6", verifier="spectr")
    assert (cell.length, cell.drafts, cell.method) == (6, 3, "chains:3, fixed:6, spectr")
    assert (Cell(**PAIR, drafter="early_exit:2x5", stopper="entropy").length) is None
    assert Cell(**PAIR, drafter="early_exit:2x5").drafts == 5
    assert Cell(**PAIR, drafter="tree:2x2").drafts == 1


def test_a_key_depends_on_the_values_only():
    (one,) = matrix(**COMMON, temperature=1, top_p=1).cells
    assert one.key == Cell(**COMMON, temperature=1.0).key
    assert one == Cell.from_dict(json.loads(json.dumps(one.to_dict())))
    assert one.key != replace(one, seed=2).key
    with pytest.raises(UserError, match="colour does not fit"):
        Cell.from_dict({"target": "x", "colour": "red"})


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        ({"colour": "red"}, "field of a cell: expected one of target"),
        ({"seed": []}, "no value for seed"),
        ({"drafter": "chains:2", "verifier": "token"}, "no composition is left: drafter chains:2 drafts trees"),
        ({"drafter": "telepathy"}, "got 'telepathy'"),
        ({"drafter": "model", "stopper": "never"}, "got 'never'"),
        ({"drafter": "model", "verifier": "perhaps"}, "got 'perhaps'"),
        ({"drafter": "model", "stopper": "acceptance:/no/head"}, "/no/head"),
        ({"engine": "warp"}, "engine: expected one of draftproof"),
        ({"backend": "abacus"}, "got 'abacus'"),
        ({"temperature": -1}, "temperature: expected a finite number >= 0"),
    ],
)
def test_impossible_cells_are_refused(lists, words):
    with pytest.raises(UserError) as caught:
        matrix(**{**PAIR, **lists})
    assert words in str(caught.value)


def test_refused_compositions_are_left_out_or_raised():
    lists = {**PAIR, "drafter": ["model", "chains:2"], "verifier": ["token", "spectr"]}
    found = matrix(**lists)
    assert [cell.method for cell in found.cells] == [
        "model, fixed:4, token",
        "model, fixed:4, spectr",
        "chains:2, fixed:4, spectr",
    ]
    ((cell, why),) = found.left_out
    assert cell.drafter == "chains:2"
    assert "verifies chains only" in why
    with pytest.raises(UserError, match=r"chains:2, fixed:4, token: .* verifies chains only"):
        matrix(strict=True, **lists)
    alone = matrix(**COMMON, drafter=["none", "model"])
    assert [cell.method for cell in alone.cells] == ["plain"]
    assert "needs a draft model" in alone.left_out[0][1]


@pytest.mark.grid(226)
@pytest.mark.parametrize("one", [one for one in compositions() if one.stopper != "oracle"], ids=str)
def test_a_cell_is_refused_where_the_engine_refuses(one):
    specs = {"chains": "chains:2", "tree": "tree:1x2x1", "wide": "tree:2x2", "ngram": "ngram:2", "suffix": "suffix:2"}
    cell = Cell(**PAIR, drafter=specs.get(one.drafter, one.drafter), stopper=one.stopper, verifier=one.rule)
    if one.drafter != "none":  # a plain cell has no rule
        assert (refused(cell) is None) == (one.refused is None), one.refused


def test_every_engine_has_a_name_and_a_maker():
    assert set(ENGINES) == {"draftproof", *COMPETITORS}


# --- the run ----------------------------------------------------------------------------------------------------------


def cells_of(**lists):
    return matrix(**{**PAIR, "drafter": ["none", "model"], "verifier": "block", **lists}).cells


def test_cells_of_a_group_take_turns():
    cells = cells_of(temperature=[0, 1])
    asked = [Question(name, "tinystories", ("x",)) for name in "pq"]
    order = [
        (t.cell.temperature, t.question.id, t.repeat, t.cell.method) for t in turns(cells, {"tinystories": asked}, 2)
    ]
    both = ("plain", "model, fixed:4, block")
    assert order == [(t, q, r, m) for t in (0.0, 1.0) for q in "pq" for r in (0, 1) for m in both]


def test_cells_of_a_group_share_seeds_and_questions_do_not():
    plain, model = cells_of()
    one, two = read_questions("tinystories", 2)
    assert question_seed(plain, one) == question_seed(model, one)
    assert len({question_seed(plain, one), question_seed(plain, two), question_seed(replace(plain, seed=2), one)}) == 3


class KilledError(Exception):
    """What a test kills a run with."""


def killed_after(count):
    """A watch that ends the run after so many measurements."""

    class Watch:
        def __init__(self, _title, _total, done):
            self.done = done

        def __enter__(self):
            return self.tick

        def __exit__(self, *_):
            return False

        def tick(self, done, **_):
            if done >= count:
                raise KilledError

    return Watch


def untimed(record):
    values = record.to_dict()
    del values["seconds"], values["first_seconds"]
    return values


def test_a_killed_run_is_resumed(tmp_path, cache, questions):
    cells = cells_of(temperature=1, max_tokens=4)
    whole = run(cells, questions, tmp_path / "whole", repeats=2, cache=cache)
    assert len(whole) == 2 * 2 * 2
    with pytest.raises(KilledError):
        run(cells, questions, tmp_path / "killed", repeats=2, cache=cache, watch=killed_after(5))
    file = tmp_path / "killed" / FILE
    before = file.read_bytes()
    assert before.count(b"\n") == 5
    file.write_bytes(before + before.split(b"\n")[0][:40])  # what a kill leaves of a line
    assert len(read_records(tmp_path / "killed")) == 5
    again = run(cells, questions, tmp_path / "killed", repeats=2, cache=cache)
    assert file.read_bytes().startswith(before)
    assert [untimed(record) for record in again] == [untimed(record) for record in whole]
    third = run(cells, questions, tmp_path / "killed", repeats=2, cache=cache)
    assert third == again
    assert "finished" in json.loads((tmp_path / "killed" / "provenance.json").read_text())


def test_another_run_in_a_folder_is_refused_with_the_difference(tmp_path, cache, questions):
    cells = cells_of(max_tokens=2)
    run(cells, questions, tmp_path, cache=cache)
    fewer = {"tinystories": questions["tinystories"][:1]}
    for change, words in [
        ({"repeats": 2}, r"other repeats \(1 there, 2 now\)"),
        ({"warmup": 0}, r"other warmup \(1 there, 0 now\)"),
        ({"questions": fewer}, r"other data \(tinystories: questions: 2 there, 1 now\)"),
        ({"cells": cells[:1]}, r"other cells \(2 there, 1 now\)"),
        ({"cells": cells_of(seed=2, max_tokens=2)}, r"other cells \(as many, but not the same\)"),
    ]:
        options = {"cells": cells, "questions": questions, "cache": cache, **change}
        with pytest.raises(UserError, match=words):
            run(options.pop("cells"), options.pop("questions"), tmp_path, **options)


def test_an_impossible_run_is_refused_before_it_begins(tmp_path, cache, questions):
    with pytest.raises(UserError, match="no questions for data set 'tinystories'"):
        run(cells_of(), {}, tmp_path, cache=cache)
    with pytest.raises(UserError, match="expected 1 repeat or more"):
        run(cells_of(), questions, tmp_path, repeats=0, cache=cache)
    assert not list(tmp_path.iterdir())
    long = {"tinystories": [Question("long", "tinystories", ("word " * 600,), chat=False)]}
    with pytest.raises(
        UserError, match=r"question 'long' of tinystories: expected at most 504 tokens, as embedded:target reads 512"
    ):
        run(cells_of(), long, tmp_path, cache=cache)
    assert not list(tmp_path.iterdir())  # the folder is free for the command without the mistake


def test_a_file_of_something_else_is_refused_as_records(tmp_path):
    (tmp_path / FILE).write_text('{"prompt": "x"}\n')
    with pytest.raises(UserError, match="line 1: no record"):
        Log(tmp_path)
    with pytest.raises(UserError, match="cannot read"):
        read_records(tmp_path / "nowhere")


def test_records_hold_what_the_engine_did(tmp_path, cache, questions):
    records = run(cells_of(drafter=["none", "model", "suffix:4"]), questions, tmp_path, cache=cache)
    assert read_records(tmp_path) == records
    for record in records:
        answer = record.answer
        assert answer.tokens == len(answer.token_ids) == 8
        assert answer.tokens == answer.accepted + answer.target_calls
        assert sum(record.accepted_lengths) == answer.rounds
        assert sum(n * count for n, count in enumerate(record.accepted_lengths)) == answer.accepted
        assert sum(answer.drafted_per_position) == answer.draft_tokens
        seconds = dict(answer.seconds)
        total = seconds.pop("total")
        assert total == pytest.approx(sum(seconds.values()))
        assert 1 <= answer.first_tokens <= answer.tokens
        assert 0 < answer.first_seconds <= total
        assert answer.method == ("plain" if record.cell.plain else record.cell.method)
    plain, *others = by_cell(records).values()
    for own in others:  # greedy and float32: the tokens are plain decoding's
        assert measures.same_tokens(own, plain) == (2, 2)


def test_a_drafter_that_learns_begins_without_memory(tmp_path, cache, questions):
    cells = matrix(**COMMON, drafter="suffix:4").cells
    forth = run(cells, questions, tmp_path / "forth", repeats=2, cache=cache)
    back = {"tinystories": questions["tinystories"][::-1]}
    for record in run(cells, back, tmp_path / "back", cache=cache):
        same = [other for other in forth if other.question == record.question]
        assert [other.answer.draft_tokens for other in same] == [record.answer.draft_tokens] * 2


# --- figures ----------------------------------------------------------------------------------------------------------


def record(question, *, tokens, calls, drafted=0, seconds=1.0, repeat=0, cell=None, places=(), reached=(), seed=1):
    """A record with given counts."""
    cell = cell or Cell(**PAIR, drafter="model", stopper="fixed:2", verifier="token")
    answer = Generation(
        token_ids=tuple(range(tokens)),
        text="",
        finish_reason="length",
        method=cell.method,
        tokens=tokens,
        target_calls=calls,
        rounds=reached[0] if reached else 0,
        draft_tokens=drafted,
        accepted=tokens - calls,
        accepted_per_position=tuple(places),
        drafted_per_position=tuple(reached),
        seconds={"draft": seconds / 4, "target": seconds / 2, "verify": 0.0, "other": seconds / 4, "total": seconds},
    )
    return Record(replace(cell, seed=seed), question, "", repeat, 10, answer)


def test_rates_by_hand():
    own = [
        record("a", tokens=12, calls=4, drafted=10, places=(4, 4), reached=(5, 5)),
        record("b", tokens=8, calls=6, drafted=6, places=(2, 0), reached=(3, 3)),
        record("b", tokens=8, calls=6, drafted=6, places=(2, 0), reached=(3, 3), repeat=1),  # repeats count once
    ]
    assert measures.block_efficiency(own).value == 20 / 10
    assert measures.verification_rate(own).value == 10 / 20
    assert measures.discard_rate(own).value == pytest.approx((16 - 10) / 20)
    assert measures.mean_accepted(own).value == 10 / 8
    assert measures.histogram(own) == [1 + 1, 0 + 2, 4 + 0]
    assert measures.acceptance_by_position(own) == [6 / 8, 4 / 8]
    assert measures.time_split(own) == {"draft": 0.25, "target": 0.5, "verify": 0.0, "other": 0.25}
    assert math.isnan(measures.block_efficiency(own).low)  # two questions are too few for an interval


def test_speed_is_paired_by_question_and_repeat():
    base = [record(q, tokens=10, calls=10, seconds=s) for q, s in (("a", 2.0), ("b", 10.0), ("c", 4.0), ("z", 1.0))]
    own = [record(q, tokens=10, calls=5, seconds=s) for q, s in (("a", 1.0), ("b", 2.0), ("c", 4.0), ("y", 1.0))]
    found = measures.speed_ratio(own, base)
    assert (found.value, found.count) == (2.0, 3)  # ratios 2, 5 and 1; questions of one side alone do not count
    slow = [record("a", tokens=10, calls=10, seconds=s, repeat=r) for r, s in enumerate((1.0, 2.0, 9.0))]
    fast = [record("a", tokens=10, calls=5, seconds=1.0, repeat=r) for r in range(3)]
    assert measures.speed_ratio(fast, slow).value == 2.0
    assert measures.speed_ratio(fast, []).count == 0


def test_decoding_speed_leaves_out_the_first_round():
    def answered(question, tokens, seconds, first_tokens, first_seconds):
        whole = record(question, tokens=tokens, calls=tokens, seconds=seconds)
        return replace(whole, answer=replace(whole.answer, first_tokens=first_tokens, first_seconds=first_seconds))

    base = [answered("a", 11, 6.0, 1, 5.0), answered("b", 11, 6.0, 1, 5.0)]
    own = [answered("a", 13, 5.5, 3, 5.0), answered("b", 3, 5.0, 3, 5.0)]
    assert measures.decoding_speed(own[0]) == pytest.approx(20)
    assert math.isnan(measures.decoding_speed(own[1])), "all in one round"
    assert math.isnan(measures.decoding_speed(record("a", tokens=5, calls=5))), "a record that does not know"
    found = measures.speed_ratio(own, base, measures.decoding_speed)
    assert (found.value, found.count) == (pytest.approx(2.0), 1)


def test_gain_is_a_ratio_of_sums_on_the_same_questions():
    base = [record("a", tokens=10, calls=5), record("b", tokens=10, calls=10)]
    own = [record("a", tokens=12, calls=4), record("b", tokens=10, calls=6), record("only", tokens=50, calls=1)]
    assert measures.efficiency_ratio(own, base).value == pytest.approx((22 / 10) / (20 / 15))


def test_seeds_of_a_question_are_one_unit():
    own = [record("a", tokens=10, calls=5, seed=seed) for seed in (1, 2, 3)]
    assert measures.block_efficiency(own).count == 1


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("count", "level", "low", "high"), [(20, 0.95, 0.92, 0.98), (6, 0.95, 0.92, 0.99), (20, 0.5, 0.44, 0.58)]
)
def test_intervals_hold_the_truth_as_often_as_they_say(count, level, low, high):
    # 500 seeded samples of normal values: the shares are fixed numbers, so the test never fails by chance. A sound
    # interval's share lies outside the bounds for fewer than 1 in 100 choices of seeds; plain percentiles of six values
    # hold the mean in 0.86 of samples, which is far outside.
    held = 0
    for trial in range(500):
        chooser = random.Random(trial)
        values = [chooser.gauss(3.0, 2.0) for _ in range(count)]
        found = bootstrap(values, lambda items: sum(items) / len(items), level=level, resamples=1000, seed=trial)
        held += found.low <= 3.0 <= found.high
    assert low <= held / 500 <= high, held / 500


def test_students_t_has_its_known_quantiles():
    for freedom, known in ((1, 12.706), (2, 4.303), (5, 2.571), (19, 2.093), (100, 1.984)):
        assert t_quantile(0.975, freedom) == pytest.approx(known, abs=1e-3)


def test_an_interval_is_deterministic_and_needs_six_items():
    values = [1.0, 2.0, 4.0, 8.0, 9.0, 3.0]
    assert bootstrap(values, max) == bootstrap(values, max)
    assert math.isnan(bootstrap(values[:5], max).low)
    assert Estimate(1.2, 1.1, 1.3, 9).sure == 1
    assert Estimate(0.8, 0.7, 0.9, 9).sure == -1
    assert Estimate(1.2, 0.9, 1.3, 9).sure == Estimate(1.2, math.nan, math.nan, 1).sure == 0


def test_the_geometric_mean_has_a_t_interval():
    found = geometric_mean([1.0, 4.0])
    reach = 12.706 * math.log(4) / math.sqrt(2) / math.sqrt(2)
    assert (found.value, found.count) == (pytest.approx(2.0), 2)
    assert (found.low, found.high) == pytest.approx((2 * math.exp(-reach), 2 * math.exp(reach)), rel=1e-3)
    assert geometric_mean([1.1, 1.2, 1.15, 1.12]).sure == 1
    assert geometric_mean([0.9, 0.8, 0.85]).sure == -1
    assert geometric_mean([1.1, 0.9, 1.05]).sure == 0
    alone = geometric_mean([3.0])
    assert (alone.value, alone.sure) == (pytest.approx(3.0), 0)
    assert math.isnan(alone.low)


def test_the_cost_model_is_fitted():
    counts = [(10, 4), (20, 5), (5, 9), (40, 8)]
    own = [record(str(i), tokens=20, calls=c, drafted=d, seconds=0.01 * d + 0.2 * c) for i, (d, c) in enumerate(counts)]
    found = measures.regress(own)
    assert (found.draft, found.target, found.r_squared) == pytest.approx((0.01, 0.2, 1.0))
    noisy = [
        replace(r, answer=replace(r.answer, seconds={"total": r.answer.seconds["total"] + e}))
        for r, e in zip(own, (0.3, -0.2, 0.1, -0.4), strict=True)
    ]
    assert 0 < measures.regress(noisy).r_squared < 1
    assert measures.regress(own[:2]) is None
    assert (
        measures.regress([record(str(i), tokens=9, calls=i, drafted=4 * i, seconds=float(i)) for i in range(1, 5)])
        is None
    )


def test_flops_by_hand():
    shape = shape_of(CONFIGS["gpt2"]())
    assert shape == {
        "layers": 2,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 4,
        "head_dim": 8,
        "inner": 128,
        "gated": False,
        "vocab": 97,
    }
    layer = 2 * 32 * 32 * 4 + 2 * (2 * 10 * 32) + 3 * 4 * 10 + 2 * 2 * 32 * 128
    assert pass_flops(shape, 1.0, 10.0) == 2 * 97 * 32 + 2 * layer + 2 * 32 * 97
    assert pass_flops(shape, 7.0, 10.0) == 7 * pass_flops(shape, 1.0, 10.0)
    assert shape_of(CONFIGS["llama"]())["gated"]
    assert shape_of(CONFIGS["llama"]())["kv_heads"] == 2
    one = record("a", tokens=6, calls=3, drafted=5)
    small = {**shape, "layers": 1}
    expected = (
        pass_flops(shape, 10.0, 5.0)
        + pass_flops(shape, 7.0, 13.0)
        + pass_flops(small, 10.0, 5.0)
        + pass_flops(small, 5.0, 13.0)
    )
    assert answer_flops(one, shape, small) == pytest.approx(expected)
    assert answer_flops(one, shape, None) is None
    inside = record("a", tokens=6, calls=3, drafted=5, cell=Cell(**COMMON, drafter="early_exit:2", verifier="token"))
    assert answer_flops(inside, shape, None) is None
    assert measures.flops_per_token([one], {"embedded:target": shape, "embedded:draft": small}) == pytest.approx(
        expected / 6
    )


# --- competitors ------------------------------------------------------------------------------------------------------


def test_competitors_give_plain_tokens_and_their_calls_are_counted(tmp_path, cache, questions):
    theirs = matrix(**PAIR, engine=list(COMPETITORS)).cells
    tuned = replace(
        theirs[1], setting=format_setting({"num_assistant_tokens": 3, "assistant_confidence_threshold": 0.0})
    )
    cells = [*matrix(**COMMON).cells, *theirs, tuned]
    found = by_cell(run(cells, questions, tmp_path, cache=cache))
    ours = next(iter(found.values()))
    for cell, own in found.items():
        assert measures.same_tokens(own, ours) == (2, 2), cell.method
        for one in own:
            answer = one.answer
            assert answer.tokens == answer.accepted + answer.target_calls == 8
            assert sum(one.accepted_lengths) == answer.rounds
            assert sum(n * count for n, count in enumerate(one.accepted_lengths)) == answer.accepted
            assert (answer.target_calls < 8) == (answer.accepted > 0)
            assert answer.first_tokens == 1 or answer.rounds, "plain decoding emits one token first"
            assert 1 <= answer.first_tokens < 8
            assert 0 < answer.first_seconds < answer.seconds["total"]
    totals = {cell.method: measures.total(own) for cell, own in found.items()}
    assert totals["transformers"].num_target_calls == 16
    assert totals["transformers"].num_draft_tokens == 0
    assert totals["transformers-assisted"].num_accepted_tokens > 0
    assert totals[tuned.method].num_draft_tokens <= 3 * totals[tuned.method].num_drafts
    effective = found[tuned][0].answer.method
    assert effective == "transformers-assisted (num_assistant_tokens=3,assistant_confidence_threshold=0.0)"
    model = cache.model("embedded:target", "float32")
    assert not model._forward_pre_hooks


def test_a_competitor_repeats_its_draws_and_leaves_torchs_generator_alone(cache, questions):
    cell = matrix(**PAIR, engine="transformers", temperature=1).cells[0]
    one = COMPETITORS["transformers"](cache, cell)
    prompt = cache.encode(cell, questions["tinystories"][0])
    state = torch.get_rng_state()
    first = one(prompt, cell.params)
    assert one(prompt, cell.params).token_ids == first.token_ids
    assert one(prompt, replace(cell.params, seed=99)).token_ids != first.token_ids
    assert torch.equal(torch.get_rng_state(), state)


def test_the_search_tries_the_grid_and_the_defaults(monkeypatch, cache, questions):
    monkeypatch.setitem(competitors.GRIDS, "transformers-lookup", {"prompt_lookup_num_tokens": (2, 3)})
    cell = matrix(**COMMON, engine="transformers-lookup").cells[0]
    rates = search(cache, cell, questions["tinystories"][:1])
    assert list(rates) == ["", "prompt_lookup_num_tokens=2", "prompt_lookup_num_tokens=3"]
    assert all(rate > 0 for rate in rates.values())


def test_settings_are_read_and_refused(cache):
    assert parse_setting("a=1,b=constant,c=0.5") == {"a": 1, "b": "constant", "c": 0.5}
    assert parse_setting(format_setting({"a": 1, "b": "constant"})) == {"a": 1, "b": "constant"}
    with pytest.raises(UserError, match="setting: expected name=value"):
        parse_setting("five")
    cell = replace(matrix(**COMMON, engine="transformers-lookup").cells[0], setting="warp=9")
    with pytest.raises(UserError, match="no generation option 'warp'"):
        COMPETITORS[cell.engine](cache, cell)
    with pytest.raises(UserError, match="needs a draft model"):
        matrix(**COMMON, engine="transformers-assisted", strict=True)


# --- quality ----------------------------------------------------------------------------------------------------------


def test_likelihood_is_that_of_the_target(cache, questions):
    question = questions["tinystories"][0]
    cell = matrix(**COMMON, temperature=0.7).cells[0]
    prompt, answer = cache.encode(cell, question), [5, 9, 33]
    with torch.inference_mode():
        logits = embedded_model("target")(torch.tensor([[*prompt, *answer]])).logits[0]
    rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    expected = float(rows.gather(-1, torch.tensor(answer).unsqueeze(-1)).mean())
    assert quality.log_likelihood(cache, cell, question, answer) == pytest.approx(expected, abs=1e-5)


def texts(*said):
    made = [record(str(place), tokens=3, calls=3) for place in range(len(said))]
    return [replace(one, answer=replace(one.answer, text=text)) for one, text in zip(made, said, strict=True)]


def test_rouge_and_judges_compare_question_by_question():
    base = texts("the cat sat down", "a dog ran")
    assert quality.rouge(base, base).value == 1
    assert quality.rouge(texts("the cat sat down", "zebra"), base).value == 0.5
    prompts = {("tinystories", str(place)): "say" for place in range(2)}
    longer = texts("the cat sat down at last", "a dog")

    def judge(prompt, one, two):
        assert prompt == "say"
        return 0.5 + 0.5 * ((len(one) > len(two)) - (len(one) < len(two)))

    assert quality.win_rate(longer, base, judge, prompts).value == 0.5
    assert quality.win_rate(base, base, judge, prompts).value == 0.5
    assert quality.win_rate(longer, base, lambda *_: 1.0, prompts).value == 0.5  # a judge that likes what comes first
    with pytest.raises(ValueError, match="judge: expected 0 to 1"):
        quality.win_rate(longer, base, lambda *_: 7.0, prompts)


# --- the report -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory, cache, questions):
    """A small run with a lossy rule."""
    out = tmp_path_factory.mktemp("run")
    records = run(report_cells(), questions, out, warmup=0, cache=cache)
    quality.score(records, questions, out, cache)
    write_report(out)
    return out


def report_cells():
    lists = {"drafter": ["none", "model", "chains:2"], "verifier": ["token", "block", "spectr", "last_token"]}
    short = {**PAIR, "temperature": [0, 1], "max_tokens": 4}
    return [*matrix(**short, **lists).cells, *matrix(**short, engine=["transformers", "transformers-assisted"]).cells]


def test_the_report_says_what_the_records_say(folder):
    text = (folder / REPORT).read_text()
    found, metadata = summarize(folder)
    assert len(found) == 2 * 8
    assert text.startswith("\n".join(["# Benchmark", "", *header(metadata[KEY])]))
    for setting, own in by_setting(found).items():
        assert f"## {setting.title}" in text
        assert "\n".join(count_table(own)) in text
        for one in own:
            assert f"| {one.method}{'' if one.lossless else ' (lossy)'} |" in text
    bases = ("plain", "transformers", "transformers-assisted")
    over = [f"{which}over {base}" for which in ("", "decoding ") for base in bases]
    for head in (*COUNT_HEADS, *over, "draft", "target"):
        assert f"| {head} |" in text
    for word in (
        "log-probability per token",
        "ROUGE-L",
        "R squared",
        "In effect",
        "percentile bootstrap",
        "Peak memory",
    ):
        assert word in text
    figures = json.loads((folder / FIGURES).read_text())
    assert figures[KEY] == metadata[KEY] == json.loads((folder / "provenance.json").read_text())[KEY]
    assert metadata[KEY]["machine"]["threads"] == 1
    for one, figure in zip(found, figures["methods"], strict=True):
        first = [r.answer for r in read_records(folder) if r.cell == one.cell]
        calls = sum(answer.target_calls for answer in first)
        assert figure["block_efficiency"]["value"] == sum(answer.tokens for answer in first) / calls
        assert figure["effective"] == {first[0].method: 2}
        assert figure["tokens"] == sum(answer.tokens for answer in first)
        if not one.cell.lossless or one.cell.engine != "draftproof" or one.setting.temperature:
            continue
        assert figure["same_tokens_as_plain"] in (None, [2, 2])


def test_lossy_rules_are_marked_and_gains_are_over_token(folder):
    found, _ = summarize(folder)
    for one in found:
        assert one.lossless == (one.cell.verifier != "last_token")
        ours = one.cell.engine == "draftproof" and not one.cell.plain
        assert (one.gain is not None) == (ours and one.method != "model, fixed:4, token")
        assert one.likelihood is not None
    block = next(one for one in found if one.method == "model, fixed:4, block" and one.setting.temperature == 1)
    token = next(one for one in found if one.method == "model, fixed:4, token" and one.setting.temperature == 1)
    ratio = measures.block_efficiency(block.records).value / measures.block_efficiency(token.records).value
    assert block.gain.value == pytest.approx(ratio)


def test_a_method_that_drafts_nothing_is_reported(folder):
    found, metadata = summarize(folder)
    assert "drafted nothing" not in markdown(found, metadata)
    idle = [replace(r, answer=replace(r.answer, draft_tokens=0)) for r in found[1].records]
    said = markdown([replace(found[1], records=idle)], metadata)
    assert f"{found[1].method} drafted nothing on {found[1].setting.title}" in said


def test_pictures_are_drawn(folder):
    for name in ("efficiency.png", "speed.png", "accepted.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
        assert f"]({name})" in (folder / REPORT).read_text()


def test_the_same_seeds_give_the_same_tables(tmp_path, folder, questions):
    methods = {"plain", "model, fixed:4, token", "chains:2, fixed:4, spectr", "transformers-assisted"}
    cells = [cell for cell in report_cells() if cell.method in methods]
    again = run(cells, questions, tmp_path, warmup=0, cache=ModelCache(device="cpu"))
    _, metadata = summarize(folder)
    shapes = {name: model["shape"] for name, model in metadata["models"].items()}
    before = summaries([record for record in read_records(folder) if record.cell in cells], shapes)
    after = summaries(again, shapes)
    assert {one.method for one in after} == methods
    assert [one.counts() for one in after] == [one.counts() for one in before]
    for old, new in zip(by_setting(before).values(), by_setting(after).values(), strict=True):
        assert count_table(new) == count_table(old)


def test_a_stopper_finds_the_head_that_ships_for_the_draft_of_a_cell():
    cell = Cell("embedded:target", "embedded:draft", drafter="model", stopper="acceptance:0.5", verifier="token")
    engine = ModelCache(device="cpu").engine(cell, max_batch=3)
    assert engine.max_batch == 3
    assert engine.drafter.name == "model"
