"""Tools: what a model writes to call one, the grammar that its answer fits then, and the calls in an answer.

The dialect is the one that the model's chat template teaches it. Calls are made by a grammar, so that names and
arguments are always valid; where the model may choose, the grammar lets it write any text, and takes over where a call
begins.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any, no_type_check

from typing_extensions import override

from draftproof.errors import UserError
from draftproof.finish import overlap
from draftproof.grammar_compile import use_local_references
from draftproof.sampling import SamplingParams
from draftproof.server.dialects.detection import format_of
from draftproof.server.dialects.families import Dialect
from draftproof.server.dialects.grammar import Grammar
from draftproof.server.dialects.json_schema import ANY_TEXT, regex_of, without_idle_names
from draftproof.server.dialects.readers import Reader
from draftproof.server.errors import ApiError, quoted
from draftproof.server.schemas import ChatBody, Function, Message, NamedTool, Tool

_DEEP = "the schema of a tool has too many levels"
_COMPACT = {"whitespace_flexible": False}


@dataclass(frozen=True)
class ToolSet:
    """The tools of a request, and what the model may do with them."""

    format: Dialect
    functions: tuple[Function, ...]
    must: bool  # whether the answer is a call
    several: bool  # whether it may hold several
    specials: dict[str, int]  # ids of the special tokens among the format's markers

    def grammar(self, form: dict[str, Any] | None) -> str:
        """The grammar of the answer as llguidance reads it; `form` is a JSON schema for an answer that is no call."""
        grammar = Grammar(self.specials)
        try:
            form = None if form is None else _with_own_references(form)
            calls = self.format.terms(grammar, self.functions, several=self.several)
            start = self._start(grammar, calls, form)
        except UserError as error:
            raise ApiError(str(error), param="tools") from error
        except RecursionError:
            raise ApiError(_DEEP, param="tools") from None
        return "\n".join(["%llguidance {}", *start, *grammar.lines, ""])

    def _start(self, grammar: Grammar, calls: str, form: dict[str, Any] | None) -> list[str]:
        """The rules for what an answer begins with."""
        marker = self.format.marker
        if self.must:
            return [f"start: {grammar.text(marker)} {calls}"]
        plain = grammar.text(self.format.plain)
        if not marker:
            if form is not None:
                raise ApiError(
                    "this model's calls cannot be told from JSON: leave out response_format or tools",
                    param="response_format",
                )
            return [f"start: PLAIN? | {calls}", rf"PLAIN: /[^{re.escape(self.format.first)}\s](.|\n)*/"]
        if form is not None:
            return [f"start: {plain} {grammar.json(form, form, _COMPACT)} | {grammar.text(marker)} {calls}"]
        if plain:
            return [f"start: {plain} TEXT | {grammar.text(marker)} {calls}", f"TEXT: /{ANY_TEXT}/"]
        if marker in self.specials:
            text = grammar.terminal(f"/{ANY_TEXT}/ & ~/{ANY_TEXT}{regex_of(marker)}{ANY_TEXT}/")
            return [f"start: {text} | {text} {grammar.text(marker)} {calls}"]
        return [f"start: TEXT | before {calls}", f"before[lazy]: TEXT {grammar.text(marker)}", f"TEXT: /{ANY_TEXT}/"]

    def form(self, *, formed: bool) -> str:
        """A pattern of what an answer's form begins with; empty where all of it has a form, as `formed` text does."""
        if self.must or formed:
            return ""
        return re.escape(self.format.marker) or rf"\A{re.escape(self.format.first)}"


@no_type_check  # as the class it extends
@dataclass(frozen=True, kw_only=True)
class ToolParams(SamplingParams):
    """Sampling parameters of an answer of text, where stop strings count, and then calls, which `begins` matches."""

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
    """What a request says of tools, in the format of a name or of "auto"; None where the model is not shown any."""
    choice, tools = body.tool_choice, body.tools or None
    if tools is None:
        _refuse_unneeded(body)
    # Calls and results in a chat need a format, too, though no tool is offered any more.
    if tools is not None or any(each.tool_calls or each.role == "tool" for each in body.messages):
        made = format_of(tokenizer, given)
    functions = _checked(tools or ())
    if tools is None or choice == "none":
        return None
    if isinstance(choice, NamedTool):
        functions = [each for each in functions if each.name == choice.function.name]
        if not functions:
            raise ApiError("tool_choice names a function that is not among the tools", param="tool_choice")
    # A grammar sees texts. Where a format begins by a special token, that token must be allowed as such.
    added = getattr(tokenizer, "added_tokens_decoder", {})
    specials = {str(token.content): place for place, token in added.items() if token.special}
    return ToolSet(
        made,
        tuple(functions),
        must=choice == "required" or isinstance(choice, NamedTool),
        several=made.parallel and body.parallel_tool_calls and not isinstance(choice, NamedTool),
        specials={
            text: place for text, place in specials.items() if text.strip() and any(text in each for each in made.texts)
        },
    )


