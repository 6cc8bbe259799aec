"""Requests that schemathesis makes from /openapi.json, and what their answers must be; tests and a script use it.

Legal bodies can be given fields of a hostile client: grammars, schemas, numbers and lists of any size.
"""

from functools import partial

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import checks
from schemathesis.generation import GenerationMode

from support import hostile

checks.load_all_checks()
REFUSED = checks.CHECKS.get_one("negative_data_rejection")
CHECKS = (
    checks.not_a_server_error,
    checks.CHECKS.get_one("status_code_conformance"),
    checks.CHECKS.get_one("content_type_conformance"),
    checks.CHECKS.get_one("response_headers_conformance"),
    checks.CHECKS.get_one("response_schema_conformance"),
    REFUSED,
    checks.CHECKS.get_one("unsupported_method"),
)
SHORTENED = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}  # a field of each that makes its answers short


def operations(base):
    """The operations of a server, by name."""
    schema = schemathesis.openapi.from_url(f"{base}/openapi.json")
    return {found.ok().label: found.ok() for found in schema.get_all_operations()}


def at_once(name, case, answer, error):
    """Report a mistake where it is found."""
    raise error


def _shortened(data, path, body):
    """A legal body with a few of its optional fields, and a short answer."""
    needed = {"prompt", "messages", "tokens", "input"} & set(body)
    if path == "/tokenize" and len(needed) == 2:  # one of them is legal
        needed = {data.draw(st.sampled_from(sorted(needed)))}
        body = {name: value for name, value in body.items() if name in needed or name not in ("prompt", "messages")}
    kept = data.draw(st.sets(st.sampled_from(sorted(body)), max_size=2)) if body else set()
    body = {name: value for name, value in body.items() if name in needed | kept}
    if "messages" in needed and data.draw(st.booleans()):  # what a role needs is not in the schema
        body["messages"] = [{"role": "user", "content": "x"}]
    return body | {name: 2 for of, name in SHORTENED.items() if of == path}


def check(operation, examples, *, at_random=False, fields=None, noted=at_once, go_on=lambda: True, seconds=120):
    """Send requests, legal ones and others, and check their answers; returns the statuses.

    Legal ones keep a few of their optional fields: with all of them, most are refused for the ranges of numbers.

    Args:
        operation: of `operations`.
        examples: how many requests.
        at_random: other ones each time.
        fields: a strategy that makes further fields for legal bodies, with a name for them.
        noted: called with each mistake: what the request is called, itself, its answer or None, an exception.
        go_on: whether to send another one.
        seconds: until an answer has to come.
    """
    sent = []
    phases = set(Phase) if noted is at_once else {Phase.generate}  # else requests are not made smaller and repeated

    modes = [*GenerationMode, *([] if fields is None else [None] * 4)]  # None: these fields and what they need

    @settings(
        max_examples=examples,
        derandomize=not at_random,
        database=None,
        deadline=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data(), mode=st.sampled_from(modes))
    def run(data, mode):
        name = operation.label
        if mode is None:
            names, more = data.draw(fields)
            name = f"{name}: {names}"
            body = hostile.with_needed(operation.path, more)
            case = operation.Case(method=operation.method, body=body, media_type="application/json")
        else:
            case = data.draw(operation.as_strategy(generation_mode=mode))
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body = _shortened(data, operation.path, case.body)
            if fields is not None:
                names, more = data.draw(fields)
                name = f"{name}: {names}"
                case.body |= more
        if not go_on():
            return
        answer = None
        try:
            answer = case.call(timeout=seconds)
            sent.append(answer.status_code)
            excluded = [REFUSED] if answer.status_code == 413 else []  # schemathesis does not count it as a refusal
            case.validate_response(answer, checks=CHECKS, excluded_checks=excluded)
        except BaseException as error:  # schemathesis raises groups of several kinds
            if isinstance(error, KeyboardInterrupt) or noted is at_once:
                raise
            noted(name, case, answer, error)

    run()
    return sent


# --- fields of a hostile client --------------------------------------------------------------------------------------

