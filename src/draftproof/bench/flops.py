"""Floating-point operations of a forward pass and of a whole answer, as SPRINTER (arXiv 2502.04557) counts them.

Knows: the sizes of a decoder. Does not know: models, clocks.

The counting is that of Hoffmann et al. (2022), appendix F, which A.8 adopts: two operations for a multiplication and
addition; embedding, attention, feed-forward and output layer. Key and value heads may be fewer than query heads, and a
gated feed-forward has three matrices; with a cache each token attends to those before it, and no token is read twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftproof.bench.record import Record

Shape = Mapping[str, Any]
_UNGATED = ("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "codegen", "phi", "falcon")


def shape_of(config: Any) -> dict[str, Any]:
    """The sizes of a decoder by its transformers config, as values that JSON can carry."""
    hidden, heads = int(config.hidden_size), int(config.num_attention_heads)
    inner = next((getattr(config, name, None) for name in ("intermediate_size", "n_inner", "ffn_dim")), None)
    return {
        "layers": int(config.num_hidden_layers),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": int(getattr(config, "num_key_value_heads", None) or heads),
        "head_dim": int(getattr(config, "head_dim", None) or hidden // heads),
        "inner": int(inner or 4 * hidden),
        "gated": str(config.model_type) not in _UNGATED,
        "vocab": int(config.vocab_size),
    }


def pass_flops(shape: Shape, tokens: float, context: float) -> float:
    """Operations to read `tokens` tokens that each attend to `context` positions on average."""
    width, key_width = shape["heads"] * shape["head_dim"], shape["kv_heads"] * shape["head_dim"]
    embedding = 2 * shape["vocab"] * shape["hidden"]
    projections = 2 * shape["hidden"] * (2 * width + 2 * key_width)  # query and output, key and value
    attention = 4 * context * width + 3 * shape["heads"] * context  # scores and mixing, softmax
    feed_forward = 2 * shape["hidden"] * shape["inner"] * (3 if shape["gated"] else 2)
    logits = 2 * shape["hidden"] * shape["vocab"]
    return float(tokens * (embedding + shape["layers"] * (projections + attention + feed_forward) + logits))


def answer_flops(record: Record, target: Shape, draft: Shape | None) -> float | None:
    """Operations of one answer.

    The target reads the prompt, one committed token a call, and every drafted token; the draft model reads the prompt
    and a token for each it drafts. Lookup costs nothing. None where the drafter is a part of the target, whose cost
    this counting does not know.
    """
    answer, prompt = record.answer, record.prompt_tokens
    inside = answer.draft_tokens > 0 and record.cell.drafter.startswith(("early_exit", "feature_head"))
    if inside or (record.cell.draft is not None and draft is None):
        return None
    after = prompt + answer.tokens / 2  # positions that a token of the answer attends to on average
    total = pass_flops(target, float(prompt), prompt / 2)
    total += pass_flops(target, float(answer.target_calls - 1 + answer.draft_tokens), after)
    if draft is not None and record.cell.draft is not None:
        total += pass_flops(draft, float(prompt), prompt / 2) + pass_flops(draft, float(answer.draft_tokens), after)
    return total
