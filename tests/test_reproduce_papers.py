"""The papers' numbers: typed in whole, each with its place, and equal to spot checks typed here by hand."""

import pytest

from draftproof.bench.papers import seed000, seed001, seed002, seed003, seed004
from draftproof.bench.papers.base import PaperTable
from draftproof.bench.recipes.index import RECIPES, chosen
from draftproof.errors import UserError

TABLES = [
    value
    for module in (seed000, seed001, seed002, seed003, seed004)
    for value in vars(module).values()
    if isinstance(value, PaperTable)
]
WANTED = {
    "000": "figure2",
    "001": "table1 table2 table4 table5 figure3",
    "002": "table1 table2 table4 figure1 figure2 figure3 figure5",
    "003": "table1 table2 table3 figure1 figure3 figure4",
    "004": "table2 table3 table4 table5 figure3 figure5 figure6 figure12",
}


def test_every_wanted_table_and_figure_has_a_recipe():
    assert {f"{seed}-{each}" for seed, names in WANTED.items() for each in names.split()} <= set(RECIPES)


def test_every_typed_table_has_a_recipe():
    assert {table.name for table in TABLES} == set(RECIPES)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_tables_say_where_they_stand_and_what_they_claim(table):
    seed, what = table.name.split("-")
    number = what.removeprefix("table").removeprefix("figure")
    assert table.place.startswith(f"seed {seed}, {what.removesuffix(number)} {number}")
    assert table.claims
    assert table.title
    assert table.setting
    assert table.rows or table.picture
    for row in (*table.rows.values(), *table.spreads.values()):
        assert len(row) == len(table.columns)
    assert set(table.spreads) <= set(table.rows)


@pytest.mark.parametrize(
    ("table", "row", "column", "value"),
    [
        (seed001.TABLE1, "GPT Prompt", "BE gain %", 10.06),
        (seed001.TABLE1, "WMT-DeEn", "WS block", 2.27),
        (seed001.TABLE1, "Average", "WS gain %", 6.49),
        (seed001.TABLE2, "T = 0.6", "BE block", 2.90),
        (seed001.TABLE4, "GSM8K", "BE greedy block", 3.96),
        (seed001.TABLE5, "PIQA", "BE SpecTr", 3.846),
        (seed001.TABLE5, "LM1B", "WS SpecInfer", 1.245),
        (seed001.FIGURE4, "XXXS, n = 6", "BE block", 2.63),
        (seed002.TABLE1, "length 8", "batch 8", 1.42),
        (seed002.TABLE2, "SpecTr K=8 L=8", "BE", 3.3),
        (seed002.TABLE4, "20M", "K=8 L=8", 4.15),
        (seed002.TABLE4, "2M", "K=1 L=4", 1.86),
        (seed003.TABLE1, "SpecDec++", "HumanEval", 20.61),
        (seed003.TABLE2, "SpecDec, GSM8K", "R squared", 0.9926),
        (seed003.TABLE3, "w_rej 6, D 3", "Alpaca", 18.80),
        (seed003.TABLE3, "w_rej 12, D 2", "h GSM8K", 0.7),
        (seed003.FIGURE1, "gain %", "HumanEval", 11.1),
        (seed004.TABLE2, "GPT-Neo SPRINTER", "tokens Wiki", 11.10),
        (seed004.TABLE2, "GPT2 AdaEDL", "speed-up LM1B", 1.14),
        (seed004.TABLE3, "Eagle2", "speed-up", 1.17),
        (seed004.TABLE4, "on LM1B", "win-tie, trained on Wiki", 38.2),
    ],
)
def test_spot_checks(table, row, column, value):
    assert table.value(row, column) == value


@pytest.mark.parametrize("table", [seed001.TABLE1, seed001.TABLE2, seed001.FIGURE4], ids=lambda table: table.name)
def test_gains_fit_the_columns_they_are_made_of(table):
    """Gains were computed before rounding: half a unit of the last digit on both sides moves them by at most 0.45."""
    for row in table.rows:
        for kind in ("BE", "WS"):
            token, block, gain = (table.value(row, f"{kind} {name}") for name in ("token", "block", "gain %"))
            assert 100 * (block / token - 1) == pytest.approx(gain, abs=0.85)


def test_averages_are_of_the_rows_above():
    table = seed001.TABLE1
    for place, name in enumerate(table.columns):
        rows = [row[place] for label, row in table.rows.items() if label != "Average"]
        assert sum(rows) / len(rows) == pytest.approx(table.value("Average", name), abs=0.011)


def test_efficiencies_grow_with_drafts_and_length_in_seed_002():
    for row in seed002.TABLE4.rows.values():
        assert list(row[:4]) == sorted(row[:4])
        assert list(row[4:]) == sorted(row[4:])
        assert all(long > short for short, long in zip(row[:4], row[4:], strict=True))


def test_unknown_names_are_refused_with_what_is_legal():
    with pytest.raises(UserError, match=r"recipe is 'table1': legal are .*001-table1"):
        chosen(["001-table1", "table1"])
    assert [recipe.name for recipe in chosen(["002-figure1", "000-figure2"])] == ["000-figure2", "002-figure1"]
    assert len(chosen([])) == len(RECIPES)
