"""Expected accepted tokens of every rule on the same drafts: E[accepted | draft], with less noise than whole runs.

A `Recorder` takes the place of the verification rule in the engine. In each round it records, for every rule, length
and number of drafts, the expected number of accepted tokens given the draft, and emits one token of the target. So
rounds begin at every position of the target's own text, and all rules get the same drafts there (common random
numbers). In whole runs, each rule begins a round where its last round ended. Both give block efficiencies: this one
compares rules, the other shows the gain of a run.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from draftproof.draft import Draft, Verdict
from draftproof.functional.chain import block_acceptance, log_ratios
from draftproof.functional.coupling import first_success, kseq_accept, kseq_plan, kseq_residual, rounds_plan
from draftproof.functional.greedy import greedy_acceptance
from draftproof.functional.nodes import DepthSlots, Tries
from draftproof.rng import Rng
from draftproof.tree import ROOT

CHAIN_RULES = ("token", "block", "greedy_block")
TRIE_RULES = ("spectr", "multi_round")
Pieces = tuple[Int[Tensor, "B K n"], Float[Tensor, "B K n V"], Float[Tensor, "B K m V"]]


def key(rule: str, n: int, drafts: int = 1) -> str:
    """The name of the column of a rule, draft length and number of drafts."""
    return f"{rule} n={n} K={drafts}"


def chains_of(draft: Draft) -> list[list[int]]:
    """The nodes of each drafted chain; equal prefixes share nodes.

    A draw at a node goes to the next chain that has reached that node. This order does not depend on the tokens, so the
    chains are i.i.d. as they were drawn.
    """
    parents = draft.tree.parents
    draws = range(len(draft)) if draft.draws is None else draft.draws
    chains: list[list[int]] = [[] for node in draws if parents[node] == ROOT]
    waiting: dict[int, deque[int]] = defaultdict(deque)
    waiting[ROOT].extend(range(len(chains)))
    for node in draws:
        chain = waiting[parents[node]].popleft()
        chains[chain].append(node)
        waiting[node].append(chain)
    return chains


def pieces(drafts: Sequence[Draft], target_probs: Sequence[Float[Tensor, "_ V"]]) -> Pieces:
    """Tokens, q and p of every chain; all drafts have the same number of chains of the same length."""
    tokens, q, p = [], [], []
    for draft, probs in zip(drafts, target_probs, strict=True):
        assert draft.probs is not None, "a recorder does not accept point masses"
        nodes = torch.tensor(chains_of(draft), device=draft.probs.device)
        tokens.append(draft.tree.tokens[nodes])
        q.append(draft.probs[nodes])
        root = torch.zeros_like(nodes[:, :1])
        p.append(probs[torch.cat([root, nodes + 1], -1)])
    return torch.stack(tokens), torch.stack(q), torch.stack(p)


def chain_ccdf(
    rule: str, tokens: Int[Tensor, "R n"], q: Float[Tensor, "R n V"], p: Float[Tensor, "R m V"]
) -> Float[Tensor, "R n"]:
    """Pr(at least i tokens are accepted | chain) for i = 1..n in one round of a rule for single chains.

    The rule's own acceptance probabilities are used. p has the target's rows before each token and after the last.
    """
    if rule == "token":
        return log_ratios(tokens, q, p).clamp(max=0).exp().cumprod(-1)
    sizes = torch.full_like(tokens[:, 0], tokens.shape[1])
    h = (block_acceptance if rule == "block" else greedy_acceptance)(tokens, q, p, sizes)[1]
    none_from = (1 - h).flip(-1).cumprod(-1).flip(-1)  # Pr(every place from i on rejects): the last success counts
    return 1 - none_from


Plan = Callable[[Float[Tensor, "r V"], Float[Tensor, "r V"], Int[Tensor, "r D"], Tensor], tuple[Tensor, Tensor]]


def _spectr(
    p: Float[Tensor, "r V"], q: Float[Tensor, "r V"], ids: Int[Tensor, "r D"], mask: Tensor
) -> tuple[Tensor, Tensor]:
    plan = kseq_plan(p, q, mask.sum(-1))
    return kseq_accept(p.gather(-1, ids), q.gather(-1, ids), plan.gamma), kseq_residual(p, q, plan)


def _multi_round(
    p: Float[Tensor, "r V"], q: Float[Tensor, "r V"], ids: Int[Tensor, "r D"], mask: Tensor
) -> tuple[Tensor, Tensor]:
    plan = rounds_plan(p, ids, mask, lambda _: q)
    return plan.accept, plan.left


_PLANS: dict[str, Plan] = {"spectr": _spectr, "multi_round": _multi_round}


def trie_ccdf(
    rule: str, tokens: Int[Tensor, "B K n"], q: Float[Tensor, "B K n V"], p: Float[Tensor, "B K m V"]
) -> Float[Tensor, "B n"]:
    """Pr(at least l tokens are accepted | K i.i.d. chains) for l = 1..n, of a rule that walks from the root down.

    A draw is kept if the rule selects its token: by accepting that draw, by accepting another draw of the same token,
    or from the residual (SpecTr, Algorithm 3). The outcome at a place does not depend on later places, so the first l
    columns are also correct for drafts cut to l tokens.
    """
    tries = Tries.from_chains(tokens)
    rows = (q.flatten(0, 2), p.flatten(0, 2))
    reach = torch.zeros(tries.tokens.numel(), dtype=torch.float64, device=tokens.device)
    reach[:: tries.tokens.shape[1]] = 1
    above, found = _above(tries), []
    for depth, level in enumerate(tries.inner, 1):
        for slots, chance in _selected(tries, level, rows, _PLANS[rule]):
            reach.index_add_(0, slots, chance * reach[above[slots]])
        at = tries.depth.flatten() == depth
        found.append((reach * at).reshape(tries.tokens.shape).sum(-1))
    return torch.stack(found, -1)


def _above(tries: Tries) -> Int[Tensor, " slots"]:
    """The flat slot of each slot's parent."""
    starts = torch.arange(tries.tokens.shape[0], device=tries.tokens.device).unsqueeze(-1) * tries.tokens.shape[1]
    return (tries.parent + starts).flatten()


