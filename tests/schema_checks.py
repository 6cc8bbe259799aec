"""Requests that schemathesis makes from /openapi.json, and what their answers must be; tests and a script use it."""

import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import checks
from schemathesis.generation import GenerationMode

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


def operations(base):
    """The operations of a server, by name."""
    schema = schemathesis.openapi.from_url(f"{base}/openapi.json")
    return {found.ok().label: found.ok() for found in schema.get_all_operations()}


def check(operation, examples, *, at_random=False):
    """Send requests, legal ones and others, and check their answers; returns the statuses.

    Legal ones keep a few of their optional fields: with all of them, most are refused for the ranges of numbers.
    """
    sent = []

    @settings(
        max_examples=examples,
        derandomize=not at_random,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data(), mode=st.sampled_from(list(GenerationMode)))
    def run(data, mode):
        case = data.draw(operation.as_strategy(generation_mode=mode))
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            needed = {"prompt", "messages", "tokens"} & set(case.body)
            kept = data.draw(st.sets(st.sampled_from(sorted(case.body)), max_size=2)) if case.body else set()
            case.body = {name: value for name, value in case.body.items() if name in needed | kept}
            if "messages" in needed and data.draw(st.booleans()):  # what a role needs is not in the schema
                case.body["messages"] = [{"role": "user", "content": "x"}]
            if operation.path.endswith("completions"):
                case.body["max_tokens"] = 2
        answer = case.call(timeout=120)
        sent.append(answer.status_code)
        excluded = [REFUSED] if answer.status_code == 413 else []  # schemathesis does not count it as a refusal
        case.validate_response(answer, checks=CHECKS, excluded_checks=excluded)

    run()
    return sent
