"""Several drafts a row from a smaller model: K i.i.d. chains or a prefix tree, equal prefixes drawn into one node.

Knows: how a tree grows level by level, shared prefixes read once. Does not know: how its nodes are verified.

The draws at a node are i.i.d. from its row of q; how many there are depends on earlier rounds and on what was drawn
above, never on what is drawn below, so every rule on tries stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.backends.base import Feed, FeedOutput, Session, unread
from draftproof.draft import Draft, DraftStep
from draftproof.drafters.base import DraftRequest
from draftproof.drafters.draft_model import DraftModel, ModelBacked, stack_rows
from draftproof.errors import UserError
from draftproof.rng import Purpose, RoundRng
from draftproof.stoppers.base import Stopper
from draftproof.tree import ROOT, TokenTree

MAX_DRAWS = 64


class _Growing:
    """The tree of one row while it is drafted.

    Attributes:
        tokens, parents, probs: of each node.
        draws: the node of each draw, in order.
        frontier: nodes that may get children, with the number of draws that landed on each.
        rows: row of q after each frontier node.
        chains: draws at the root.
        signals: what the stopper saw along the path to each node.
    """

    def __init__(self, row: int, request: DraftRequest, session: Session, limit: int, chains: int) -> None:
        self.row = row
        self.request = request
        self.session = session
        self.limit = limit
        self.chains = chains
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.probs: list[Float[Tensor, " vocab"]] = []
        self.draws: list[int] = []
        self.frontier: dict[int, int] = {ROOT: 1}
        self.rows: dict[int, Float[Tensor, " vocab"]] = {}
        self.signals: dict[int, tuple[float, ...]] = {}
        self._nodes: dict[tuple[int, int], int] = {}

    def land(self, parent: int, token: int) -> int:
        """The node a draw lands on, made at the first such draw."""
        node = self._nodes.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self.probs.append(self.rows[parent])
        self.draws.append(node)
        return node

    def path(self, node: int) -> list[int]:
        """Drafted ids from the root down to a node."""
        ids: list[int] = []
        while node != ROOT:
            ids.insert(0, self.tokens[node])
            node = self.parents[node]
        return ids

    def draft(self, device: torch.device) -> Draft:
        """The finished draft."""
        if not self.tokens:
            return Draft.empty(device)
        tree = TokenTree(torch.tensor(self.tokens, device=device), tuple(self.parents))
        return Draft(tree, torch.stack(self.probs), tuple(self.draws))


class SampledTreeDrafter(ModelBacked):
    """Draws trees from a draft model, a level a forward pass.

    Args:
        model: the draft model; its backend must read trees.
        stopper: asked after each new node; a node it stops at gets no children.
        chains: K i.i.d. chains: K draws at the root, or as many as the stopper wants, then one for each draw that
            landed on a node.
        factors: instead of chains, a prefix tree: that many draws at every node of each depth (SpecTr, Algorithm 5).

    Raises:
        UserError: numbers out of range, a backend without tree attention, a stopper that needs what it cannot return.
    """

    branching = True

    def __init__(self, model: DraftModel, stopper: Stopper, *, chains: int = 4, factors: Sequence[int] = ()) -> None:
        if not 1 <= chains <= MAX_DRAWS:
            raise UserError(f"number of chains is {chains}: legal are 1 to {MAX_DRAWS}")
        if any(not 1 <= factor <= MAX_DRAWS for factor in factors):
            raise UserError(f"expansion factors are {list(factors)}: each must be 1 to {MAX_DRAWS}")
        if not model.backend.capabilities.trees:
            raise UserError(f"{model.backend.name} cannot read trees: draft single chains (drafter model) with it")
        super().__init__(model, stopper)
        self.chains = chains
        self.factors = tuple(factors)
        self.name = f"tree:{'x'.join(map(str, factors))}" if factors else f"chains:{chains}"

    @property
    def limit(self) -> int:
        """As deep as its stopper and its factors let it."""
        return min(self.stopper.limit, len(self.factors)) if self.factors else self.stopper.limit

    @property
    def most(self) -> int:
        """Drafts that a row can get: the stopper may want fewer chains; the factors of a prefix tree are fixed."""
        return 1 if self.factors else self.chains

    def propose(self, requests: Sequence[DraftRequest], rng: RoundRng) -> list[Draft]:
        """See Drafter: one forward pass of the draft model a level, for the rows that are still drafting."""
        self.stopper.begin([request.id for request in requests], self.most)
        trees = [self._open(row, request) for row, request in enumerate(requests)]
        live = [tree for tree in trees if tree.limit > 0]
        feeds = [Feed(tree.session, unread(tree.session, tree.request.tokens)) for tree in live]
        depth = 0
        while live:
            outputs = self.model.backend.forward(feeds, hidden=self.stopper.hidden_size > 0)
            self._grow(live, outputs, rng, depth)
            depth += 1
            live = [tree for tree in live if tree.frontier and depth < tree.limit]
            feeds = [self._feed(tree) for tree in live]
        return [tree.draft(self.model.backend.device) for tree in trees]

    def _open(self, row: int, request: DraftRequest) -> _Growing:
        wanted = min(self.stopper.wanted(request.id), self.limit)
        chains = min(self.stopper.drafts(request.id, self.most), self.most)
        return _Growing(row, request, self.model.session(request), self.model.depth(request, wanted), chains)

    def _feed(self, tree: _Growing) -> Feed:
        """The new level, whole: stopped nodes too, since parents are counted by slots."""
        known = len(tree.session.tail)
        tokens = torch.tensor(tree.tokens[known:], device=self.model.backend.device)
        return Feed(tree.session, (), TokenTree(tokens, tuple(tree.parents[known:]), known))

    def _counts(self, tree: _Growing, depth: int) -> list[int]:
        """For each draw of this level the frontier node it is made at."""
        if self.factors:
            return [node for node in tree.frontier for _ in range(self.factors[depth])]
        times = tree.chains if depth == 0 else 1
        return [node for node, landed in tree.frontier.items() for _ in range(landed * times)]

    def _grow(self, live: Sequence[_Growing], outputs: Sequence[FeedOutput], rng: RoundRng, depth: int) -> None:
        """Draw a level for every live tree, and let the stopper look at its new nodes."""
        for tree, output in zip(live, outputs, strict=True):
            self._take(tree, output)
        plans = [self._counts(tree, depth) for tree in live]
        drawn = self._draw(live, plans, rng, depth)
        for tree, plan, tokens in zip(live, plans, drawn, strict=True):
            tree.frontier = {}
            for parent, token in zip(plan, tokens, strict=False):
                node = tree.land(parent, token)
                tree.frontier[node] = tree.frontier.get(node, 0) + 1
        self._judge(live, outputs)

    def _take(self, tree: _Growing, output: FeedOutput) -> None:
        """Rows of q after the nodes just read."""
        first = len(tree.session.tail) - output.logits.shape[0]
        nodes = [ROOT] if not tree.tokens else list(range(first, len(tree.session.tail)))
        paths = [tree.path(node) for node in nodes] if self.model.path_dependent(tree.request) else [()] * len(nodes)
        rows = self.model.rows(tree.request, output.logits, paths, output.ids)
        tree.rows = dict(zip(nodes, rows, strict=True))

    def _judge(self, live: Sequence[_Growing], outputs: Sequence[FeedOutput]) -> None:
        """Take the new nodes that the stopper stops at out of their trees' frontiers."""
        new = [(tree, node) for tree in live for node in tree.frontier]
        signal = self.stopper.signal(self._step(live, outputs, new))
        if signal is None:
            return
        for (tree, node), value in zip(new, signal.tolist(), strict=True):
            tree.signals[node] = (*tree.signals.get(tree.parents[node], ()), value)
            if self.stopper.stop_after(tree.signals[node], tree.request.id):
                del tree.frontier[node]

    def _step(
        self, live: Sequence[_Growing], outputs: Sequence[FeedOutput], new: Sequence[tuple[_Growing, int]]
    ) -> DraftStep:
        """What the stopper is shown of new nodes: what the model made of their parents."""
        tokens = torch.tensor([tree.tokens[node] for tree, node in new], device=self.model.backend.device)
        made = {id(tree): output for tree, output in zip(live, outputs, strict=True)}
        places = {id(tree): {node: place for place, node in enumerate(tree.rows)} for tree in live}
        above = [(made[id(tree)], places[id(tree)][tree.parents[node]]) for tree, node in new]
        hidden = [output.hidden[place] for output, place in above if output.hidden is not None]
        logits = [output.logits[place] for output, place in above if self.stopper.reads_logits]
        probs = torch.stack([tree.probs[node] for tree, node in new])
        return DraftStep(tokens, probs, stack_rows(hidden), stack_rows(logits))

    @staticmethod
    def _draw(live: Sequence[_Growing], plans: Sequence[Sequence[int]], rng: RoundRng, depth: int) -> list[list[int]]:
        """Tokens of every planned draw; rows with fewer draws are padded, which leaves the others' draws alone."""
        most = max(map(len, plans))
        padded = [[*plan, *[plan[0]] * (most - len(plan))] for plan in plans]
        weights = torch.stack(
            [torch.stack([tree.rows[node] for node in plan]) for tree, plan in zip(live, padded, strict=True)]
        )
        tokens: list[list[int]] = (
            rng.at(Purpose.DRAFT, depth, [tree.row for tree in live]).categorical(weights).tolist()
        )
        return tokens
