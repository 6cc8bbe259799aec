"""Block Verification (arXiv 2403.10444): tables 1, 2, 4, 5, figures 3 and 4."""

from __future__ import annotations

from draftproof.reproduction.papers.base import PaperTable

_PALM = "target PALM-2-S, draft PALM-2-XXS, 1000 prompts a data set, 3 seeds"
_GAINS = ("BE token", "BE block", "BE gain %", "WS token", "WS block", "WS gain %")

TABLE1 = PaperTable(
    name="block-verification-table1",
    place="Block Verification, arXiv 2403.10444, table 1, section 6.1",
    title="Token and block verification at n = 8: block efficiency and wall-clock speed-up",
    setting=f"{_PALM}, n = 8",
    columns=_GAINS,
    rows={
        "LM1B": (3.21, 3.49, 8.68, 2.17, 2.32, 6.85),
        "GPT Prompt": (3.41, 3.76, 10.06, 2.30, 2.48, 8.14),
        "WebQA": (3.44, 3.70, 7.53, 2.32, 2.45, 5.75),
        "PIQA": (3.40, 3.68, 8.30, 2.29, 2.44, 6.52),
        "ShareGPT": (3.34, 3.62, 8.45, 2.25, 2.40, 6.68),
        "XSum": (3.49, 3.76, 7.63, 2.35, 2.49, 5.82),
        "GSM8K": (3.81, 4.15, 8.74, 2.55, 2.73, 6.84),
        "WMT-DeEn": (3.19, 3.41, 7.00, 2.15, 2.27, 5.36),
        "Average": (3.41, 3.70, 8.30, 2.30, 2.45, 6.49),
    },
    spreads={
        "LM1B": (0.01, 0.02, 0.79, 0.01, 0.01, 0.74),
        "GPT Prompt": (0.04, 0.02, 1.66, 0.02, 0.01, 1.55),
        "WebQA": (0.01, 0.01, 0.24, 0.00, 0.01, 0.22),
        "PIQA": (0.02, 0.00, 0.62, 0.01, 0.00, 0.58),
        "ShareGPT": (0.01, 0.03, 0.98, 0.01, 0.02, 0.91),
        "XSum": (0.02, 0.01, 0.94, 0.01, 0.01, 0.88),
        "GSM8K": (0.01, 0.03, 0.56, 0.01, 0.02, 0.51),
        "WMT-DeEn": (0.01, 0.02, 0.78, 0.01, 0.01, 0.73),
    },
    claims=(
        "block verification emits more tokens a call than token verification on every data set",
        "the gain in block efficiency lies between 7.00% and 10.06%",
        "wall-clock time gains too, by 5.36% to 8.14%",
    ),
)

TABLE2 = PaperTable(
    name="block-verification-table2",
    place="Block Verification, arXiv 2403.10444, table 2, section 6.2",
    title="Token and block verification by temperature at n = 8",
    setting="target Vicuna-7B-v1.3, draft Vicuna-68M, Spec-Bench, n = 8, 3 seeds",
    columns=_GAINS,
    rows={
        "T = 0.2": (2.75, 2.85, 3.72, 1.22, 1.24, 1.66),
        "T = 0.6": (2.75, 2.90, 5.32, 1.23, 1.29, 4.24),
        "T = 1.0": (2.79, 3.04, 8.70, 1.27, 1.34, 6.07),
    },
    claims=(
        "block verification gains at every temperature above 0",
        "the gain is larger at larger temperatures",
        "at temperature 0 the two rules are one",
    ),
)

# Table 4 repeats the block efficiencies of table 1 beside these of greedy block verification.
_GREEDY = {
    "LM1B": 3.30,
    "GPT Prompt": 3.51,
    "WebQA": 3.52,
    "PIQA": 3.49,
    "ShareGPT": 3.44,
    "XSum": 3.59,
    "GSM8K": 3.96,
    "WMT-DeEn": 3.26,
}

