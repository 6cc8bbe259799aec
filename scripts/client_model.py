"""A tiny model for tries of clients: it reads long prompts at little cost, and each of its answers is a few words."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from common import random_model

from draftproof import models

WORDS = 6  # of each answer
_POSITIONS = 131_072  # the prompts of some agents have 40,000 of these short tokens
_WIDTH = 64
_LIKELY = 2.5  # a step's weight in the last layer; with it other tokens have a chance below one in a million

TEMPLATE = """{%- if tools %}system
Tools: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}A call: <tool_call>
{"name": NAME, "arguments": OBJECT}
</tool_call>
{% endif %}
{%- for message in messages %}{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{% endfor %}{% if add_generation_prompt %}assistant
{% endif %}"""


def write_model(folder: Path) -> None:
    """Write a random llama with the embedded model's tokenizer and a chat template for tools.

    A client may fail where an answer is empty or never ends, so the words are in groups: one of the first group follows
    whatever is no word, one of the next group follows a word, and the end follows a word of the last group.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(models.resolve("embedded:stories"))
    tokenizer.chat_template = TEMPLATE
    tokenizer.model_max_length = _POSITIONS
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=_WIDTH,
        intermediate_size=2 * _WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=_POSITIONS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    model = random_model(config, torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    texts = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    words = [at for at, text in enumerate(texts) if text.startswith("Ġ") and text[1:].isalpha() and len(text) > 3]
    groups = [words[step::WORDS] for step in range(WORDS)]
    with torch.no_grad():
        # Dimension s says "step s is next". The layers add little to it: their weights are 0.02 wide.
        before, after = model.get_input_embeddings().weight, model.lm_head.weight
        before[:, 0] = 1.0
        for step, group in enumerate(groups):
            before[group, 0] = 0.0
            before[group, step + 1] = 1.0
            after[group, step] = _LIKELY
        after[tokenizer.eos_token_id, WORDS] = _LIKELY
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