def _refuse_unneeded(body: ChatBody) -> None:
    """Refuse what is said of tools where there are none; beside an empty list of them only that one must be called."""
    unneeded = {"tool_choice", "parallel_tool_calls"} & body.model_fields_set
    if body.tools is not None:
        unneeded = set() if body.tool_choice in (None, "none", "auto") else {"tool_choice"}
    for name in sorted(unneeded):
        raise ApiError(f"{name} needs tools", param=name)


def _with_own_references(schema: dict[str, Any]) -> dict[str, Any]:
    """A copy whose references are `#/$defs/NAME`, however the client wrote them."""
    made = deepcopy(schema)
    use_local_references(made)
    return made


def _checked(tools: Sequence[Tool]) -> list[Function]:
    """The functions of tools, with schemas as grammars take them."""
    try:
        schemas = [_with_own_references(without_idle_names(each.function.parameters)) for each in tools]
        functions = [
            each.function.model_copy(update={"parameters": schema}) for each, schema in zip(tools, schemas, strict=True)
        ]
    except RecursionError:
        raise ApiError(_DEEP, param="tools") from None
    if len({each.name for each in functions}) < len(functions):
        raise ApiError("tools: expected functions with different names, got one name twice", param="tools")
    for each in functions:
        if each.parameters.get("type", "object") != "object":
            raise ApiError(f"the parameters of {each.name}: expected a schema of type object", param="tools")
    return functions


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
    """The calls of a message as chat templates take them: arguments are objects."""
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
    """What a piece of an answer adds to a call: id and name in its first part, and more arguments as JSON."""

    place: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass
class ToolReader:
    """Divides an answer into text and calls, as it comes; `count` is the number of calls so far."""

    tools: ToolSet
    count: int = 0
    _calls: bool = False
    _plain: bool = False
    _rest: str = ""
    _arguments: Reader | None = None
    _parts: dict[int, CallPart] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._calls = self.tools.must

    def read(self, text: str, *, last: bool) -> tuple[str, list[CallPart]]:
        """Text and parts of calls in the next piece; `last` releases text that was held back."""
        self._rest += text
        self._parts = {}
        said = "" if self._calls else self._text(last=last)
        while self._calls and self._rest:
            if not (self._head() if self._arguments is None else self._more(self._arguments)):
                break
        return said, list(self._parts.values())

    def _text(self, *, last: bool) -> str:
        """Text before calls; what may be the beginning of a marker is held back."""
        marker = self.tools.format.marker
        if not marker:
            self._calls = not self._plain and self._rest.startswith(self.tools.format.first)
            if self._calls:
                return ""
            said = self._rest
            self._rest = ""
            self._plain = self._plain or bool(said)
            return said
        plain = self.tools.format.plain
        if plain and not self._plain:
            if not last and plain.startswith(self._rest):
                return ""
            self._plain = self._rest.startswith(plain)
            self._rest = self._rest.removeprefix(plain)
        said, found, rest = self._rest.partition(marker)
        if found:
            self._calls = True
            self._rest = rest
            return said
        held = 0 if last else overlap(said, marker)
        self._rest = said[len(said) - held :]
        return said[: len(said) - held]

    def _head(self) -> bool:
        """The beginning of a call; whether it is complete."""
        found = self.tools.format.begin(self.count, marked=not self.tools.must).match(self._rest)
        if not found:
            return False
        name = found[1]
        self._part(CallPart(self.count, f"call_{uuid.uuid4().hex[:24]}", name))
        self.count += 1
        self._rest = self._rest[found.end() :]
        parameters = next((each.parameters for each in self.tools.functions if each.name == name), {})
        self._arguments = self.tools.format.arguments.reader(parameters)
        return True

    def _more(self, reader: Reader) -> bool:
        """More of the arguments; whether they have ended."""
        self._part(CallPart(self.count - 1)).arguments += reader.read(self._rest)
        self._rest = reader.rest if reader.done else ""
        if reader.done:
            self._arguments = None
        return reader.done

    def _part(self, made: CallPart) -> CallPart:
        return self._parts.setdefault(made.place, made)
