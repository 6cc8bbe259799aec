"""Toy models for the tests of rules, and exact distributions over all their drafts at once.

The enumeration is that of `draftproof.audit.distributions`, which `tests/audit` holds against one draft at a time.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

import torch

from draftproof import Engine, SamplingParams
from draftproof.audit import distributions as enumeration
from draftproof.audit.distributions import complete
from draftproof.engine.verifier_parts import make_verifier
from draftproof.functional import Tries, greedy
from draftproof.rng import CounterRoundRng
from draftproof.testing import (
    EnumeratedNoise,
    engine_distribution,
    exact_distribution,
    target_distribution,
    total_variation,
)
from draftproof.tree import TokenTree
from type_checks import checks_off

KINDS = ("dense", "sparse", "peaked", "ties", "onehot", "equal", "near", "disjoint")


def walk(program, rows):
    """Every outcome of a vectorised program: pairs (weight of each row, what the program returned).

    Shapes and types are checked on the first run only: they are the same in all runs, and the checks take five times
    as long as the rest.
    """
    checked = False

    def once(rng):
        nonlocal checked
        with checks_off(now=checked):
            outcome = program(rng)
        checked = True
        return outcome

    return enumeration.walk(once, rows)


def joint_distance(make, prompts, params):
    """Total variation of the joint distribution of a batch's outputs, by enumeration, from the product of the target's.

    `make` makes an engine from the source of a round's randomness.
    """

    def outputs(rng):
        noise = EnumeratedNoise(rng)
        engine = make(lambda seeds, places: noise.round(seeds, places) if engine.verifier.shared_noise else rng)
        return tuple(output.token_ids for output in engine.generate(prompts, params))

    with checks_off():
        found = exact_distribution(outputs)
    target, expected = make(CounterRoundRng).target, {(): 1.0}
    for prompt, own in zip(prompts, params, strict=True):
        each = target_distribution(target, tuple(prompt), own)
        expected = {(*before, output): a * b for before, a in expected.items() for output, b in each.items()}
    return total_variation(found, expected)


class Toy:
    """Target and draft models over V tokens: one row of p and of q for each context."""

    def __init__(self, p, q, vocab):  # functions from a context to a row
        self.p, self.q, self.vocab = p, q, vocab

    @classmethod
    def constant(cls, p, q):
        p, q = torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)
        return cls(lambda _: p, lambda _: q, p.shape[0])

    @classmethod
    def random(cls, seed, *, kind="dense", vocab=3, depth=3, dtype=torch.float64, order=None):
        """order: how many tokens of the context matter; all when None."""
        gen = torch.Generator().manual_seed(seed)
        rows = {
            context: _pair(kind, vocab, gen, dtype)
            for length in range(depth + 1)
            for context in itertools.product(range(vocab), repeat=length)
        }

        def at(context):
            return context if order is None else context[len(context) - min(order, len(context)) :]

        return cls(lambda c: rows[at(c)][0], lambda c: rows[at(c)][1], vocab)

    def target_distribution(self, length):
        """The target's distribution of sequences of this length."""
        return complete(self, {(): 1.0}, length)

    def single(self, length, stop=None):
        """All chains of one draw with their length and probability; stop(prefix) ends a chain."""
        found = []
        for seq in itertools.product(range(self.vocab), repeat=length):
            weight, size = 1.0, 0
            for i, token in enumerate(seq):
                if stop is not None and stop(seq[:i]):
                    break
                q = self.q(seq[:i]).double()
                weight, size = weight * float(q[token] / q.sum()), i + 1
            if weight > 0 and not any(seq[size:]):
                found.append((seq, size, weight))
        return found

    def chains(self, count, length, stop=None):
        """All ways to draw `count` i.i.d. chains: tokens [B, K, n], lengths, probability."""
        groups = list(itertools.product(self.single(length, stop), repeat=count))
        tokens = torch.tensor([[c[0] for c in g] for g in groups]).reshape(len(groups), count, length)
        lengths = torch.tensor([[c[1] for c in g] for g in groups]).reshape(len(groups), count)
        return tokens, lengths, torch.tensor([[c[2] for c in g] for g in groups], dtype=torch.float64).prod(-1)

    def rows(self, tokens):
        """q [B, K, n, V] and p [B, K, n + 1, V] of chains."""
        return enumeration.rows_along(self, tokens)


def _row(kind, vocab, gen):
    x = -torch.rand(vocab, generator=gen, dtype=torch.float64).log()
    if kind == "sparse":
        x = x * (torch.rand(vocab, generator=gen) < 0.6)
        x[int(torch.randint(vocab, (1,), generator=gen))] += 0.1
    if kind == "peaked":
        x = x**4
    if kind == "ties":
        x = torch.randint(1, 3, (vocab,), generator=gen).double()
    if kind == "onehot":
        x = torch.zeros(vocab, dtype=torch.float64)
        x[int(torch.randint(vocab, (1,), generator=gen))] = 1
    return x / x.sum()