_SIZES = st.one_of(
    st.integers(0, 5),
    st.integers(0, 13).map(lambda power: 2**power),
    st.sampled_from((63, 64, 65, 127, 128, 129, 511, 512, 513, 1000, 1023, 1024, 1025, 4000, 4096, 4097, 12_000)),
    st.integers(0, 14_000),
)
_NUMBERS = st.sampled_from(
    (0, -1, 1, 2, 20, 21, 72, 73, 2**31, 2**32, 2**63 - 1, 2**63, -(2**63), 2**64, 10**18, 10**400, hostile.HUGE)
) | st.integers(-(2**70), 2**70)
_REALS = st.sampled_from((0.0, -0.0, 5e-324, 1e-300, 1e300, -1e300, 1.7e308, 2.0, 1.0)) | _NUMBERS
_TEXTS = st.builds(lambda text, size: text * size, st.sampled_from(("a", "é", "\x00", "🙂", "a b ", "\n")), _SIZES)
_SHORT = st.builds(
    lambda text, size: (text * size)[:513], st.sampled_from(("a", "é", "🙂", "the ")), st.integers(0, 513)
)


def _lists(items, most):
    """Lists of up to so many items and one more, made of a few."""
    sizes = st.one_of(st.integers(0, 3), st.sampled_from((most // 2, most - 1, most, most + 1)))
    few = st.lists(items, min_size=1, max_size=4)
    return st.builds(lambda found, size: (found * (size // len(found) + 1))[:size], few, sizes)


def _sized(kinds):
    """One of a family of grammars, with its name."""
    return st.builds(
        lambda name, size: (f"{name} {size}", hostile.clipped(kinds, name, size)),
        st.sampled_from(sorted(kinds)),
        _SIZES,
    )


def _named(name, values):
    return values.map(lambda value: (name, {name: value}))


def _grammars(*, chat):
    """Fields that ask for a form."""

    def outputs(name, values):
        return values.map(lambda made: (f"{name} {made[0]}", {"structured_outputs": {name: made[1]}}))

    deep = st.builds(
        lambda size, kind: (f"nested {kind} {size}", hostile.nested(size, kind)),
        _SIZES,
        st.sampled_from(("array", "{")),
    )
    found = [
        outputs("regex", _sized(hostile.REGEXES)),
        outputs("grammar", _sized(hostile.LARKS)),
        outputs("json", _sized(hostile.SCHEMAS)),
        outputs("json", deep),
        outputs("choice", _lists(_SHORT, 1024).map(lambda made: (f"of {len(made)}", made))),
        _sized(hostile.SCHEMAS).map(
            lambda made: (f"response_format {made[0]}", {"response_format": hostile.schema_format(made[1])})
        ),
        _TEXTS.map(lambda made: ("response_format of a type", {"response_format": {"type": made}})),
    ]
    if chat:
        tools = _lists(_sized(hostile.SCHEMAS), 2)
        choices = st.sampled_from(("auto", "required", "none", {"type": "function", "function": {"name": "f0"}}))
        found += [
            st.builds(
                lambda made, choice: (
                    f"tools {[each[0] for each in made]}",
                    {
                        "messages": [{"role": "user", "content": "x"}],
                        "tools": [hostile.tool(each[1], f"f{place}") for place, each in enumerate(made)],
                        "tool_choice": choice,
                    },
                ),
                tools,
                choices,
            )
        ] * 3
    return st.one_of(found)


def _numbers(*names):
    return st.one_of([_named(name, _NUMBERS) for name in names])


def _messages_fields():
    """Fields of a body in Anthropic's form."""
    schemas = _sized(hostile.SCHEMAS)
    choices = st.sampled_from(({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f0"}, {"type": "none"}))
    texts = _TEXTS.map(lambda text: [{"role": "user", "content": [{"type": "text", "text": text}]}])
    results = _SHORT.map(lambda text: [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": text}]}])
    return st.one_of(
        st.builds(
            lambda made, choice: (
                f"tools {[each[0] for each in made]}",
                {
                    "tools": [{"name": f"f{place}", "input_schema": each[1]} for place, each in enumerate(made)],
                    "tool_choice": choice,
                },
            ),
            _lists(schemas, 2),
            choices,
        ),
        schemas.map(
            lambda made: (
                f"output_config {made[0]}",
                {"output_config": {"format": {"type": "json_schema", "schema": made[1]}}},
            )
        ),
        _named("stop_sequences", _lists(_SHORT, 64)),
        _named("messages", texts | results),
        _named("system", _TEXTS),
        _named("thinking", _NUMBERS.map(lambda size: {"type": "enabled", "budget_tokens": size})),
        _numbers("max_tokens", "top_k", "seed"),
        _named("temperature", _REALS),
        _named("metadata", _SIZES.map(lambda size: [{}] * size * 10)),
        st.just(("stream", {"stream": True})),
    )


def _custom_tools():
    """Fields of a request to /v1/responses with a custom tool."""

    def fields(syntax, found):
        form = {"type": "grammar", "syntax": syntax, "definition": found[1]}
        tool = {"type": "custom", "name": "f0", "format": form}
        return f"custom {syntax} {found[0]}", {"input": "x", "tools": [tool], "tool_choice": "required"}

    kinds = {"regex": hostile.REGEXES, "lark": hostile.LARKS}
    return st.one_of([_sized(found).map(partial(fields, syntax)) for syntax, found in kinds.items()])


def _of_responses(fields):
    """Fields of a chat as those of a request to /v1/responses."""
    made = {name: value for name, value in fields.items() if name not in ("n", "prompt_logprobs")}
    for name, own in (("messages", "input"), ("max_tokens", "max_output_tokens")):
        if name in made:
            made[own] = made.pop(name)
    if "response_format" in made:
        form = made.pop("response_format")
        made["text"] = {"format": {"type": form["type"], **form.get("json_schema", {})}}
    if "tools" in made:
        made["tools"] = [{"type": "function", **each["function"]} for each in made["tools"]]
    if isinstance(made.get("tool_choice"), dict):
        made["tool_choice"] = {"type": "function", **made["tool_choice"]["function"]}
    return made


def hostile_fields(path):
    """Fields for a body that is sent to a path, each with a name: from empty ones to those beyond the limits."""
    if path == "/v1/responses":
        chats = hostile_fields("/v1/chat/completions").map(lambda made: (made[0], _of_responses(made[1])))
        return st.one_of(chats, chats, chats, _custom_tools())
    if path == "/detokenize":
        return _named("tokens", _lists(_NUMBERS | st.integers(0, 511), 4096))
    if path == "/tokenize":
        return _named("prompt", _TEXTS)
    if path.startswith("/v1/messages"):
        return _messages_fields()
    chat = "chat" in path
    kinds = [
        _grammars(chat=chat),
        _grammars(chat=chat),
        _named("bad_words", _lists(_SHORT, 1024)),
        _named("stop", _SHORT | _lists(_SHORT, 64)),
        _named("stop_token_ids", _lists(_NUMBERS | st.integers(0, 511), 1024)),
        _named("logit_bias", st.dictionaries(st.integers(0, 511).map(str) | _NUMBERS.map(str), _REALS, max_size=3)),
        _named("logit_bias", _SIZES.map(lambda size: {str(each): each / 100 - 2 for each in range(min(size, 4097))})),
        _numbers("n", "top_k", "min_tokens", "max_tokens", "seed", "prompt_logprobs"),
        st.one_of(
            [
                _named(name, _REALS)
                for name in (
                    "temperature",
                    "top_p",
                    "min_p",
                    "repetition_penalty",
                    "presence_penalty",
                    "frequency_penalty",
                )
            ]
        ),
        _named("prediction", _TEXTS.map(lambda text: {"type": "content", "content": text})),
        _named("user", _TEXTS),
        _named("model", _TEXTS),
        st.just(("stream", {"stream": True})),
    ]
    if chat:
        ignored = _SIZES.map(lambda size: [{}] * size * 10)
        kinds += [
            _named("messages", _TEXTS.map(lambda text: [{"role": "user", "content": text}])),
            _named(
                "messages",
                st.builds(
                    lambda name, value: [{"role": "user", "content": "x", name: value}],
                    st.sampled_from(("parsed", "provider_specific_fields")),
                    ignored,
                ),
            ),
            _numbers("max_completion_tokens", "top_logprobs"),
        ]
    else:
        ids = _lists(st.integers(0, 511) | _NUMBERS, 513)
        kinds += [
            _named("prompt", _TEXTS | ids | _lists(_SHORT, 1024) | _lists(ids, 80)),
            _numbers("logprobs"),
            st.just(("echo", {"echo": True, "logprobs": 1})),
        ]
    return st.builds(
        lambda first, more: (
            " + ".join(name for name, _ in (first, *more)),
            {key: value for _, made in (first, *more) for key, value in made.items()},
        ),
        st.one_of(kinds),
        st.lists(st.one_of(kinds), max_size=1) | st.just([]),
    )
