"""Tools: what a model writes to call one, the grammar that its answer fits then, and the calls in an answer.

The format is the one that the model's chat template teaches it. Calls are made by a grammar, so that names and
arguments are always valid; where the model may choose, the grammar lets it write any text, and takes over where a call
begins.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, no_type_check

from typing_extensions import override

from draftproof.finish import overlap
from draftproof.sampling import SamplingParams
from draftproof.server.errors import ApiError, quoted
from draftproof.server.schemas import ChatBody, Function, Message, NamedTool, Tool

_COMPACT = {"whitespace_flexible": False}
_SPACED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as json.dumps writes it
_HEAD = re.compile(r'[^{]*\{"name": "([\w-]+)", "(?:arguments|parameters)": (?=\{)')


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls: each is `{"name": NAME, KEY: ARGUMENTS}`, with this around it.

    Attributes:
        name: as `--tool-format` has it.
        marker: what tells a call from text; empty where a call is all of the answer and text begins with no `{`.
        opening: between the marker and the first call, as a term of Lark.
        before: what stands before each further call.
        after: what stands after each call.
        closing: what stands after all of them.
        key: of the arguments.
        parallel: whether an answer may hold several calls.
        signs: a chat template that has one of these teaches this format.
    """

    name: str
    marker: str
    opening: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    closing: str
    key: str
    parallel: bool
    signs: tuple[str, ...]


FORMATS = {
    each.name: each
    for each in (
        ToolFormat(
            "hermes",
            "<tool_call>",
            '"\\n"',
            ("\n", "<tool_call>", "\n"),
            ("\n", "</tool_call>"),
            "",
            "arguments",
            parallel=True,
            signs=("<tool_call>",),
        ),
        ToolFormat(
            "mistral",
            "[TOOL_CALLS]",
            '/ ?/ "["',
            (", ",),
            (),
            "]",
            "arguments",
            parallel=True,
            signs=("[TOOL_CALLS]",),
        ),
        ToolFormat(
            "llama",
            "",
            "",
            (),
            (),
            "",
            "parameters",
            parallel=False,
            signs=('"parameters": dictionary', "<|python_tag|>"),
        ),
    )
}


def format_of(tokenizer: Any, given: str) -> ToolFormat:
    """The format of a model's calls.

    Args:
        tokenizer: with the chat template.
        given: a name, or auto.

    Raises:
        ApiError: the template knows no tools, or a format that is not known here.
    """
    try:
        template = str(tokenizer.get_chat_template(None, tools=[{}]))
    except Exception:  # noqa: BLE001 - none, or none for tools
        template = ""
    if not re.search(r"\btools\b", template):
        raise ApiError("the chat template of this model knows no tools: leave them out", param="tools")
    if given != "auto":
        return FORMATS[given]
    found = next((each for each in FORMATS.values() if any(sign in template for sign in each.signs)), None)
    if found is None:
        raise ApiError(
            "the format of this model's tool calls is unknown: start the server with --tool-format, one of "
            f"{', '.join(FORMATS)}",
            param="tools",
        )
    return found