TABLE4 = PaperTable(
    name="block-verification-table4",
    place="Block Verification, arXiv 2403.10444, table 4, appendix C.1",
    title="Token, block and greedy block verification at n = 8: block efficiency over whole runs",
    setting=f"{_PALM}, n = 8",
    columns=("BE token", "BE block", "BE greedy block"),
    rows={name: (*TABLE1.rows[name][:2], greedy) for name, greedy in _GREEDY.items()},
    claims=(
        "in one round greedy block verification accepts at least as much as block verification (Theorem 3)",
        "over whole runs it still beats token verification",
        "over whole runs block verification beats it",
    ),
)

TABLE5 = PaperTable(
    name="block-verification-table5",
    place="Block Verification, arXiv 2403.10444, table 5, appendix D.1",
    title="One draft against two: token, block, SpecTr, SpecInfer at n = 8 in batches of 8",
    setting=f"{_PALM}, n = 8, K = 2 for SpecTr and SpecInfer, batch 8",
    columns=(
        "WS token",
        "WS block",
        "WS SpecTr",
        "WS SpecInfer",
        "BE token",
        "BE block",
        "BE SpecTr",
        "BE SpecInfer",
    ),
    rows={
        "GPT Prompt": (1.300, 1.381, 1.290, 1.263, 3.394, 3.715, 3.898, 3.833),
        "WebQA": (1.302, 1.368, 1.279, 1.274, 3.451, 3.700, 3.933, 3.894),
        "ShareGPT": (1.267, 1.333, 1.244, 1.236, 3.366, 3.630, 3.824, 3.780),
        "GSM8K": (1.353, 1.445, 1.344, 1.319, 3.856, 4.179, 4.356, 4.277),
        "XSum": (1.328, 1.403, 1.300, 1.285, 3.487, 3.768, 3.949, 3.897),
        "PIQA": (1.305, 1.377, 1.270, 1.280, 3.401, 3.685, 3.846, 3.820),
        "LM1B": (1.274, 1.344, 1.253, 1.245, 3.218, 3.494, 3.669, 3.629),
        "WMT-DeEn": (1.222, 1.293, 1.204, 1.194, 3.165, 3.422, 3.603, 3.560),
    },
    claims=(
        "SpecTr emits most tokens a call, then SpecInfer, block and token verification",
        "in time block verification is first, for a batch leaves no free arithmetic for more drafts",
    ),
)

FIGURE3 = PaperTable(
    name="block-verification-figure3",
    place="Block Verification, arXiv 2403.10444, figure 3, section 3; the numbers of section 2",
    title="Distribution of the accepted length on the two-token toy pair at n = 10, and its means at n = 2",
    setting="p = (1/3, 2/3), q = (2/3, 1/3), whatever the context",
    columns=("E[accepted] at n = 2",),
    rows={"token": (10 / 9,), "block": (11 / 9,), "full information": (12 / 9,)},
    picture=True,
    claims=("block verification accepts longer prefixes: Pr(accepted >= x) is larger at every x",),
)

FIGURE4 = PaperTable(
    name="block-verification-figure4",
    place="Block Verification, arXiv 2403.10444, figure 4 (a table), figure 5, section 6.1; averages of 1, 6 to 10",
    title="Token and block verification by draft length n and draft model, averaged over data sets",
    setting="target PALM-2-S, draft PALM-2-XXS or the smaller PALM-2-XXXS",
    columns=_GAINS,
    rows={
        "XXS, n = 4": (2.89, 2.99, 3.36, 2.44, 2.50, 2.49),
        "XXS, n = 6": (3.23, 3.43, 6.10, 2.43, 2.54, 4.67),
        "XXS, n = 8": TABLE1.rows["Average"],
        "XXXS, n = 4": (2.35, 2.43, 3.16, 2.36, 2.43, 2.89),
        "XXXS, n = 6": (2.50, 2.63, 5.07, 2.39, 2.50, 4.67),
        "XXXS, n = 8": (2.57, 2.73, 6.27, 2.28, 2.40, 5.36),
    },
    claims=(
        "the gain of block over token verification grows with n",
        "block efficiency of both rules grows with n",
        "at n = 1 the rules are one",
        "the gain is larger with the better draft model",
    ),
)
