"""A small model that reasons: its tokenizer has markers, and its chat template writes them as two families do."""

import json

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from draftproof import Engine

MARKERS = {"<think>": 200, "</think>": 201}  # in place of tokens for control characters
_NAMES = ("<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>")
CHANNELS = {name: 200 + place for place, name in enumerate(_NAMES)}
_HISTORY = """{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{% endfor %}assistant:"""
QWEN = _HISTORY + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
HARMONY = """{% for m in messages %}
{%- if m.role == 'tool' %}<|start|>functions.f to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>
{%- elif m.tool_calls %}
{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}
{%- set f = m.tool_calls[0].function %}<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>
{{- f.arguments | tojson }}<|call|>
{%- elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
{%- else %}<|start|>{{ m.role }}<|message|>{% if tools %}{{ tools | tojson }}{% endif %}{{ m.content }}<|end|>
{%- endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
OPENED = _HISTORY + "{{ '<think>\\n' }}"


def with_markers(tokenizer, template, markers=MARKERS, *, special=False):
    """A tokenizer with tokens for the markers."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    names = {place: name for name, place in markers.items()}
    content["model"]["vocab"] = {names.get(at, name): at for name, at in content["model"]["vocab"].items()}
    shape = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special}
    content["added_tokens"] += [{"id": place, "content": name, **shape} for name, place in markers.items()]
    end = tokenizer.eos_token
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)), eos_token=end)
    made.chat_template = template
    return made


def thinking_engine(drafter="none", *, template=QWEN, **options):
    """An engine of the embedded model with such a tokenizer.

    Args:
        drafter: of the engine; one that begins with `model` reads the embedded draft model.
        template: of chats.
        options: of `Engine.load`.
    """
    draft = "embedded:stories-draft" if drafter.startswith("model") else None
    made = Engine.load("embedded:stories", draft, drafter=drafter, **options)
    made.prompts.tokenizer = with_markers(made.tokenizer, template)
    return made


def channel_engine(drafter="none", **options):
    """The same for a model that writes in channels."""
    made = thinking_engine(drafter, **options)
    made.prompts.tokenizer = with_markers(made.tokenizer, HARMONY, CHANNELS, special=True)
    return made