def _pair(kind, vocab, gen, dtype):
    p, q = _row(kind, vocab, gen), _row(kind, vocab, gen)
    if kind == "equal":
        q = p
    if kind == "near":  # equal but for the last bits of float32
        q = p * (1 + 1e-7 * torch.randn(vocab, generator=gen, dtype=torch.float64))
        q = q / q.sum()
    if kind == "disjoint":
        p, q = torch.zeros(vocab).double(), torch.zeros(vocab).double()
        q[0], p[1:] = 1, 1 / (vocab - 1)
    return p.to(dtype), q.to(dtype)


def emitted_distribution(toy, tokens, draft_weight, walks, length):
    """Distribution of the first `length` tokens: what the rule emits, continued by the target where it is shorter."""
    emitted = defaultdict(float)
    chains = tokens.tolist()
    for weight, (path, accepted, token) in walks:
        both = (weight * draft_weight).tolist()
        triples = zip(path.tolist(), accepted.tolist(), token.tolist(), strict=True)
        for b, (j, n, y) in enumerate(triples):
            if both[b] > 0:
                emitted[(*chains[b][j][:n], y)] += both[b]
    return complete(toy, emitted, length)


def rule_distribution(rule, toy, count, length, *, horizon=None, stop=None, lengths=None, **options):
    """The exact distribution of the first tokens that a rule emits, over all drafts and all choices of the rule."""
    tokens, sizes, weight = toy.chains(count, length, stop)
    q, p = toy.rows(tokens)
    if stop is not None:
        options["lengths"] = sizes
    if lengths is not None:
        options["lengths"] = torch.tensor([lengths]).expand(tokens.shape[0], -1)
    walks = walk(lambda rng: rule(tokens, q, p, rng=rng, **options), tokens.shape[0])
    return emitted_distribution(toy, tokens, weight, walks, length + 1 if horizon is None else horizon)


def rule_length(rule, toy, count, length, **options):
    """The exact expected number of tokens a rule accepts."""
    tokens, _, weight = toy.chains(count, length)
    q, p = toy.rows(tokens)
    walks = walk(lambda rng: rule(tokens, q, p, rng=rng, **options), tokens.shape[0])
    return sum(float((w * weight * v.accepted).sum()) for w, v in walks)


def verdict_distributions(rule, tokens, q, p, **options):
    """For each row the distribution of (accepted, token)."""
    found = [defaultdict(float) for _ in range(tokens.shape[0])]
    for weight, verdict in walk(lambda rng: rule(tokens, q, p, rng=rng, **options), tokens.shape[0]):
        pairs = zip(verdict.accepted.tolist(), verdict.token.tolist(), strict=True)
        for row, w, pair in zip(found, weight.tolist(), pairs, strict=True):
            if w > 0:
                row[pair] += w
    return found


def _greedy_rows(toy, drafted, population):
    """Every draft of every member: (prefix, draft, state, probability)."""
    for seq, state, weight in population:
        for draft in itertools.product(range(toy.vocab), repeat=drafted):
            chance = weight
            for j, x in enumerate(draft):
                chance *= float(toy.q(seq + draft[:j])[x])
            if chance > 0:
                yield seq, draft, state, chance


def _greedy_round(toy, drafted, rows):
    """Outcomes of one round: (row, probability, emitted sequence, state)."""
    tokens = torch.tensor([r[1] for r in rows])
    q = torch.stack([torch.stack([toy.q(s + d[:j]) for j in range(drafted)]) for s, d, _, _ in rows])
    p = torch.stack([torch.stack([toy.p(s + d[:j]) for j in range(drafted + 1)]) for s, d, _, _ in rows])
    state = greedy.GreedyState.stack([r[2] for r in rows])
    chances = torch.tensor([r[3] for r in rows], dtype=torch.float64)

    def play(rng):
        target = greedy.modified_target(state, p, q, tokens)
        verdict = greedy.greedy_block_verify(tokens, q, target.rows, rng=rng, validate=False)
        return verdict, greedy.advance(state, target, q, tokens, verdict)

    for weight, (verdict, after) in walk(play, len(rows)):
        for b, w in enumerate((weight * chances).tolist()):
            if w > 0:
                seq = rows[b][0] + rows[b][1][: verdict.accepted[b]] + (int(verdict.token[b]),)
                yield w, seq, after.rows(torch.tensor([b]))


