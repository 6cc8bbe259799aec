"""The dialects: how families of models write calls of tools."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

from draftproof.server.dialects.arguments import (
    Arguments,
    JsonArguments,
    LabelledArguments,
    LiteralArguments,
    TaggedArguments,
)
from draftproof.server.dialects.grammar import Grammar, choice, dumped
from draftproof.server.dialects.readers import Notation

_NAME = r"[\w.:/-]{1,128}"
_ID = "{id}"  # in the texts of a dialect: where a call's id stands
_IDS = {"any": "", "short": "[a-zA-Z0-9]{9}", "numbered": "[0-9]{1,4}"}


@runtime_checkable
class Signature(Protocol):
    """What calls of a function look like; not its schema, as names of dialects are known without pydantic."""

    name: str
    parameters: dict[str, Any]


@runtime_checkable
class FreeSignature(Signature, Protocol):
    """What calls look like whose one argument is a text with a grammar of its own, `lark`."""

    lark: str


@dataclass(frozen=True)
class Call:
    """A call of a function that a model has made."""

    name: str
    arguments: Mapping[str, Any]
    id: str = "callid000"


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How a family of models writes calls: each is a name and arguments, with fixed texts around them."""

    name: str  # as `--tool-format` has it
    models: str
    # What tells calls from text; empty where calls are all of the answer and text begins in another way.
    marker: str = ""
    opening: str = ""  # what stands between the marker and the first call
    head: str = ""  # what stands before the name of a function
    middle: str = ""  # what stands between the name and the arguments
    arguments: Arguments = JsonArguments()  # noqa: RUF009 - it has no state
    tail: str = ""  # what stands after the arguments
    between: str = ""  # what stands between two calls
    closing: str = ""  # what stands after all of them
    plain: str = ""  # what stands before a text in place of calls
    # What stands before and after the name in calls of earlier messages, where templates write it otherwise.
    earlier: tuple[str, str] | None = None
    parallel: bool = True  # whether an answer may hold several calls
    # Of calls, as chat templates take them: any, `short` ones of nine letters and digits, or `numbered` as in
    # `functions.NAME:0`.
    ids: str = "any"
    # A chat template that has all of these, and writes no call itself, teaches this dialect; none for never.
    signs: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """The fixed texts, among which special tokens may be."""
        own = (self.marker, self.opening, self.head, self.middle, self.tail, self.between, self.closing, self.plain)
        return (*own, *self.arguments.texts)

    @property
    def first(self) -> str:
        """The letter that calls without a marker begin with."""
        return (self.opening + self.head)[0]

    def written(self, calls: Sequence[Call]) -> str:
        """Calls as the model writes them."""
        made = []
        for place, call in enumerate(calls):
            text = f"{self.head}{call.name}{self.middle}{self.arguments.written(call.arguments)}{self.tail}"
            made.append(text.replace(_ID, str(place) if self.ids == "numbered" else call.id))
        return f"{self.marker}{self.opening}{self.between.join(made)}{self.closing}"

    def rendered(self, call: Call) -> str:
        """A call of an earlier message as chat templates write it."""
        if self.earlier is None:
            return self.written([call])
        before, after = self.earlier
        return f"{before}{call.name}{after}{self.arguments.written(call.arguments)}{self.tail}"

    def terms(self, grammar: Grammar, functions: Sequence[Signature], *, several: bool) -> str:
        """Terms of Lark for calls, without the marker; a UserError for parameters that the dialect cannot keep to."""
        call = grammar.rule(choice([self._call(grammar, each) for each in functions]))
        more = f"({self._text(grammar, self.between)} {call})*" if several else ""
        return f"{self._text(grammar, self.opening)} {call} {more} {self._text(grammar, self.closing)}"

    def begin(self, place: int, *, marked: bool) -> re.Pattern[str]:
        """What stands from the end of the arguments before to those of a call, its name in a group."""
        before = self.tail + self.between if place else ("" if marked else self.marker) + self.opening
        after = "" if self.middle else r"(?=[^\w.:/-])"
        return re.compile(f"{self._pattern(before + self.head)}({_NAME}){self._pattern(self.middle)}{after}")

    def _call(self, grammar: Grammar, function: Signature) -> str:
        head = self._text(grammar, f"{self.head}{function.name}{self.middle}")
        dumped(function.parameters)  # refuses what is no JSON
        if isinstance(function, FreeSignature):
            inner = self.arguments.free(grammar, function.parameters, function.lark)
        else:
            inner = self.arguments.terms(grammar, function.parameters)
        return grammar.rule(f"{head} {inner} {self._text(grammar, self.tail)}")

    def _text(self, grammar: Grammar, text: str) -> str:
        before, found, after = text.partition(_ID)
        if not found:
            return grammar.text(text)
        return f"{grammar.text(before)} {grammar.terminal(f'/{_IDS[self.ids]}/')} {grammar.text(after)}"

    def _pattern(self, text: str) -> str:
        return _IDS[self.ids].join(map(re.escape, text.split(_ID)))


