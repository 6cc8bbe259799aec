"""A tool, and a question that asks for it."""

from typing import Literal

import pydantic

from draftproof import Engine

HERMES = """{%- if tools %}system: Answer, or call <tool_call>{% for t in tools %}{{ t | tojson }}{% endfor %}
{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}
{%- for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}assistant:"""


CHAT = "/v1/chat/completions"


ASK = [{"role": "user", "content": "What is the weather?"}]


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 7}, "maxItems": 2},
    },
    "required": ["city", "unit", "days"],
    "additionalProperties": False,
}


TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Of a place.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]


class Weather(pydantic.BaseModel):
    """The arguments, as a test of them."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)
    city: str
    unit: Literal["C", "F"]
    days: list[int]


def stories(**options):
    made = Engine.load("embedded:stories", "embedded:stories-draft", **options)
    made.tokenizer.chat_template = HERMES
    return made