@dataclass(frozen=True)
class ToolSet:
    """The tools of a request, and what the model may do with them.

    Attributes:
        format: of calls.
        functions: that may be called.
        must: whether the answer is a call.
        several: whether it may hold several.
        specials: ids of the special tokens among the format's markers.
    """

    format: ToolFormat
    functions: tuple[Function, ...]
    must: bool
    several: bool
    specials: dict[str, int]

    def grammar(self, form: dict[str, Any] | None) -> str:
        """The grammar of the answer, in Lark's notation as llguidance reads it.

        Args:
            form: a JSON schema for an answer that is no call; None for any text.

        Raises:
            ApiError: calls and such an answer cannot be told apart.
        """
        made, more = self.format, ""
        if self.several:
            more = f"({self._terms(*made.after, *made.before)} function)*"
        calls = f"{made.opening} function {more} {self._terms(*made.after, made.closing)}"
        lines = ["%llguidance {}", *self._start(calls, form)]
        lines.append(f"function: {' | '.join(f'function_{place}' for place in range(len(self.functions)))}")
        for place, each in enumerate(self.functions):
            head = json.dumps(f'{{"name": "{each.name}", "{made.key}": ')
            lines.append(f'function_{place}: {head} arguments_{place} "}}"')
            lines.append(f"arguments_{place}: %json {_schema(each)}")
        return "\n".join([*lines, ""])

    def _start(self, calls: str, form: dict[str, Any] | None) -> list[str]:
        """The rules for what an answer begins with."""
        marker = self._terms(self.format.marker)
        if self.must:
            return [f"start: {marker} {calls}"]
        if not marker:
            if form is not None:
                raise ApiError(
                    "this model's calls cannot be told from JSON: leave out response_format or tools",
                    param="response_format",
                )
            return [f"start: PLAIN? | {calls}", r"PLAIN: /[^{\s](.|\n)*/"]
        if form is not None:
            return [f"start: form | {marker} {calls}", f"form: %json {_dumped(_guided(form, _COMPACT))}"]
        text = r"TEXT: /(.|\n)*/"
        if self.format.marker in self.specials:
            return [f"start: TEXT | TEXT {marker} {calls}", text]
        return [f"start: TEXT | before {calls}", f"before[lazy]: TEXT {marker}", text]

    def form(self, *, formed: bool) -> str:
        """A pattern of what an answer's form begins with; the empty one where all of the answer has a form.

        Args:
            formed: whether an answer that is no call has a form, too.
        """
        if self.must or formed:
            return ""
        return re.escape(self.format.marker) or r"\A\{"

    def _terms(self, *texts: str) -> str:
        """Texts as terms of Lark."""
        return " ".join(
            f"<[{self.specials[text]}]>" if text in self.specials else json.dumps(text) for text in texts if text
        )


@no_type_check  # as the class it extends
@dataclass(frozen=True, kw_only=True)
class ToolParams(SamplingParams):
    """Sampling parameters of an answer that may be text, in which stop strings count, and then calls.

    Attributes:
        begins: a pattern of what the answer's form begins with.
    """

    begins: str = ""

    @classmethod
    def of(cls, params: SamplingParams, begins: str) -> ToolParams:
        """Some parameters, for such an answer."""
        return cls(**{each.name: getattr(params, each.name) for each in fields(SamplingParams)}, begins=begins)

    @property
    @override
    def form(self) -> re.Pattern[str]:
        return re.compile(self.begins)


def tool_set(body: ChatBody, tokenizer: Any, given: str) -> ToolSet | None:
    """What a request says of tools; None where the model is not shown any.

    Args:
        body: of the request.
        tokenizer: of the model.
        given: name of the format, or auto.

    Raises:
        ApiError: fields that do not fit together, or a model that knows no tools.
    """
    choice, tools = body.tool_choice, body.tools or None
    if tools is None:
        _refuse_unneeded(body)
    if tools is not None or any(each.tool_calls or each.role == "tool" for each in body.messages):
        made = format_of(tokenizer, given)
    functions = _checked(tools or ())
    if tools is None or choice == "none":
        return None
    if isinstance(choice, NamedTool):
        functions = [each for each in functions if each.name == choice.function.name]
        if not functions:
            raise ApiError("tool_choice names a function that is not among the tools", param="tool_choice")
    texts = {made.marker, *made.before, *made.after} - {"", "\n", ", "}
    added = getattr(tokenizer, "added_tokens_decoder", {})
    specials = {str(token.content): place for place, token in added.items() if token.special}
    return ToolSet(
        made,
        tuple(functions),
        must=choice == "required" or isinstance(choice, NamedTool),
        several=made.parallel and body.parallel_tool_calls and not isinstance(choice, NamedTool),
        specials={text: specials[text] for text in texts if text in specials},
    )


def _refuse_unneeded(body: ChatBody) -> None:
    """Refuse what is said of tools where there are none; beside an empty list of them only that one must be called."""
    unneeded = {"tool_choice", "parallel_tool_calls"} & body.model_fields_set
    if body.tools is not None:
        unneeded = set() if body.tool_choice in (None, "none", "auto") else {"tool_choice"}
    for name in sorted(unneeded):
        raise ApiError(f"{name} needs tools", param=name)


def _checked(tools: Sequence[Tool]) -> list[Function]:
    """The functions of tools.

    Raises:
        ApiError: two of one name, or parameters that are no object.
    """
    functions = [each.function for each in tools]
    if len({each.name for each in functions}) < len(functions):
        raise ApiError("tools: expected functions with different names, got one name twice", param="tools")
    for each in functions:
        if each.parameters.get("type", "object") != "object":
            raise ApiError(f"the parameters of {each.name}: expected a schema of type object", param="tools")
    return functions


