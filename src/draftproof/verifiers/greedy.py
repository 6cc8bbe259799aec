"""The verifier of greedy block verification, whose state (the open windows of each request) spans several rounds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from draftproof.draft import Draft, Verdict
from draftproof.functional.chain import ChainVerdict
from draftproof.functional.greedy import GreedyState, advance, greedy_block_verify, modified_target
from draftproof.rng import Rng
from draftproof.verifiers.chain import pad_chains


class GreedyBlockVerifier:
    """Greedy block verification, for drafts of one constant length only.

    Source: Block Verification, arXiv 2403.10444, appendix C; Block Verification v1, arXiv 2403.10444v1, Algorithm 3.
    """

    name = "greedy_block"
    lossless = True
    branching = False
    point_masses = False
    constant_length = True
    shared_noise = False

    def verify(
        self,
        drafts: Sequence[Draft],
        target_probs: Sequence[Float[Tensor, "_ vocab"]],
        rng: Rng,
        states: Sequence[object],
    ) -> list[Verdict]:
        """Verdicts of all drafts in one call of the rule.

        Raises:
            ValueError: drafts of different lengths, or point masses.
        """
        tokens, q, p, lengths = pad_chains(drafts, target_probs)
        n = tokens.shape[1]
        if q is None or any(len(draft) != n for draft in drafts):
            raise ValueError(f"greedy_block: expected drawn chains of one length, got lengths {lengths.tolist()}")
        known = [state if isinstance(state, GreedyState) else GreedyState.fresh(1, n, p.device) for state in states]
        state = GreedyState.stack(known)
        target = modified_target(state, p, q, tokens)
        found = greedy_block_verify(tokens, q, target.rows, rng=rng, validate=False)
        after = advance(state, target, q, tokens, found)
        return self._verdicts(tokens, found, after)

    @staticmethod
    def _verdicts(tokens: Tensor, found: ChainVerdict, after: GreedyState) -> list[Verdict]:
        host = torch.cat([found.accepted.unsqueeze(-1), found.token.unsqueeze(-1), tokens], -1).tolist()
        return [
            Verdict(
                tuple(range(kept)), token, (*ids[:kept], token), after.rows(torch.tensor([row], device=tokens.device))
            )
            for row, (kept, token, *ids) in enumerate(host)
        ]
