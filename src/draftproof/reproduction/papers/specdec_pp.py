"""SpecDec++ (arXiv 2405.19715): tables 1, 2, 3, figures 1, 3, 4."""

from __future__ import annotations

from draftproof.reproduction.papers.base import PaperTable

_MODELS = "target llama-2-chat-70B, draft llama-2-chat-7B, two A100, temperature 1, top-k 50"
_SETS = ("Alpaca", "HumanEval", "GSM8K")
DRAFT_SECONDS, TARGET_SECONDS = 0.0234, 0.112  # of one pass while speculating, section 4.2

TABLE1 = PaperTable(
    name="specdec-pp-table1",
    place="SpecDec++, arXiv 2405.19715, table 1, section 4.3",
    title="Best throughput of adaptive and of constant draft lengths, tokens a second by the cost model",
    setting=f"{_MODELS}, t_draft = {DRAFT_SECONDS} s, t_target = {TARGET_SECONDS} s",
    columns=_SETS,
    rows={"SpecDec++": (18.88, 20.61, 20.95), "SpecDec (baseline)": (17.62, 18.55, 19.14)},
    claims=("adaptive lengths are faster than the best constant length on every data set",),
)

FIGURE1 = PaperTable(
    name="specdec-pp-figure1",
    place="SpecDec++, arXiv 2405.19715, figure 1 and its caption, section 1",
    title="Gain of adaptive over the best constant length in per cent, and speed-ups over plain decoding",
    setting=_MODELS,
    columns=_SETS,
    rows={
        "gain %": (7.2, 11.1, 9.4),
        "speed-up, SpecDec++": (2.04, 2.23, 2.26),
        "speed-up, SpecDec": (1.90, 2.00, 2.07),
    },
    claims=("adaptive lengths gain on every data set",),
)

TABLE2 = PaperTable(
    name="specdec-pp-table2",
    place="SpecDec++, arXiv 2405.19715, table 2, appendix C.2 (section 4.2)",
    title="Seconds of a draft and a target pass, by regression of time on both counts",
    setting=f"{_MODELS}; stand-alone models have an R squared each, the draft's is given here",
    columns=("t_draft", "t_target", "R squared"),
    rows={
        "stand-alone, Alpaca": (0.0206, 0.108, 0.9994),
        "stand-alone, HumanEval": (0.0207, 0.107, 0.9994),
        "stand-alone, GSM8K": (0.0206, 0.109, 0.9990),
        "stand-alone, average": (0.0207, 0.108, None),
        "SpecDec, Alpaca": (0.0232, 0.114, 0.9983),
        "SpecDec, HumanEval": (0.0246, 0.111, 0.9965),
        "SpecDec, GSM8K": (0.0229, 0.113, 0.9926),
        "SpecDec, average": (0.0236, 0.112, None),
        "SpecDec++, Alpaca": (0.0240, 0.110, 0.9982),
        "SpecDec++, HumanEval": (0.0229, 0.111, 0.9880),
        "SpecDec++, GSM8K": (0.0225, 0.113, 0.9925),
        "SpecDec++, average": (0.0231, 0.111, None),
    },
    spreads={
        "stand-alone, average": (0.0001, 0.001, None),
        "SpecDec, average": (0.0007, 0.001, None),
        "SpecDec++, average": (0.0006, 0.001, None),
    },
    claims=(
        "time is linear in the two counts: R squared is 0.98 or more",
        "the acceptance head costs nothing that can be seen",
    ),
)

FIGURE3 = PaperTable(
    name="specdec-pp-figure3",
    place="SpecDec++, arXiv 2405.19715, figure 3, section 4.2 (the averages of table 2 as bars)",
    title="Seconds of a draft and a target pass by setting, averaged over data sets",
    setting=_MODELS,
    columns=("t_draft", "t_target"),
    rows={name: TABLE2.rows[f"{name}, average"][:2] for name in ("stand-alone", "SpecDec", "SpecDec++")},
    picture=True,
    claims=("the acceptance head's cost is lost in the noise of the machine",),
)

