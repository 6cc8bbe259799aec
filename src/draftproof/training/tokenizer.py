"""Training a byte-level BPE tokenizer on texts, for models that are trained from scratch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from draftproof.errors import UserError

END = "<|endoftext|>"
_BYTES = 256


def train_tokenizer(texts: Iterable[str], vocabulary: int, *, positions: int) -> Any:
    """A tokenizer with all bytes, one token that begins and ends a text, and the merges that shorten texts most."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if vocabulary <= _BYTES:
        raise UserError(f"vocabulary: expected more than {_BYTES} tokens (bytes and an end token), got {vocabulary}")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    if made.get_vocab_size() < vocabulary:
        raise UserError(
            f"the texts give {made.get_vocab_size()} tokens, not {vocabulary}: choose a smaller vocabulary or more text"
        )
    made.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=made,
        bos_token=END,
        eos_token=END,
        model_max_length=positions,
        clean_up_tokenization_spaces=False,
    )
