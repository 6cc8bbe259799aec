"""SPRINTER (arXiv 2502.04557): tables 2 to 5, figures 3, 5, 6, 12."""

from __future__ import annotations

from draftproof.reproduction.papers.base import PaperTable

_NEO = "target GPT-Neo-1.3B, draft GPT-Neo-125M"
_GPT2 = "target GPT2-XL, draft GPT2-Small"

TABLE2 = PaperTable(
    name="sprinter-table2",
    place="SPRINTER, arXiv 2502.04557, table 2, section 4",
    title="Accepted draft tokens a call, milliseconds and speed-up over speculative decoding, by method",
    setting=f"{_NEO}; {_GPT2}; Wiki-Summary and LM1B, 20 tokens a prompt; speed-up over SD, itself 1 by definition",
    columns=("tokens Wiki", "ms Wiki", "speed-up Wiki", "tokens LM1B", "ms LM1B", "speed-up LM1B"),
    rows={
        "GPT-Neo SD": (2.17, 0.92, None, 1.95, 0.84, None),
        "GPT-Neo SpecDec++": (1.16, 0.75, 1.23, 1.08, 0.61, 1.38),
        "GPT-Neo AdaEDL": (2.66, 0.72, 1.28, 1.91, 0.56, 1.50),
        "GPT-Neo mentored": (3.39, 0.76, 1.21, 3.11, 0.62, 1.35),
        "GPT-Neo SPRINTER": (11.10, 0.56, 1.64, 8.32, 0.46, 1.83),
        "GPT2 SD": (2.01, 0.84, None, 2.05, 0.73, None),
        "GPT2 SpecDec++": (1.82, 0.72, 1.18, 1.04, 0.61, 1.20),
        "GPT2 AdaEDL": (1.96, 0.73, 1.16, 1.52, 0.64, 1.14),
        "GPT2 mentored": (3.20, 0.60, 1.40, 3.12, 0.55, 1.33),
        "GPT2 SPRINTER": (10.83, 0.49, 1.69, 6.56, 0.44, 1.66),
    },
    spreads={
        "GPT-Neo SD": (None, 0.32, None, None, 0.21, None),
        "GPT-Neo SpecDec++": (None, 0.25, None, None, 0.24, None),
        "GPT-Neo AdaEDL": (None, 0.30, None, None, 0.12, None),
        "GPT-Neo mentored": (None, 0.18, None, None, 0.13, None),
        "GPT-Neo SPRINTER": (None, 0.22, None, None, 0.09, None),
        "GPT2 SD": (None, 0.24, None, None, 0.15, None),
        "GPT2 SpecDec++": (None, 0.23, None, None, 0.28, None),
        "GPT2 AdaEDL": (None, 0.25, None, None, 0.19, None),
        "GPT2 mentored": (None, 0.19, None, None, 0.07, None),
        "GPT2 SPRINTER": (None, 0.20, None, None, 0.12, None),
    },
    claims=(
        "SPRINTER keeps most draft tokens a call, so it calls the target least",
        "mentored decoding keeps more than speculative decoding",
        "SPRINTER is the fastest",
        "its quality stays close to that of speculative decoding (section 4, figure 7)",
    ),
)

TABLE3 = PaperTable(
    name="sprinter-table3",
    place="SPRINTER, arXiv 2502.04557, table 3, section 4",
    title="SPRINTER against each method: its win-tie rate by a judge in per cent, and its speed-up",
    setting=f"Vicuna 68M/7B on Spec-Bench; mentored decoding with {_NEO} on Wiki-Summary; judge GPT-4",
    columns=("win-tie %", "speed-up", "FLOPs of the method"),
    rows={
        "SD": (41.0, 1.64, "F_d(n) + F_t(n)"),
        "Medusa": (38.0, 1.51, "K F_d(n) + F_t(nodes)"),
        "Eagle2": (32.0, 1.17, "F_t(nodes) + depth F_d(nodes/depth)"),
        "mentored": (52.0, 1.35, "F_d(n) + F_t(n)"),
    },
    claims=(
        "SPRINTER needs fewest operations of the target: one position a round (section 3, appendix A.8)",
        "it is faster than each at a win-tie rate of 32% to 52%",
    ),
)

TABLE4 = PaperTable(
    name="sprinter-table4",
    place="SPRINTER, arXiv 2502.04557, table 4, section 4",
    title="A verifier trained on one data set and used on another: milliseconds and win-tie rate in per cent",
    setting=_NEO,
    columns=("ms, trained on Wiki", "ms, trained on LM1B", "win-tie, trained on Wiki", "win-tie, trained on LM1B"),
    rows={"on Wiki": (0.56, 0.57, 45.2, 47.6), "on LM1B": (0.51, 0.46, 38.2, 39.6)},
    spreads={"on Wiki": (0.22, 0.26, 3.12, 5.78), "on LM1B": (0.09, 0.09, 1.94, 1.94)},
    claims=("a verifier does about as well on the other data set as on its own",),
)

TABLE5 = PaperTable(
    name="sprinter-table5",
    place="SPRINTER, arXiv 2502.04557, table 5, appendix A.10 (appendix A.5 names lambda = 1 for GPT2 on Wiki-Summary)",
    title="Hyperparameters of the verifier: ratio lambda that labels a token acceptable, threshold tau",
    setting=f"{_NEO}; {_GPT2}",
    columns=("lambda Wiki", "tau Wiki", "lambda LM1B", "tau LM1B"),
    rows={"GPT-Neo": (1.2, 0.5, 1.2, 0.5), "GPT2": (1.2, 0.5, 1.2, 0.5)},
    claims=("lambda = 1.2 and tau = 0.5 serve every pair and data set",),
)

FIGURE3 = PaperTable(
    name="sprinter-figure3",
    place="SPRINTER, arXiv 2502.04557, figure 3, section 3",
    title="ROC curve of a linear verifier: its area on two data sets",
    setting=f"{_NEO}; a verifier of less than 1000 parameters",
    columns=("AUC",),
    rows={"Wiki-Summary": (0.8,), "LM1B": (0.9,)},
    picture=True,
    claims=("a linear verifier separates acceptable tokens from others well above chance",),
)

FIGURE5 = PaperTable(
    name="sprinter-figure5",
    place="SPRINTER, arXiv 2502.04557, figure 5, section 3 (Theorem 3.3)",
    title="Expected tokens of SPRINTER by true-positive rate, for r = 5 acceptable tokens",
    setting="r = 5, two false-positive rates up to 0.5",
    picture=True,
    claims=("with eta_FP up to 0.5 the tokens accepted beyond r never exceed 1 on average",),
)

FIGURE6 = PaperTable(
    name="sprinter-figure6",
    place="SPRINTER, arXiv 2502.04557, figure 6, section 3 (Theorem 3.4)",
    title="Expected stopping time of SPRINTER by true-positive rate, for r = 5 acceptable tokens",
    setting="r = 5, t_d = 0.1, two false-positive rates up to 0.5",
    picture=True,
    claims=("with eta_FP up to 0.5 the time beyond that of an ideal verifier never exceeds t_d",),
)

FIGURE12 = PaperTable(
    name="sprinter-figure12",
    place="SPRINTER, arXiv 2502.04557, figure 12, appendix A.10",
    title="ROC curves of verifiers trained at three ratios lambda",
    setting=f"{_NEO}, Wiki-Summary, lambda 1, 1.2 and 1.5",
    picture=True,
    claims=("the area is largest at lambda = 1.2",),
)