_PYTHON = Notation(('"', "'"), "=", ": ", ", ", quoted_names=True, words=True)
_OLMO = Notation(('"', "'"), "=", ": ", ", ", quoted_names=True, words=False)
_GEMMA = Notation(('<|"|>',), ":", ":", ",", quoted_names=False, words=False)
_FUNCTION_GEMMA = Notation(("<escape>",), ":", ":", ",", quoted_names=False, words=False)

_mistral = partial(Dialect, marker="[TOOL_CALLS]", ids="short")  # the first ones write a list, later ones each call
_mistral_list = partial(
    _mistral, head='{"name": "', middle='", "arguments": ', tail=', "id": "{id}"}', between=", ", closing="]"
)
_python_list = partial(
    Dialect, opening="[", middle="(", arguments=LiteralArguments(_PYTHON, ")"), tail=")", between=", "
)
_olmo = partial(
    Dialect, marker="<function_calls>", middle="(", arguments=LiteralArguments(_OLMO, ")"), tail=")", between="\n"
)
DIALECTS = {
    each.name: each
    for each in (
        Dialect(
            name="qwen-xml",
            models="Qwen3-Coder, Qwen3.5 and later, MiMo",
            marker="<tool_call>",
            head="\n<function=",
            middle=">",
            arguments=TaggedArguments("\n<parameter=", ">\n", "\n</parameter>"),
            tail="\n</function>\n</tool_call>",
            between="\n<tool_call>",
            signs=("<tool_call>", "<function=", "<parameter="),
        ),
        Dialect(
            name="glm",
            models="GLM-4.5, 4.6",
            marker="<tool_call>",
            middle="\n",
            arguments=TaggedArguments("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
            tail="</tool_call>",
            between="\n<tool_call>",
            signs=("<tool_call>", "</arg_key>\n<arg_value>"),
        ),
        Dialect(
            name="glm-compact",
            models="GLM-4.7, 5",
            marker="<tool_call>",
            arguments=TaggedArguments("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
            tail="</tool_call>",
            between="<tool_call>",
            signs=("<tool_call>", "<arg_key>"),
        ),
        Dialect(
            name="minimax",
            models="MiniMax M2",
            marker="<minimax:tool_call>",
            opening="\n",
            head='<invoke name="',
            middle='">\n',
            arguments=TaggedArguments('<parameter name="', '">', "</parameter>\n"),
            tail="</invoke>\n",
            closing="</minimax:tool_call>",
            signs=("<minimax:tool_call>",),
        ),
        Dialect(
            name="hermes",
            models="Qwen2.5, Qwen3, Hermes, SmolLM3, Granite 4",
            marker="<tool_call>",
            head='\n{"name": "',
            middle='", "arguments": ',
            tail="}\n</tool_call>",
            between="\n<tool_call>",
            signs=("<tool_call>",),
        ),
        Dialect(
            name="hermes-compact",
            models="EXAONE 4",
            marker="<tool_call>",
            head='{"name": "',
            middle='", "arguments": ',
            tail="}</tool_call>",
            between="\n<tool_call>",
            signs=("<tool_call>{",),
        ),
        _mistral(
            name="mistral-args",
            models="Devstral, Magistral, Ministral 3",
            middle="[ARGS]",
            between="[TOOL_CALLS]",
            signs=("[TOOL_CALLS]", "[ARGS]"),
        ),
        _mistral(
            name="mistral-id",
            models="Mistral Small 3.2",
            middle="[CALL_ID]{id}[ARGS]",
            between="[TOOL_CALLS]",
            signs=("[TOOL_CALLS]", "[CALL_ID]"),
        ),
        _mistral(
            name="mistral-name",
            models="Mistral models whose template writes the name right before the arguments",
            between="[TOOL_CALLS]",
        ),
        _mistral_list(name="mistral", models="Mistral 7B v0.3, Mixtral 8x22B", opening=" [", signs=("[TOOL_CALLS]",)),
        _mistral_list(
            name="mistral-nemo",
            models="Mistral Nemo, Large and Small of 2024",
            opening="[",
            signs=("[TOOL_CALLS][",),
        ),
        Dialect(
            name="deepseek",
            models="DeepSeek R1, V3",
            marker="<｜tool▁calls▁begin｜>",
            head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            middle="\n```json\n",
            tail="\n```<｜tool▁call▁end｜>",
            between="\n",
            closing="<｜tool▁calls▁end｜>",
            signs=("<｜tool▁calls▁begin｜>", "```json"),
        ),
        Dialect(
            name="deepseek-v3.1",
            models="DeepSeek V3.1",
            marker="<｜tool▁calls▁begin｜>",
            head="<｜tool▁call▁begin｜>",
            middle="<｜tool▁sep｜>",
            tail="<｜tool▁call▁end｜>",
            closing="<｜tool▁calls▁end｜>",
            signs=("<｜tool▁calls▁begin｜>",),
        ),
        *(
            Dialect(
                name=name,
                models=models,
                marker=f"<｜DSML｜{block}>",
                opening="\n",
                head='<｜DSML｜invoke name="',
                middle='">\n',
                arguments=LabelledArguments(
                    '<｜DSML｜parameter name="', '" string="{}', '">', "</｜DSML｜parameter>\n"
                ),
                tail="</｜DSML｜invoke>\n",
                closing=f"</｜DSML｜{block}>",
                signs=(f"<｜DSML｜{block}>",),
            )
            for name, models, block in (
                ("dsml", "DeepSeek V3.2", "function_calls"),
                ("dsml-v4", "DeepSeek V4", "tool_calls"),
            )
        ),
        Dialect(
            name="kimi",
            models="Kimi K2",
            marker="<|tool_calls_section_begin|>",
            head="<|tool_call_begin|>functions.",
            middle=":{id}<|tool_call_argument_begin|>",
            tail="<|tool_call_end|>",
            closing="<|tool_calls_section_end|>",
            ids="numbered",
            signs=("<|tool_calls_section_begin|>",),
        ),
        Dialect(
            name="harmony",
            models="gpt-oss",
            marker="<|channel|>commentary to=functions.",
            middle=" <|constrain|>json<|message|>",
            plain="<|channel|>final<|message|>",
            earlier=(" to=functions.", "<|channel|>commentary json<|message|>"),
            parallel=False,
            signs=("<|channel|>", "functions."),
        ),
        Dialect(
            name="gemma",
            models="Gemma 4",
            marker="<|tool_call>",
            head="call:",
            middle="{",
            arguments=LiteralArguments(_GEMMA, "}", by_name=True),
            tail="}<tool_call|>",
            between="<|tool_call>",
            signs=("<|tool_call>",),
        ),
        Dialect(
            name="functiongemma",
            models="FunctionGemma",
            marker="<start_function_call>",
            head="call:",
            middle="{",
            arguments=LiteralArguments(_FUNCTION_GEMMA, "}", by_name=True),
            tail="}<end_function_call>",
            between="<start_function_call>",
            signs=("<start_function_call>",),
        ),
        _python_list(
            name="lfm2",
            models="LFM2, LFM2.5",
            marker="<|tool_call_start|>",
            closing="]<|tool_call_end|>",
            signs=("<|tool_list_start|>",),
        ),
        _olmo(name="olmo", models="OLMo 3", closing="</function_calls>", signs=("<function_calls>",)),
        _olmo(
            name="olmo-lines",
            models="OLMo 3 with a template that puts the tags on lines of their own",
            opening="\n",
            closing="\n</function_calls>",
            signs=("<function_calls>\n",),
        ),
        _python_list(
            name="llama4",
            models="Llama 4 with tags",
            marker="<|python_start|>",
            closing="]<|python_end|>",
            signs=("<|python_start|>[",),
        ),
        _python_list(
            name="pythonic",
            models="Llama 3.2 and 4 with a template for Python's calls",
            closing="]",
            signs=("[func_name1(",),
        ),
        Dialect(
            name="llama",
            models="Llama 3.1, 3.2, 3.3",
            head='{"name": "',
            middle='", "parameters": ',
            tail="}",
            parallel=False,
            signs=('"parameters": dictionary',),
        ),
    )
}