def _selected(
    tries: Tries, level: DepthSlots, rows: tuple[Tensor, Tensor], plan: Plan
) -> Iterator[tuple[Int[Tensor, " m"], Float[Tensor, " m"]]]:
    """For the places of one depth, each drawn slot and (its share of) the probability that it is selected.

    Places with one draw are computed separately from those with several, because they need no root search.
    """
    q, p = rows
    for part in (level.rows[: level.single], level.rows[level.single :]):
        if not len(part):
            continue
        local = tries.kids.flatten(0, 1)[part]
        local = local[:, : int((local > 0).sum(-1).max())]
        mask = local > 0
        kids = local + (part // tries.tokens.shape[1] * tries.tokens.shape[1]).unsqueeze(-1)
        ids = tries.tokens.flatten()[kids]
        target, drafted = p[tries.p_row.flatten()[part]], q[tries.q_row.flatten()[kids[:, 0]]]
        accept, residual = plan(target, drafted, ids, mask)
        first = first_success(accept.double() * mask)
        rest = residual.double() / residual.sum(-1, dtype=torch.float64, keepdim=True)
        repeated = ((kids.unsqueeze(-1) == kids.unsqueeze(-2)) & mask.unsqueeze(-2)).sum(-1)  # draws of the same token
        chance = first[:, :-1] + first[:, -1:] * rest.gather(-1, ids) / repeated.clamp(min=1)
        yield kids[mask], chance[mask]


class Recorder:
    """A verifier that decodes plainly, and records for every draft the expected accepted tokens of each rule.

    Lengths and, for rules on tries, numbers of drafts are at most what is drafted. `rounds` has for each round, by the
    name of a column, the expected accepted tokens of each request.
    """

    name = "recorder"
    lossless = True
    branching = True
    point_masses = False
    constant_length = False
    shared_noise = False

    def __init__(self, lengths: Sequence[int], drafts: Sequence[int] = ()) -> None:
        self.lengths = tuple(lengths)
        self.drafts = tuple(drafts)
        self.rounds: list[dict[str, list[float]]] = []

    def verify(
        self,
        drafts: Sequence[Draft],
        target_probs: Sequence[Float[Tensor, "_ vocab"]],
        rng: Rng,
        states: Sequence[object],  # noqa: ARG002 - the recorder has no state
    ) -> list[Verdict]:
        """Nothing is accepted, and the next token is the target's own."""
        if all(len(draft) and max(map(len, chains_of(draft))) >= max(self.lengths) for draft in drafts):
            self.rounds.append(self._expected(*pieces(drafts, target_probs)))
        tokens = rng.categorical(torch.stack([probs[0] for probs in target_probs])).tolist()
        return [Verdict((), token, (token,)) for token in tokens]

    def _expected(
        self, tokens: Int[Tensor, "B K n"], q: Float[Tensor, "B K n V"], p: Float[Tensor, "B K m V"]
    ) -> dict[str, list[float]]:
        """The expectation of every request in each column; rules for a single chain are averaged over the chains."""
        expected: dict[str, list[float]] = {}
        flat = (tokens.flatten(0, 1), q.flatten(0, 1), p.flatten(0, 1))
        for n in self.lengths:
            for rule in CHAIN_RULES:
                values = chain_ccdf(rule, flat[0][:, :n], flat[1][:, :n], flat[2][:, : n + 1]).sum(-1)
                expected[key(rule, n)] = values.reshape(tokens.shape[:2]).mean(-1).tolist()
        for k in self.drafts:
            for rule in TRIE_RULES:
                chances = trie_ccdf(rule, tokens[:, :k], q[:, :k], p[:, :k])
                for n in self.lengths:
                    expected[key(rule, n, k)] = chances[:, :n].sum(-1).tolist()
        return expected
