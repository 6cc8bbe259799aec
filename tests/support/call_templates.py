"""Chat templates that write calls as families of models do, for the tests of detection."""

_CHAT = """{{%- if tools %}}Tools: {{{{ tools | tojson }}}} Answer, or call with {hint}
{{% endif %}}{{% for m in messages %}}<|{{{{ m.role }}}}|>{{{{ m.content }}}}
{{%- if m.tool_calls %}}{opening}{{% for c in m.tool_calls %}}{{% set f = c.function %}}{call}
{{%- if not loop.last %}}{between}{{% endif %}}{{% endfor %}}{closing}{{% endif %}}
{{% endfor %}}<|assistant|>"""


def template(call, opening="", between="", closing="", hint="<tool_call>"):
    """A chat template.

    Args:
        call: writes the call `c` of the function `f`.
        opening: before the first call.
        between: two calls.
        closing: after the last call.
        hint: what the instructions name.
    """
    return _CHAT.format(call=call, opening=opening, between=between, closing=closing, hint=hint)


def _text(text):
    return "{{ " + repr(text) + " }}"


def _each(item, between=""):
    """A loop over arguments: the name `k`, and the value `v`."""
    return (
        "{% for k, v in f.arguments.items() %}" + item + "{% if not loop.last %}" + between + "{% endif %}{% endfor %}"
    )


_RAW = "{{ v if v is string else v | tojson }}"
_PYTHON = "{{ k }}={% if v is string %}'{{ v }}'{% else %}{{ v }}{% endif %}"
_SHORT_ID = "{% if c.id | length != 9 %}{{ raise_exception('ids have nine letters') }}{% endif %}"
_HERMES = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
_MISTRAL = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ c.id }}"}' + _SHORT_ID


def _gemma(quote):
    value = "{% if v is string %}" + quote + "{{ v }}" + quote + "{% else %}{{ v | tojson }}{% endif %}"
    return "call:{{ f.name + '{' }}" + _each("{{ k }}:" + value, ",") + "}"


TEMPLATES = {
    "hermes": template(_text("<tool_call>\n") + _HERMES + _text("\n</tool_call>"), _text("\n"), _text("\n")),
    "hermes-compact": template("<tool_call>" + _HERMES + "</tool_call>", between=_text("\n")),
    "qwen-xml": template(
        _text("<tool_call>\n<function=")
        + "{{ f.name }}>"
        + _each(_text("\n<parameter=") + "{{ k }}>" + _text("\n") + "{{ v }}" + _text("\n</parameter>"))
        + _text("\n</function>\n</tool_call>"),
        between=_text("\n"),
    ),
    "glm": template(
        _text("\n<tool_call>")
        + "{{ f.name }}"
        + _text("\n")
        + _each("<arg_key>{{ k }}</arg_key>" + _text("\n") + "<arg_value>" + _RAW + "</arg_value>" + _text("\n"))
        + "</tool_call>",
    ),
    "glm-compact": template(
        "<tool_call>{{ f.name }}"
        + _each("<arg_key>{{ k }}</arg_key><arg_value>" + _RAW + "</arg_value>")
        + "</tool_call>",
    ),
    "minimax": template(
        '<invoke name="{{ f.name }}">'
        + _text("\n")
        + _each('<parameter name="{{ k }}">' + _RAW + "</parameter>" + _text("\n"))
        + _text("</invoke>\n"),
        _text("\n<minimax:tool_call>\n"),
        closing="</minimax:tool_call>",
    ),
    "mistral-args": template("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
    "mistral-id": template(
        "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ c.id }}[ARGS]{{ f.arguments | tojson }}" + _SHORT_ID,
    ),
    "mistral-name": template("[TOOL_CALLS]{{ f.name }}{{ f.arguments | tojson }}"),
    "mistral": template(_MISTRAL, _text("[TOOL_CALLS] ["), _text(", "), "]"),
    "mistral-nemo": template(_MISTRAL, "[TOOL_CALLS][", _text(", "), "]"),
    "deepseek": template(
        "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + f.name + '\\n```json\\n' + f.arguments "
        "+ '\\n```<｜tool▁call▁end｜>' }}",
        "<｜tool▁calls▁begin｜>",
        _text("\n"),
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek-v3.1": template(
        "{{ '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + f.arguments + '<｜tool▁call▁end｜>' }}",
        "<｜tool▁calls▁begin｜>",
        closing="<｜tool▁calls▁end｜>",
    ),
    **{
        name: template(
            _text("\n")
            + '<｜DSML｜invoke name="{{ f.name }}">'
            + _text("\n")
            + _each(
                '<｜DSML｜parameter name="{{ k }}" string="{{ (v is string) | tojson }}">'
                + _RAW
                + "</｜DSML｜parameter>",
                _text("\n"),
            )
            + _text("\n</｜DSML｜invoke>"),
            _text("\n\n") + f"<{block}>",
            closing=_text("\n") + f"</{block}>",
        )
        for name, block in (("dsml", "｜DSML｜function_calls"), ("dsml-v4", "｜DSML｜tool_calls"))
    },
    "kimi": template(
        "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        closing="<|tool_calls_section_end|>",
    ),
    "harmony": template(
        " to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>"
    ),
    "gemma": template("<|tool_call>" + _gemma('<|"|>') + "<tool_call|>"),
    "functiongemma": template("<start_function_call>" + _gemma("<escape>") + "<end_function_call>"),
    "lfm2": template(
        "{{ f.name }}(" + _each(_PYTHON, _text(", ")) + ")", "<|tool_call_start|>[", _text(", "), "]<|tool_call_end|>"
    ),
    "olmo": template(
        "{{ f.name }}(" + _each("{{ k }}={{ v | tojson }}", _text(", ")) + ")",
        "<function_calls>",
        _text("\n"),
        "</function_calls>",
    ),
    "olmo-lines": template(
        "{{ f.name }}(" + _each("{{ k }}={{ v | tojson }}", _text(", ")) + ")",
        _text("<function_calls>\n"),
        _text("\n"),
        _text("\n</function_calls>"),
    ),
    "llama4": template(
        "{{ f.name }}(" + _each(_PYTHON, _text(", ")) + ")", "<|python_start|>[", _text(", "), "]<|python_end|>"
    ),
    "pythonic": template("{{ f.name }}(" + _each('{{ k }}="{{ v }}"', _text(", ")) + ")", "[", _text(", "), "]"),
    "llama": template('{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'),
}
UNKNOWN = template("<call>{{ f | tojson }}</call>")
NO_HISTORY = "{{ tools }} HINT {% for m in messages %}{{ m.content }}{% endfor %}"
