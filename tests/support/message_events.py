"""Events of a stream of Anthropic's Messages API: read, checked for their order, and put together to a message."""

import json

DELTAS = {"text": ("text_delta",), "thinking": ("thinking_delta", "signature_delta"), "tool_use": ("input_json_delta",)}
TEXTS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


def read_events(text):
    """The events of a stream, each a dictionary; their names are those of their types."""
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def message_of(events):
    """The message that events make; AssertionError where one of them may not stand at its place."""
    message, block, parts, ended = None, None, [], False
    for event in events:
        kind = event["type"]
        assert not ended, "nothing follows message_stop"
        if kind == "message_start":
            assert message is None, "there is one message"
            message = event["message"]
            assert message["content"] == []
            assert message["stop_reason"] is None
            continue
        assert message is not None, "message_start comes first"
        if kind == "content_block_start":
            assert block is None, "blocks do not overlap"
            assert message["stop_reason"] is None, "blocks come before message_delta"
            assert event["index"] == len(message["content"])
            block, parts = event["content_block"], []
            message["content"].append(block)
        elif kind == "content_block_delta":
            assert block is not None, "a delta is within a block"
            assert event["index"] == len(message["content"]) - 1
            delta = event["delta"]
            assert delta["type"] in DELTAS[block["type"]]
            assert not block.get("signature"), "a signature is the end of a block"
            if delta["type"] == "signature_delta":
                block["signature"] = delta["signature"]
            else:
                parts.append(delta[TEXTS[delta["type"]]])
        elif kind == "content_block_stop":
            assert block is not None, "a block ends once"
            assert event["index"] == len(message["content"]) - 1
            close(block, "".join(parts))
            block = None
        elif kind == "message_delta":
            assert block is None, "every block has ended"
            assert message["stop_reason"] is None, "a message ends once"
            assert event["delta"]["stop_reason"], "it says why the message ends"
            message |= event["delta"]
            message["usage"] |= event["usage"]
        else:
            assert kind == "message_stop", f"there is no event {kind}"
            assert message["stop_reason"], "message_delta comes before"
            ended = True
    assert ended, "message_stop comes last"
    return message


def close(block, text):
    """Put the parts of a block in it."""
    if block["type"] == "tool_use":
        assert block["input"] == {}
        block["input"] = json.loads(text or "{}")
    else:
        assert text, "a block is not empty"
        block[block["type"]] = text
    assert block["type"] != "thinking" or block["signature"], "reasoning has a signature"
