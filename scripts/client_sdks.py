"""A question or a tool round trip with an official client library, pointed at a server by its variables.

    python scripts/client_sdks.py {openai,responses,anthropic} PROMPT

The tool `read` reads a file of the current folder.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

_DESCRIPTION = "Read a file."
_SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}


def _read(arguments: dict[str, Any]) -> str:
    return Path(arguments["path"]).read_text(encoding="utf-8")


def ask_openai(prompt: str) -> None:
    """Chat completions by the helper for streams, until the model calls nothing."""
    import openai

    client, messages = openai.OpenAI(), list[Any]([{"role": "user", "content": prompt}])
    function = {"name": "read", "description": _DESCRIPTION, "parameters": _SCHEMA, "strict": True}
    tools: list[Any] = [{"type": "function", "function": function}]
    while True:
        model = os.environ["OPENAI_MODEL"]
        with client.chat.completions.stream(model=model, messages=messages, tools=tools) as stream:
            for event in stream:
                if event.type == "content.delta":
                    _show(event.delta)
            answer = stream.get_final_completion().choices[0].message
        messages.append(answer.to_dict())
        calls = answer.tool_calls or []
        for call in calls:
            content = _read(json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        if not calls:
            return


def ask_responses(prompt: str) -> None:
    """Responses by the helper for streams, until the model calls nothing."""
    import openai

    client, items = openai.OpenAI(), list[Any]([{"role": "user", "content": prompt}])
    tools: list[Any] = [
        {"type": "function", "name": "read", "description": _DESCRIPTION, "parameters": _SCHEMA, "strict": False}
    ]
    while True:
        with client.responses.stream(model=os.environ["OPENAI_MODEL"], input=items, tools=tools) as stream:
            for event in stream:
                if event.type == "response.output_text.delta":
                    _show(event.delta)
            output = stream.get_final_response().output
        items += [each.to_dict() for each in output]
        calls = [each for each in output if each.type == "function_call"]
        for call in calls:
            result = _read(json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})
        if not calls:
            return


def ask_anthropic(prompt: str) -> None:
    """Messages by the helper for streams, until the model calls nothing; their tokens are counted first."""
    import anthropic

    client, messages = anthropic.Anthropic(), list[Any]([{"role": "user", "content": prompt}])
    model = os.environ["ANTHROPIC_MODEL"]
    tools: list[Any] = [{"name": "read", "description": _DESCRIPTION, "input_schema": _SCHEMA}]
    while True:
        counted = client.messages.count_tokens(model=model, messages=messages, tools=tools)
        with client.messages.stream(model=model, max_tokens=1024, messages=messages, tools=tools) as stream:
            for text in stream.text_stream:
                _show(text)
            answer = stream.get_final_message()
        read = answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
        if counted.input_tokens != read:
            sys.exit(f"count_tokens said {counted.input_tokens}, and the answer {read}")
        messages.append({"role": "assistant", "content": [block.to_dict() for block in answer.content]})
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            return
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": _read(call.input)} for call in calls]
        messages.append({"role": "user", "content": results})


def _show(text: str) -> None:
    print(text, end="", flush=True)


def main() -> None:
    """Ask, and print the answer as it comes."""
    asks = {"openai": ask_openai, "responses": ask_responses, "anthropic": ask_anthropic}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("api", choices=asks)
    parser.add_argument("prompt")
    options = parser.parse_args()
    asks[options.api](options.prompt)
    print()


if __name__ == "__main__":
    main()