def _schema(function: Function) -> str:
    """The schema of a function's arguments, written as models were taught to write them."""
    given = function.parameters
    return _dumped(_guided({"type": "object", **given}, _SPACED))


def _guided(schema: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """A schema with defaults of how its JSON is written."""
    own = schema.get("x-guidance")
    return schema | {"x-guidance": {**defaults, **(own if isinstance(own, dict) else {})}}


def _dumped(schema: dict[str, Any]) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except (ValueError, RecursionError):
        raise ApiError("a schema holds what JSON cannot: numbers that are none, or too many levels") from None


def template_tools(functions: Sequence[Function]) -> list[dict[str, Any]]:
    """Tools as chat templates take them."""
    return [
        {
            "type": "function",
            "function": {"name": each.name, "description": each.description or "", "parameters": each.parameters},
        }
        for each in functions
    ]


def template_calls(message: Message) -> list[dict[str, Any]]:
    """The calls of a message as chat templates take them: arguments are objects.

    Raises:
        ApiError: arguments that are no JSON object.
    """
    made = []
    for call in message.tool_calls or ():
        try:
            arguments = json.loads(call.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise ApiError(
                f"the arguments of a call of {quoted(call.function.name)} are not a JSON object", param="messages"
            )
        function = {"name": call.function.name, "arguments": arguments}
        made.append({"id": call.id, "type": "function", "function": function})
    return made


# --- answers ---------------------------------------------------------------------------------------------------------


@dataclass
class CallPart:
    """What a piece of an answer adds to a call.

    Attributes:
        place: number of the call.
        id: in the first part of a call.
        name: in the first part of a call.
        arguments: more of them, as JSON.
    """

    place: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass
class ToolReader:
    """Divides an answer into text and calls, as it comes.

    Args:
        tools: of the request.

    Attributes:
        count: number of calls so far.
    """

    tools: ToolSet
    count: int = 0
    _calls: bool = False
    _plain: bool = False
    _rest: str = ""
    _depth: int = 0
    _quoted: bool = False
    _escaped: bool = False
    _parts: dict[int, CallPart] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._calls = self.tools.must

    def read(self, text: str, *, last: bool) -> tuple[str, list[CallPart]]:
        """Text and parts of calls in the next piece; `last` releases text that was held back."""
        self._rest += text
        self._parts = {}
        said = "" if self._calls else self._text(last=last)
        while self._calls and self._rest:
            if not (self._argument() if self._depth else self._head()):
                break
        return said, list(self._parts.values())

    def _text(self, *, last: bool) -> str:
        """Text before calls; what may be the beginning of a marker is held back."""
        marker = self.tools.format.marker
        if not marker:
            self._calls = not self._plain and self._rest.startswith("{")
            if self._calls:
                return ""
            said, self._rest = self._rest, ""
            self._plain = self._plain or bool(said)
            return said
        said, found, rest = self._rest.partition(marker)
        if found:
            self._calls = True
            self._rest = rest
            return said
        held = 0 if last else overlap(said, marker)
        said, self._rest = said[: len(said) - held], said[len(said) - held :]
        return said

    def _head(self) -> bool:
        """The beginning of a call; whether it is complete."""
        found = _HEAD.match(self._rest)
        if not found:
            return False
        self._part(CallPart(self.count, f"call_{uuid.uuid4().hex[:24]}", found[1]))
        self.count += 1
        self._rest = self._rest[found.end() + 1 :]
        self._depth = 1
        self._parts[self.count - 1].arguments = "{"
        return True

    def _argument(self) -> bool:
        """Arguments, up to the bracket that ends them; whether that was there."""
        size = 0
        for letter in self._rest:
            size += 1
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = letter == "\\"
                self._quoted = letter != '"'
            elif letter == '"':
                self._quoted = True
            elif letter in "{}[]":
                self._depth += 1 if letter in "{[" else -1
                if not self._depth:
                    break
        self._part(CallPart(self.count - 1)).arguments += self._rest[:size]
        self._rest = self._rest[size:]
        return not self._depth

    def _part(self, made: CallPart) -> CallPart:
        return self._parts.setdefault(made.place, made)
