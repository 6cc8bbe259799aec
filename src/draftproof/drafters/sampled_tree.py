"""The drafters `chains` and `tree`: K i.i.d. chains, or a prefix tree, from a draft model; equal prefixes are merged.

The draws at a node are i.i.d. from the node's row of q. Their number depends on earlier rounds and on the draws above
the node, but never on the draws below it, so every rule on tries stays exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.accelerator import to_device
from draftproof.backends.base import Feed, FeedOutput, Session
from draftproof.draft import Draft, DraftStep
from draftproof.drafters.base import DraftRequest
from draftproof.drafters.draft_model import DraftModel, ModelBacked, stack_rows
from draftproof.drafters.model import ModelDrafter
from draftproof.errors import UserError, refuse_outside
from draftproof.rng import Purpose, RoundRng
from draftproof.stoppers.base import Stopper
from draftproof.tree import ROOT, TokenTree

MAX_DRAWS = 64


class _DraftTree:
    """The tree of one row while it is drafted."""

    def __init__(self, row: int, request: DraftRequest, session: Session, limit: int, chains: int) -> None:
        self.row = row
        self.request = request
        self.session = session
        self.limit = limit
        self.chains = chains  # draws at the root
        self.tokens: list[int] = []  # this and the next two of each node
        self.parents: list[int] = []
        self.probs: list[Float[Tensor, " vocab"]] = []  # rows of q
        self.draws: list[int] = []  # the node of each draw, in order of drawing
        self.frontier: dict[int, int] = {ROOT: 1}  # nodes that may get children, with the number of draws of each
        self.rows: dict[int, Float[Tensor, " vocab"]] = {}  # of q after each node of the frontier
        self.signals: dict[int, tuple[float, ...]] = {}  # the stopper's signals along the path to each node
        self._nodes: dict[tuple[int, int], int] = {}

    def add(self, parent: int, token: int) -> int:
        """Add a draw and return its node, which is new for the first draw of this token."""
        node = self._nodes.setdefault((parent, token), len(self.tokens))
        if node == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self.probs.append(self.rows[parent])
        self.draws.append(node)
        return node

    def path(self, node: int) -> list[int]:
        """The drafted ids from the root down to a node."""
        ids: list[int] = []
        while node != ROOT:
            ids.insert(0, self.tokens[node])
            node = self.parents[node]
        return ids

    def draft(self, device: torch.device) -> Draft:
        if not self.tokens:
            return Draft.empty(device)
        tree = TokenTree(to_device(self.tokens, device), tuple(self.parents))
        return Draft(tree, torch.stack(self.probs), tuple(self.draws))


class SampledTreeDrafter(ModelBacked):
    """Draws trees from a draft model, one level for each forward pass.

    Args:
        model: the draft model; its backend must be able to read trees.
        stopper: called for each new node; a node where it stops gets no children.
        chains: K, for K i.i.d. chains: at most K draws at the root (the stopper may choose fewer), and below it as many
            draws at a node as there were draws of the node.
        factors: instead of chains, a prefix tree: the number of draws at every node of each depth (SpecTr, arXiv
            2310.15141, Algorithm 5).
    """

    branching = True

    def __init__(self, model: DraftModel, stopper: Stopper, *, chains: int = 4, factors: Sequence[int] = ()) -> None:
        refuse_outside("number of chains", chains, 1, MAX_DRAWS)
        if any(not 1 <= factor <= MAX_DRAWS for factor in factors):
            raise UserError(f"expansion factors: expected 1 to {MAX_DRAWS} each, got {list(factors)}")
        if not model.backend.capabilities.trees:
            raise UserError(f"{model.backend.name} cannot read trees: use a drafter of single chains (model) with it")
        super().__init__(model, stopper)
        self.chains = chains
        self.factors = tuple(factors)
        self.name = f"tree:{'x'.join(map(str, factors))}" if factors else f"chains:{chains}"

    @property
    def limit(self) -> int:
        """The stopper's limit, or the depth of the prefix tree if that is less."""
        return min(self.stopper.limit, len(self.factors)) if self.factors else self.stopper.limit

    @property
    def most(self) -> int:
        """Largest number of drafts that the stopper can choose; 1 for a prefix tree, whose factors are fixed."""
        return 1 if self.factors else self.chains

    def propose(self, requests: Sequence[DraftRequest], rng: RoundRng) -> list[Draft]:
        """Draft all rows together: each level is one forward pass of the draft model for the rows that still draft."""
        self.begin(requests)
        self.model.checks.clear()
        trees = [self._open(row, request) for row, request in enumerate(requests)]
        active = [tree for tree in trees if tree.limit > 0]
        feeds = [Feed(tree.session, self.model.unread(tree.session, tree.request)) for tree in active]
        depth = 0
        while active:
            outputs = self.model.backend.forward(feeds, hidden=self.stopper.hidden_size > 0)
            self._grow(active, outputs, rng, depth)
            depth += 1
            active = [tree for tree in active if tree.frontier and depth < tree.limit]
            feeds = [self._feed(tree) for tree in active]
        self.model.checks.finish()
        return [tree.draft(self.model.backend.device) for tree in trees]

    def _open(self, row: int, request: DraftRequest) -> _DraftTree:
        length = min(self.stopper.length(request.id), self.limit)
        chains = min(self.stopper.drafts(request.id, self.most), self.most)
        return _DraftTree(row, request, self.model.session(request), self.model.depth(request, length), chains)

    def _feed(self, tree: _DraftTree) -> Feed:
        """The new level, including nodes that will get no children, because parents are slot numbers."""
        known = len(tree.session.tail)
        tokens = to_device(tree.tokens[known:], self.model.backend.device)
        return Feed(tree.session, (), TokenTree(tokens, tuple(tree.parents[known:]), known))

    def _counts(self, tree: _DraftTree, depth: int) -> list[int]:
        """The parent of each draw of this level, a node of the frontier."""
        if self.factors:
            return [node for node in tree.frontier for _ in range(self.factors[depth])]
        times = tree.chains if depth == 0 else 1
        return [node for node, draws in tree.frontier.items() for _ in range(draws * times)]

    def _grow(self, active: Sequence[_DraftTree], outputs: Sequence[FeedOutput], rng: RoundRng, depth: int) -> None:
        """Draw a level of every active tree, and ask the stopper about the new nodes."""
        for tree, output in zip(active, outputs, strict=True):
            self._take(tree, output)
            if self.stopper.reads_predictions:
                self._prune(tree, output)
        going = [(tree, output) for tree, output in zip(active, outputs, strict=True) if tree.frontier]
        if not going:
            return
        active, outputs = [tree for tree, _ in going], [output for _, output in going]
        plans = [self._counts(tree, depth) for tree in active]
        drawn = self._draw(active, plans, rng, depth)
        for tree, plan, tokens in zip(active, plans, drawn, strict=True):
            tree.frontier = {}
            for parent, token in zip(plan, tokens, strict=False):
                node = tree.add(parent, token)
                tree.frontier[node] = tree.frontier.get(node, 0) + 1
        self._judge(active, outputs)

    def _take(self, tree: _DraftTree, output: FeedOutput) -> None:
        """Store the rows of q after the nodes that were just read."""
        first = len(tree.session.tail) - output.logits.shape[0]
        nodes = [ROOT] if not tree.tokens else list(range(first, len(tree.session.tail)))
        paths = [tree.path(node) for node in nodes] if self.model.path_dependent(tree.request) else [()] * len(nodes)
        rows = self.model.rows(tree.request, output.logits, paths, output.ids)
        tree.rows = dict(zip(nodes, rows, strict=True))

    def _prune(self, tree: _DraftTree, output: FeedOutput) -> None:
        """Remove nodes from the frontier by the predictions for the tokens below them, before these are drawn."""
        assert output.accepted is not None, "the model predicts"
        for node, value in zip(tree.rows, output.accepted.tolist(), strict=True):
            if node in tree.frontier:
                above = () if node == ROOT else tree.signals[tree.parents[node]]
                tree.signals[node] = (*above, value)
                if self.stopper.stop_after(tree.signals[node], tree.request.id):
                    del tree.frontier[node]

    def _judge(self, active: Sequence[_DraftTree], outputs: Sequence[FeedOutput]) -> None:
        """Remove new nodes from the frontiers of their trees if the stopper stops there."""
        new = [(tree, node) for tree in active for node in tree.frontier]
        signal = self.stopper.signal(self._step(active, outputs, new))
        if signal is None:
            return
        for (tree, node), value in zip(new, signal.tolist(), strict=True):
            tree.signals[node] = (*tree.signals.get(tree.parents[node], ()), value)
            if self.stopper.stop_after(tree.signals[node], tree.request.id):
                del tree.frontier[node]

    def _step(
        self, active: Sequence[_DraftTree], outputs: Sequence[FeedOutput], new: Sequence[tuple[_DraftTree, int]]
    ) -> DraftStep:
        """The new nodes as the stopper's input, with the model's output at their parents."""
        tokens = to_device([tree.tokens[node] for tree, node in new], self.model.backend.device)
        made = {id(tree): output for tree, output in zip(active, outputs, strict=True)}
        places = {id(tree): {node: place for place, node in enumerate(tree.rows)} for tree in active}
        above = [(made[id(tree)], places[id(tree)][tree.parents[node]]) for tree, node in new]
        hidden = [output.hidden[place] for output, place in above if output.hidden is not None]
        logits = [output.logits[place] for output, place in above if self.stopper.reads_logits]
        probs = torch.stack([tree.probs[node] for tree, node in new])
        return DraftStep(tokens, probs, stack_rows(hidden), stack_rows(logits))

    @staticmethod
    def _draw(
        active: Sequence[_DraftTree], plans: Sequence[Sequence[int]], rng: RoundRng, depth: int
    ) -> list[list[int]]:
        """The tokens of all planned draws; rows with fewer draws are padded, which does not change other draws."""
        most = max(map(len, plans))
        padded = [[*plan, *[plan[0]] * (most - len(plan))] for plan in plans]
        weights = torch.stack(
            [torch.stack([tree.rows[node] for node in plan]) for tree, plan in zip(active, padded, strict=True)]
        )
        tokens: list[list[int]] = (
            rng.at(Purpose.DRAFT, depth, [tree.row for tree in active]).categorical(weights).tolist()
        )
        return tokens


def chains_drafter(model: DraftModel, stopper: Stopper, *, chains: int, name: str) -> ModelDrafter | SampledTreeDrafter:
    """A drafter of this name with one chain, or with K i.i.d. chains, from a draft model."""
    drafter: ModelDrafter | SampledTreeDrafter = (
        ModelDrafter(model, stopper) if chains == 1 else SampledTreeDrafter(model, stopper, chains=chains)
    )
    drafter.name = name
    return drafter
