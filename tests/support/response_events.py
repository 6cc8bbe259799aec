"""The events of a stream of /v1/responses, read by a small state machine that holds them to their order."""

import json

_TEXTS = {
    "reasoning": "reasoning_text",
    "message": "output_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
_ENDS = {"response.completed": "completed", "response.incomplete": "incomplete", "response.failed": "failed"}


def events_of(text):
    """The events of a body: the name and the data of each."""
    found = []
    for block in text.split("\n\n"):
        if block.strip():
            name, data = block.split("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def item_text(item):
    """The text of an item: of its one part, or its arguments."""
    return item[_CALLS[item["type"]]] if item["type"] in _CALLS else item["content"][0]["text"]


class Replay:
    """Takes events one after the other.

    Attributes:
        response: the last one that an event showed.
        items: that have ended.
    """

    def __init__(self):
        self.response, self.items, self._item, self._kind, self._text = None, [], None, None, ""
        self._next, self._count, self._part = self._begins, 0, None

    def take(self, name, data):
        """Take an event.

        Raises:
            AssertionError: it may not come here, or says something else than those before.
        """
        assert name == data["type"]
        assert data["sequence_number"] == self._count
        self._count += 1
        if name == "response.failed":
            assert self._next not in (self._begins, self._over)
            self._ends(name, data)
        else:
            self._next(name, data)

    def end(self):
        """What the stream made; it must be over."""
        assert self._next == self._over
        return self.response

    def _begins(self, name, data):
        assert name == "response.created"
        self._in_progress(data)
        self._next = self._goes_on

    def _goes_on(self, name, data):
        assert name == "response.in_progress"
        assert data["response"] == self.response
        self._in_progress(data)
        self._next = self._between

    def _in_progress(self, data):
        self.response = data["response"]
        assert self.response["status"] == "in_progress"
        assert self.response["output"] == []
        assert self.response["usage"] is None

    def _between(self, name, data):
        if name in _ENDS:
            assert self.items
            self._ends(name, data)
            return
        assert name == "response.output_item.added"
        self._item = data["item"]
        assert data["output_index"] == len(self.items)
        assert self._item["status"] == "in_progress"
        assert not self._item[_CALLS.get(self._item["type"], "content")]
        self._kind, self._text = _TEXTS[self._item["type"]], ""
        self._next = self._part_begins if self._item["type"] == "message" else self._grows

    def _of_item(self, data):
        assert (data.get("item_id"), data["output_index"]) == (self._item["id"], len(self.items))
        assert self._item["type"] in _CALLS or data["content_index"] == 0

    def _part_begins(self, name, data):
        assert name == "response.content_part.added"
        self._of_item(data)
        assert data["part"]["text"] == ""
        self._next = self._grows

    def _grows(self, name, data):
        assert name in (f"response.{self._kind}.delta", f"response.{self._kind}.done")
        self._of_item(data)
        if name == f"response.{self._kind}.delta":
            self._text += data["delta"]
            return
        assert data[_CALLS.get(self._item["type"], "text")] == self._text
        self._next = self._part_ends if self._item["type"] == "message" else self._item_ends

    def _part_ends(self, name, data):
        assert name == "response.content_part.done"
        self._of_item(data)
        self._part = data["part"]
        assert self._part["text"] == self._text
        self._next = self._item_ends

    def _item_ends(self, name, data):
        assert name == "response.output_item.done"
        assert data["output_index"] == len(self.items)
        item = data["item"]
        changed = {"status", "content", *_CALLS.values()}
        assert all(item[key] == value for key, value in self._item.items() if key not in changed)
        assert item["status"] in ("completed", "incomplete")
        assert item_text(item) == self._text
        self.items.append(item)
        self._next = self._between

    def _ends(self, name, data):
        response = data["response"]
        assert response["id"] == self.response["id"]
        assert response["status"] == _ENDS[name]
        assert response["output"] == self.items
        assert (response["error"] is not None) == (name == "response.failed")
        assert (response["incomplete_details"] is not None) == (name == "response.incomplete")
        assert (response["usage"] is None) == (name == "response.failed")
        self.response, self._next = response, self._over

    def _over(self, name, _):
        raise AssertionError(f"{name} after the end")


def replayed(events):
    """The response that a whole stream made, which must be legal."""
    machine = Replay()
    for name, data in events:
        machine.take(name, data)
    return machine.end()
