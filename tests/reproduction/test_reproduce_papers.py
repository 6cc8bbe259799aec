"""The papers' numbers: typed in whole, each with its place, and equal to spot checks typed here by hand."""

from dataclasses import asdict

import pytest

from draftproof.errors import UserError
from draftproof.provenance import digest
from draftproof.reproduction.paper_tables import FOLDER, PaperTable, paper_tables
from draftproof.reproduction.run import RECIPES, chosen

PAPERS = {file.stem: paper_tables(file.stem) for file in sorted(FOLDER.glob("*.toml"))}
TABLES = [table for tables in PAPERS.values() for table in tables.values()]
DIGESTS = {
    "block_verification": "fad54159cef76549",
    "block_verification_v1": "222c95470163e199",
    "specdec_pp": "a9185bb104545e83",
    "spectr": "68f52e3ce4bac6c3",
    "sprinter": "a35083e16023f973",
}
EXPECTED = {
    "block-verification-v1": "figure2",
    "block-verification": "table1 table2 table4 table5 figure3",
    "spectr": "table1 table2 table4 figure1 figure2 figure3 figure5",
    "specdec-pp": "table1 table2 table3 figure1 figure3 figure4",
    "sprinter": "table2 table3 table4 table5 figure3 figure5 figure6 figure12",
}

PLACES = {
    "block-verification-v1": "Block Verification v1, arXiv 2403.10444v1",
    "block-verification": "Block Verification, arXiv 2403.10444",
    "spectr": "SpecTr, arXiv 2310.15141",
    "specdec-pp": "SpecDec++, arXiv 2405.19715",
    "sprinter": "SPRINTER, arXiv 2502.04557",
}


def test_the_numbers_are_those_that_were_typed():
    """A digest of every value of a paper: who corrects a number changes its digest here, too."""
    found = {paper: digest([asdict(table) for table in tables.values()]) for paper, tables in PAPERS.items()}
    assert {paper: whole[:16] for paper, whole in found.items()} == DIGESTS


def test_rows_of_another_length_are_refused():
    with pytest.raises(AssertionError, match="spectr-table1: length 4 has 1 of 2"):
        PaperTable("spectr-table1", "", "", "", columns=("a", "b"), rows={"length 4": (1.0,)})


def test_every_expected_table_and_figure_has_a_recipe():
    assert {f"{paper}-{each}" for paper, names in EXPECTED.items() for each in names.split()} <= set(RECIPES)


def test_every_typed_table_has_a_recipe():
    assert {table.name for table in TABLES} == set(RECIPES)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_tables_give_their_place_and_their_claims(table):
    paper, _, what = table.name.rpartition("-")
    number = what.removeprefix("table").removeprefix("figure")
    assert table.place.startswith(f"{PLACES[paper]}, {what.removesuffix(number)} {number}")
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
        (PAPERS["block_verification"]["table1"], "GPT Prompt", "BE gain %", 10.06),
        (PAPERS["block_verification"]["table1"], "WMT-DeEn", "WS block", 2.27),
        (PAPERS["block_verification"]["table1"], "Average", "WS gain %", 6.49),
        (PAPERS["block_verification"]["table2"], "T = 0.6", "BE block", 2.90),
        (PAPERS["block_verification"]["table4"], "GSM8K", "BE greedy block", 3.96),
        (PAPERS["block_verification"]["table4"], "XSum", "BE token", 3.49),
        (PAPERS["block_verification"]["table4"], "XSum", "BE block", 3.76),
        (PAPERS["block_verification"]["table5"], "PIQA", "BE SpecTr", 3.846),
        (PAPERS["block_verification"]["table5"], "LM1B", "WS SpecInfer", 1.245),
        (PAPERS["block_verification"]["figure4"], "XXXS, n = 6", "BE block", 2.63),
        (PAPERS["block_verification"]["figure4"], "XXS, n = 8", "BE gain %", 8.30),
        (PAPERS["spectr"]["table1"], "length 8", "batch 8", 1.42),
        (PAPERS["spectr"]["table2"], "SpecTr K=8 L=8", "BE", 3.3),
        (PAPERS["spectr"]["table4"], "20M", "K=8 L=8", 4.15),
        (PAPERS["spectr"]["table4"], "2M", "K=1 L=4", 1.86),
        (PAPERS["specdec_pp"]["table1"], "SpecDec++", "HumanEval", 20.61),
        (PAPERS["specdec_pp"]["table2"], "SpecDec, GSM8K", "R squared", 0.9926),
        (PAPERS["specdec_pp"]["table3"], "w_rej 6, D 3", "Alpaca", 18.80),
        (PAPERS["specdec_pp"]["table3"], "w_rej 12, D 2", "h GSM8K", 0.7),
        (PAPERS["specdec_pp"]["figure1"], "gain %", "HumanEval", 11.1),
        (PAPERS["specdec_pp"]["figure3"], "SpecDec", "t_draft", 0.0236),
        (PAPERS["sprinter"]["table2"], "GPT-Neo SPRINTER", "tokens Wiki", 11.10),
        (PAPERS["sprinter"]["table2"], "GPT2 AdaEDL", "speed-up LM1B", 1.14),
        (PAPERS["sprinter"]["table3"], "Eagle2", "speed-up", 1.17),
        (PAPERS["sprinter"]["table4"], "on LM1B", "win-tie, trained on Wiki", 38.2),
    ],
)
def test_spot_checks(table, row, column, value):
    assert table.value(row, column) == value


@pytest.mark.parametrize(
    "table",
    [
        PAPERS["block_verification"]["table1"],
        PAPERS["block_verification"]["table2"],
        PAPERS["block_verification"]["figure4"],
    ],
    ids=lambda table: table.name,
)
def test_gains_fit_the_columns_they_are_made_of(table):
    """Gains were computed before rounding: half a unit of the last digit on both sides moves them by at most 0.45."""
    for row in table.rows:
        for kind in ("BE", "WS"):
            token, block, gain = (table.value(row, f"{kind} {name}") for name in ("token", "block", "gain %"))
            assert 100 * (block / token - 1) == pytest.approx(gain, abs=0.85)


def test_averages_are_of_the_rows_above():
    table = PAPERS["block_verification"]["table1"]
    for place, name in enumerate(table.columns):
        rows = [row[place] for label, row in table.rows.items() if label != "Average"]
        assert sum(rows) / len(rows) == pytest.approx(table.value("Average", name), abs=0.011)


def test_efficiencies_grow_with_drafts_and_length_in_spectr():
    for row in PAPERS["spectr"]["table4"].rows.values():
        assert list(row[:4]) == sorted(row[:4])
        assert list(row[4:]) == sorted(row[4:])
        assert all(long > short for short, long in zip(row[:4], row[4:], strict=True))


def test_unknown_names_are_refused_with_what_is_legal():
    with pytest.raises(UserError, match=r"recipe: expected one of .*block-verification-table1.*, got 'table1'"):
        chosen(["block-verification-table1", "table1"])
    assert [recipe.name for recipe in chosen(["spectr-figure1", "block-verification-v1-figure2"])] == [
        "block-verification-v1-figure2",
        "spectr-figure1",
    ]
    assert len(chosen([])) == len(RECIPES)
