"""Detection of a chat template's tool-call format: the dialect that writes a call as the template renders it."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftproof.server.background import TimeOver, time_limit
from draftproof.server.dialects.families import DIALECTS, Call, Dialect
from draftproof.server.errors import ApiError, endless_template

_SECONDS = 10.0  # for all renderings; a template may be one that never ends
_ASKED, _ANSWERED = "asked7301", "answered7301"
_NAME = "lookup7301"
_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"alpha": "amber", "count": 7301, "exact": True},
    {"alpha": "amber", "count": 7301},  # some templates write words as Python has them, which models need not
    {"alpha": "amber"},  # and some write numbers between quotes
)
_IDS = (Call.id, f"functions.{_NAME}:0")
_TYPES = {"alpha": "string", "count": "integer", "exact": "boolean"}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "",
        "parameters": {"type": "object", "properties": {name: {"type": kind} for name, kind in _TYPES.items()}},
    },
}


@dataclass(frozen=True)
class DetectedFormat:
    """The tool-call format of a chat template."""

    dialect: Dialect | None  # the dialect that reproduces its rendering of a call; None if there is none
    why: str = ""  # why there is none
    as_text: bool = False  # whether the template accepts arguments as JSON text only, and not as objects
    renders: bool = True  # whether the template writes the calls of earlier messages at all


_known: weakref.WeakKeyDictionary[Any, dict[str, DetectedFormat]] = weakref.WeakKeyDictionary()


def format_of(tokenizer: Any, given: str) -> Dialect:
    """The dialect of a model's calls: the named one, or for "auto" that of its chat template."""
    if not re.search(r"\btools\b", _template(tokenizer)):
        raise ApiError("this model has no chat template that knows tools: leave them out", param="tools")
    if given != "auto":
        return DIALECTS[given]
    found = detect_format(tokenizer)
    if found.dialect is None:
        raise ApiError(
            f"the format of this model's tool calls is unknown, as its chat template {found.why}: start the server "
            "with --tool-format NAME; the guide to serving lists the names",
            param="tools",
        )
    return found.dialect


def detect_format(tokenizer: Any) -> DetectedFormat:
    """The tool-call format of a tokenizer's chat template, detected once for each template."""
    template = _template(tokenizer)
    known = _known.setdefault(tokenizer, {})
    if template not in known:
        try:
            with time_limit(_SECONDS):
                known[template] = _detect(tokenizer, template)
        except TimeOver:
            raise endless_template(_SECONDS, "a call of a tool", "tools") from None
    return known[template]


def _template(tokenizer: Any) -> str:
    """The chat template that is used with tools; empty for none."""
    try:
        return str(tokenizer.get_chat_template(None, tools=[{}]))
    except Exception:  # noqa: BLE001 - none, or none for tools
        return ""


def _detect(tokenizer: Any, template: str) -> DetectedFormat:
    renderings = [
        (arguments, as_text, _rendered(tokenizer, call_id, arguments, as_text=as_text))
        for arguments in _ARGUMENTS
        for as_text in (False, True)
        for call_id in _IDS
    ]
    for arguments, as_text, turn in renderings:
        written = {each.name: _same_quotes(each.rendered(Call(_NAME, arguments))) for each in DIALECTS.values()}
        fitting = [name for name, text in written.items() if turn is not None and text in _same_quotes(turn)]
        if fitting:
            return DetectedFormat(DIALECTS[max(fitting, key=lambda name: len(written[name]))], as_text=as_text)
    turns = [(as_text, turn) for _, as_text, turn in renderings if turn is not None]
    if any(_NAME in turn for _, turn in turns):
        text_only = all(as_text for as_text, _ in turns)
        return DetectedFormat(None, "writes them in none of the known ways", as_text=text_only)
    signs = [each for each in DIALECTS.values() if each.signs and all(sign in template for sign in each.signs)]
    if signs:  # of several, the one with the most marker text
        return DetectedFormat(max(signs, key=lambda each: sum(map(len, each.signs))), renders=False)
    why = "leaves the calls of earlier messages out" if turns else "refuses messages with calls"
    return DetectedFormat(None, f"{why} and names no known marker", renders=False)


def _rendered(tokenizer: Any, call_id: str, arguments: Mapping[str, Any], *, as_text: bool) -> str | None:
    """The turn with a call, as the template renders it; None if the template refuses it."""
    function = {"name": _NAME, "arguments": json.dumps(arguments) if as_text else arguments}
    messages = [
        {"role": "user", "content": _ASKED},
        {"role": "assistant", "content": "", "tool_calls": [{"id": call_id, "type": "function", "function": function}]},
        {"role": "tool", "content": _ANSWERED, "tool_call_id": call_id, "name": _NAME},
    ]
    try:
        text = tokenizer.apply_chat_template(messages, tools=[_TOOL], add_generation_prompt=True, tokenize=False)
    except Exception:  # noqa: BLE001 - a template raises what it likes
        return None
    return str(text).rpartition(_ASKED)[2].partition(_ANSWERED)[0]


def _same_quotes(text: str) -> str:
    """A text in which both kinds of quotes are one: grammars allow both where templates may use either."""
    return text.replace("'", '"')


# --- earlier calls ---------------------------------------------------------------------------------------------------


def fitted(messages: Sequence[dict[str, Any]], tokenizer: Any, given: str) -> list[dict[str, Any]]:
    """Messages with calls in the form that this model's chat template accepts, or in the content if it omits calls."""
    if not any("tool_calls" in each for each in messages):
        return [*messages]
    found = detect_format(tokenizer)
    dialect = found.dialect if given == "auto" else DIALECTS[given]
    ids = _Ids("any" if dialect is None else dialect.ids)
    written = None if found.renders else dialect
    return [_fitted(each, ids, written, as_text=found.as_text) for each in messages]


class _Ids:
    """Ids of calls as a template takes them, of a kind that `Dialect.ids` names."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._new: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._numbers: Iterator[int] = itertools.count()

    def of(self, call_id: str, name: str) -> str:
        self._names[call_id] = name
        made = call_id
        if self._kind == "numbered":
            made = f"functions.{name}:{next(self._numbers)}"
        elif self._kind == "short" and not re.fullmatch("[a-zA-Z0-9]{9}", call_id):
            made = hashlib.sha256(call_id.encode(errors="surrogatepass")).hexdigest()[:9]
        self._new[call_id] = made
        return made

    def result(self, call_id: str) -> dict[str, str]:
        """What a message with the result of a call says of it."""
        made = {"tool_call_id": self._new.get(call_id, call_id)}
        return {**made, "name": self._names[call_id]} if call_id in self._names else made


def _fitted(message: dict[str, Any], ids: _Ids, written: Dialect | None, *, as_text: bool) -> dict[str, Any]:
    """One message; its calls are in the content if it is said in which dialect."""
    if message["role"] == "tool":
        return {**message, **ids.result(message["tool_call_id"])}
    if "tool_calls" not in message:
        return message
    made, calls = [], []
    for call in message["tool_calls"]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        calls.append(Call(name, arguments, ids.of(call["id"], name)))
        shown = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
        made.append({**call, "id": calls[-1].id, "function": {"name": name, "arguments": shown}})
    if written is None:
        return {**message, "tool_calls": made}
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": message["content"] + written.written(calls)}
