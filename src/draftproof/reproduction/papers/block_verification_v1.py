"""Block Verification v1 (arXiv 2403.10444v1): figure 2."""

from __future__ import annotations

from draftproof.reproduction.papers.base import PaperTable

FIGURE2 = PaperTable(
    name="block-verification-v1-figure2",
    place="Block Verification v1, arXiv 2403.10444v1, figure 2, section 3 (equations (6), (7), memoryless)",
    title="Expected accepted tokens of token-level and block-level couplings of two memoryless binary sources",
    setting="target Ber(0.75), draft Ber(p) for several p, lengths L = 1, 2, ...",
    picture=True,
    claims=(
        "block level accepts strictly more whenever the sources differ (and L > 1)",
        "the gap grows with L",
    ),
)
