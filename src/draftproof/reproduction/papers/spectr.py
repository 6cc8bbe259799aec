"""SpecTr (arXiv 2310.15141): tables 1, 2, 4, figures 1, 2, 3, 5.

The paper calls the draft's distribution p and the target's q; titles here say target and draft. Its tables also have a
baseline of 1.0 token per call, which holds by definition and is left out here.
"""

from __future__ import annotations

from collections.abc import Mapping

from draftproof.reproduction.papers.base import PaperTable

_BATCHES = ("batch 1", "batch 2", "batch 4", "batch 8")

TABLE1 = PaperTable(
    name="spectr-table1",
    place="SpecTr, arXiv 2310.15141, table 1, section 8",
    title="Time of one target pass over length x batch tokens, relative to length 4, batch 1",
    setting="97M transformer on a GPU, 1000 runs",
    columns=_BATCHES,
    rows={"length 4": (1.00, 1.01, 1.06, 1.10), "length 8": (1.01, 1.09, 1.10, 1.42)},
    spreads={"length 4": (0.16, 0.15, 0.10, 0.16), "length 8": (0.18, 0.25, 0.09, 0.40)},
    claims=("the time of a pass stays roughly constant",),
)

TABLE2 = PaperTable(
    name="spectr-table2",
    place="SpecTr, arXiv 2310.15141, table 2, section 8",
    title="Tokens a target call by number of drafts K and length L",
    setting="97M transformer, 6M draft, LM1B, 1000 prompts, 3 seeds",
    columns=("BE",),
    rows={
        "speculative K=1 L=4": (2.2,),
        "SpecTr K=2 L=4": (2.4,),
        "SpecTr K=4 L=4": (2.7,),
        "SpecTr K=8 L=4": (3.0,),
        "speculative K=1 L=8": (2.3,),
        "SpecTr K=2 L=8": (2.6,),
        "SpecTr K=4 L=8": (3.0,),
        "SpecTr K=8 L=8": (3.3,),
    },
    claims=(
        "SpecTr emits more tokens a call the more drafts it has",
        "both methods emit more with L = 8 than with L = 4",
    ),
)

_SIZES: Mapping[str, tuple[float | None, ...]] = {
    "2M": (1.86, 2.07, 2.32, 2.56, 1.91, 2.15, 2.41, 2.68),
    "6M": (2.21, 2.43, 2.74, 2.99, 2.33, 2.61, 2.96, 3.27),
    "20M": (2.71, 2.96, 3.28, 3.49, 3.12, 3.48, 3.85, 4.15),
}
_SIZE_SPREADS: Mapping[str, tuple[float | None, ...]] = {
    "2M": (0.02, 0.01, 0.00, 0.01, 0.01, 0.01, 0.00, 0.01),
    "6M": (0.01, 0.01, 0.01, 0.02, 0.01, 0.02, 0.03, 0.02),
    "20M": (0.01, 0.00, 0.02, 0.03, 0.02, 0.04, 0.05, 0.04),
}

TABLE4 = PaperTable(
    name="spectr-table4",
    place="SpecTr, arXiv 2310.15141, table 4, appendix F",
    title="Tokens a target call by draft model, number of drafts K and length L",
    setting="97M transformer, drafts of 2M, 6M and 20M parameters, LM1B, temperature 1, 1000 prompts, 3 seeds",
    columns=tuple(f"K={k} L={n}" for n in (4, 8) for k in (1, 2, 4, 8)),
    rows=_SIZES,
    spreads=_SIZE_SPREADS,
    claims=(
        "SpecTr emits more the more drafts it has, with every draft model",
        "a larger draft model makes every method emit more",
    ),
)

FIGURE1 = PaperTable(
    name="spectr-figure1",
    place="SpecTr, arXiv 2310.15141, figure 1, section 5; closed form in appendix B.2",
    title="Best acceptance of k draws: draft uniform on 120 tokens, target uniform on 120/r of them",
    setting="d = 120",
    picture=True,
    claims=(
        "alpha_k = 1 - (1 - 1/r)^k: it grows with k and tends to 1, at very different rates",
        "K-SEQ reaches it (appendix D.1)",
    ),
)

FIGURE2 = PaperTable(
    name="spectr-figure2",
    place="SpecTr, arXiv 2310.15141, figure 2, section 5; closed form in appendix B.2",
    title="Best acceptance of k draws of a draft Ber(0.25), by k, for several Bernoulli targets",
    setting="draft Ber(0.25)",
    picture=True,
    claims=("acceptance is 1 at every k where target and draft agree, and falls as they part",),
)

FIGURE3 = PaperTable(
    name="spectr-figure3",
    place="SpecTr, arXiv 2310.15141, figure 3, section 5; closed form in appendix B.2",
    title="Best acceptance of k draws of a draft Ber(0.25), by the target's parameter, for several k",
    setting="draft Ber(0.25)",
    picture=True,
    claims=("with k = 8 acceptance is 1 for most targets; with few draws it depends on how close the two are",),
)

FIGURE5 = PaperTable(
    name="spectr-figure5",
    place="SpecTr, arXiv 2310.15141, figure 5, appendix D.2; the guarantee is Theorem 2",
    title="Acceptance of the best coupling (OTM-k) and of K-SEQ on a language model's compressed distributions",
    setting="the 97M and 6M models on one prompt, the union of the ten likeliest tokens of each, renormalised",
    picture=True,
    claims=(
        "at k = 1 both accept 1 - TV",
        "both accept more with more draws",
        "K-SEQ stays below the best coupling, and above 1 - (1 - 1/k)^k (more than 1 - 1/e) of it",
    ),
)