def greedy_distribution(toy, drafted, horizon, *, keep=True):
    """Exact distribution of a sequence over as many rounds as it needs; equal (prefix, state) merge between rounds."""
    population, done = [((), greedy.GreedyState.fresh(1, drafted), 1.0)], defaultdict(float)
    while population:
        merged = {}
        for w, seq, after in _greedy_round(toy, drafted, list(_greedy_rows(toy, drafted, population))):
            if len(seq) >= horizon:
                done[seq[:horizon]] += w
                continue
            state = after if keep else greedy.GreedyState.fresh(1, drafted)
            key = (seq, tuple(state.remaining[0].tolist()), tuple(round(x, 9) for x in state.log_r[0].tolist()))
            merged[key] = (seq, state, w + (merged[key][2] if key in merged else 0.0))
        population = list(merged.values())
    return done


class Forest:
    """All ways to draw a prefix tree: for each, the tree, its draws, its probability, and the rows of its nodes.

    factors: number of draws at each node of each depth. With `merged` a node gets its draws once, also when it was
    drawn several times (Algorithm 5 of SpecTr, arXiv 2310.15141, on sets); else once for each time it was drawn.
    Without `replacement` siblings differ.
    """

    def __init__(self, toy, factors, *, merged=True, replacement=True):
        self.toy, self.replacement = toy, replacement
        states = [((), (), 1.0)]  # nodes (as contexts), draws, weight
        frontier = {(): [()]}
        for factor in factors:
            grown = []
            for nodes, draws, weight in states:
                parents = frontier[draws] if draws else [()]
                counts = [factor if merged or not c else factor * draws.count(c) for c in parents]
                for picks in itertools.product(*(self._draws(c, m) for c, m in zip(parents, counts, strict=True))):
                    new = [(*c, x) for c, (xs, _) in zip(parents, picks, strict=True) for x in xs]
                    order = (*draws, *new)
                    seen = tuple(dict.fromkeys((*nodes, *new)))
                    frontier[order] = list(dict.fromkeys(new))
                    chance = weight
                    for _, w in picks:
                        chance *= w
                    grown.append((seen, order, chance))
            states = grown
        self.nodes = [s[0] for s in states]
        self.weight = torch.tensor([s[2] for s in states], dtype=torch.float64)
        at = [{c: i for i, c in enumerate(nodes)} for nodes in self.nodes]
        trees = [
            TokenTree(torch.tensor([c[-1] for c in nodes]), tuple(-1 if len(c) == 1 else i[c[:-1]] for c in nodes))
            for nodes, i in zip(self.nodes, at, strict=True)
        ]
        self.tries = Tries.from_trees(trees, [tuple(i[c] for c in s[1]) for i, s in zip(at, states, strict=True)])
        self.q = torch.stack([toy.q(c[:-1]) for nodes in self.nodes for c in nodes])
        self.p = torch.stack([toy.p(c) for nodes in self.nodes for c in ((), *nodes)])

    def _draws(self, context, count):
        q = self.toy.q(context).double().tolist()
        for tokens in itertools.product(range(self.toy.vocab), repeat=count):
            if not self.replacement and len(set(tokens)) < count:
                continue
            weight, left = 1.0, 1.0
            for x in tokens:
                weight *= q[x] / left
                left -= 0.0 if self.replacement else q[x]
            if weight > 0:
                yield tokens, weight

    def distribution(self, rule, length, **options):
        """Exact distribution of the first tokens under a rule on tries."""
        emitted = defaultdict(float)
        rows = len(self.nodes)
        for weight, verdict in walk(lambda rng: rule(self.tries, self.q, self.p, rng=rng, **options), rows):
            both = (weight * self.weight).tolist()
            for b, (node, y) in enumerate(zip(verdict.node.tolist(), verdict.token.tolist(), strict=True)):
                if both[b] > 0:
                    emitted[(*(self.nodes[b][node] if node >= 0 else ()), y)] += both[b]
        return complete(self.toy, emitted, length)

    def leaf_chains(self):
        """The trees as chains, one for each leaf in the order of drawing; all leaves must be equally deep and many."""
        deepest = max(len(c) for nodes in self.nodes for c in nodes)
        return torch.tensor([[c for c in nodes if len(c) == deepest] for nodes in self.nodes])


def distribution_of_three_tokens(target, drafter, rule):
    """The distribution of three tokens of a target that has three, with what `drafter` makes, by enumeration."""
    one = drafter()  # for all outcomes

    def make(round_rng):
        return Engine(target, one, make_verifier(rule), round_rng=round_rng)

    with checks_off():
        return engine_distribution(make, [0, 2, 1, 0, 2], SamplingParams(max_tokens=3, ignore_eos=True))