FIGURE4 = PaperTable(
    name="specdec-pp-figure4",
    place="SpecDec++, arXiv 2405.19715, figure 4, section 4.3",
    title="Verification rate against discard rate, for constant lengths and for thresholds of the acceptance head",
    setting=f"{_MODELS}; lengths 2 to 14, thresholds 0.1 to 0.9",
    picture=True,
    claims=("the heads' points lie below the constant lengths' frontier, on every data set",),
)

TABLE3 = PaperTable(
    name="specdec-pp-table3",
    place="SpecDec++, arXiv 2405.19715, table 3, appendix C.3",
    title="Acceptance heads by rejection weight and depth: binary KL, best throughput and its threshold h",
    setting=f"{_MODELS}; heads trained for 3 epochs on Alpaca",
    columns=(
        "train KL",
        "eval KL",
        "Alpaca",
        "h Alpaca",
        "HumanEval",
        "h HumanEval",
        "GSM8K",
        "h GSM8K",
    ),
    rows={
        "w_rej 1, D 0": (0.422, 0.412, 18.48, 0.3, 19.91, 0.5, 20.32, 0.3),
        "w_rej 1, D 1": (0.409, 0.390, 18.39, 0.3, 20.29, 0.3, 20.44, 0.3),
        "w_rej 1, D 2": (0.391, 0.387, 18.87, 0.3, 20.26, 0.3, 20.87, 0.3),
        "w_rej 1, D 3": (0.387, 0.384, 18.82, 0.3, 20.10, 0.3, 20.86, 0.3),
        "w_rej 1, D 4": (0.384, 0.383, 18.57, 0.3, 20.51, 0.3, 20.73, 0.3),
        "w_rej 3, D 0": (0.515, 0.491, 18.31, 0.5, 20.12, 0.7, 20.36, 0.5),
        "w_rej 3, D 1": (0.479, 0.461, 18.88, 0.5, 20.32, 0.5, 20.70, 0.5),
        "w_rej 3, D 2": (0.475, 0.458, 18.60, 0.5, 20.17, 0.5, 20.61, 0.3),
        "w_rej 3, D 3": (0.462, 0.454, 18.76, 0.5, 20.32, 0.5, 20.88, 0.5),
        "w_rej 3, D 4": (0.465, 0.451, 18.88, 0.5, 20.50, 0.7, 20.82, 0.5),
        "w_rej 6, D 0": (0.657, 0.637, 18.67, 0.7, 19.90, 0.9, 20.24, 0.7),
        "w_rej 6, D 1": (0.620, 0.596, 18.75, 0.7, 20.09, 0.9, 20.86, 0.7),
        "w_rej 6, D 2": (0.607, 0.589, 18.65, 0.7, 20.17, 0.9, 20.70, 0.7),
        "w_rej 6, D 3": (0.617, 0.582, 18.80, 0.7, 20.47, 0.7, 20.95, 0.7),
        "w_rej 6, D 4": (0.603, 0.575, 18.87, 0.7, 20.61, 0.7, 20.77, 0.7),
        "w_rej 12, D 0": (0.922, 0.871, 18.55, 0.9, 19.93, 0.9, 20.62, 0.9),
        "w_rej 12, D 1": (0.830, 0.805, 18.71, 0.9, 20.25, 0.9, 20.73, 0.9),
        "w_rej 12, D 2": (0.834, 0.794, 18.58, 0.9, 20.39, 0.9, 20.77, 0.7),
        "w_rej 12, D 3": (0.801, 0.781, 18.76, 0.9, 20.29, 0.9, 20.67, 0.9),
        "w_rej 12, D 4": (0.799, 0.773, 18.82, 0.9, 20.19, 0.9, 20.65, 0.9),
    },
    claims=(
        "the unweighted KL grows with the weight of rejections",
        "the best threshold h grows with that weight",
        "deeper heads have the smaller KL",
    ),
)
