"""Requests that schemathesis makes from /openapi.json: no status of 500 or more, and answers as they are described."""

import pytest
from pydantic import ValidationError

from draftproof.server import schemas
from draftproof.server.api import messages_request, responses_schemas
from support import hostile
from support.served_process import ServedProcess
from support.serving import running, small_engine, until

pytest.importorskip("schemathesis", reason="schemathesis is not installed")
from support import schema_checks

OPERATIONS = (
    "POST /v1/completions",
    "POST /v1/chat/completions",
    "POST /v1/messages",
    "POST /v1/messages/count_tokens",
    "POST /v1/responses",
    "GET /v1/models",
    "GET /v1/models/{name}",
    "POST /tokenize",
    "POST /detokenize",
    "GET /health",
    "GET /ready",
    "GET /version",
    "GET /metrics",
)


@pytest.fixture(scope="module")
def served():
    with running(small_engine()) as (base, server):
        yield schema_checks.operations(base), server


def test_all_operations_are_described(served):
    assert set(served[0]) == set(OPERATIONS)


@pytest.mark.grid(4)
@pytest.mark.parametrize("name", OPERATIONS)
def test_answers_are_as_described(served, name):
    operations, server = served
    sent = schema_checks.check(operations[name], 30)
    named = "{" in name  # a model's name in the path: hardly any that is made is that of a model
    if 200 not in sent and not named:  # requests depend on the modules that are loaded, and most have odd numbers
        sent += schema_checks.check(operations[name], 10, fields=schema_checks.st.just(("no more fields", {})))
    assert 200 in sent or named
    until(lambda: not server.worker._open)
    assert server.worker.ready


@pytest.fixture(scope="module")
def apart():
    """A server in a process of its own: a request may end it, and nothing else."""
    with ServedProcess(target="embedded:target", draft="embedded:draft") as server:
        yield server


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize", "/detokenize"],
)
def test_fields_of_every_size_end_nothing(apart, path):
    """Grammars, schemas, tools, numbers and lists, from empty ones to those beyond the limits; see the script."""
    operation = schema_checks.operations(apart.base)[f"POST {path}"]
    sent = schema_checks.check(operation, 40, fields=schema_checks.hostile_fields(path), seconds=300)
    assert set(sent) <= {200, 400, 404, 413, 429}
    assert apart.returncode is None


def test_a_mistake_is_noted_with_its_request(served):
    """What the script relies on: a fault does not end the search, and nothing is sent twice."""
    operation, noted = served[0]["POST /tokenize"], []
    broken = schema_checks.st.just(("nothing", {"prompt": "x"}))
    kept = schema_checks.CHECKS
    schema_checks.CHECKS = (*kept, wrong)
    try:
        sent = schema_checks.check(operation, 20, fields=broken, noted=lambda *facts: noted.append(facts))
    finally:
        schema_checks.CHECKS = kept
    assert len(noted) == len(sent)
    assert "POST /tokenize: nothing" in {name for name, *_ in noted}
    assert all("always wrong" in str(error.exceptions) for *_, error in noted)


def wrong(*_):
    raise AssertionError("always wrong")


@pytest.mark.parametrize("path", schema_checks.SHORTENED)
def test_streams_are_described(served, path):
    body = hostile.with_needed(path, {"stream": True})
    case = served[0][f"POST {path}"].Case(body=body, media_type="application/json")
    answer = case.call()
    assert answer.headers["content-type"][0].startswith("text/event-stream")
    case.validate_response(answer, checks=schema_checks.CHECKS, excluded_checks=[schema_checks.REFUSED])


BODIES = sorted(
    {
        kind
        for module in (schemas, messages_request, responses_schemas)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, schemas.Body)
    },
    key=lambda kind: kind.__name__,
)


@pytest.mark.grid(10)
@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_a_null_is_described_as_it_is_read(kind):
    """A field with the value null counts as not given: legal where the field may be left out, and nowhere else."""
    described = kind.model_json_schema()
    others = {"type": "null"} if kind.model_config["extra"] == "forbid" else True
    assert described.get("additionalProperties", True) == others
    for name, each in described["properties"].items():
        kinds = each.get("anyOf", [each])
        needed = name in described.get("required", ())
        assert ({"type": "null"} in kinds) is not needed, name
        assert ("default" in each) is not needed, name
        try:
            kind.model_validate({name: None})
        except ValidationError as error:
            wrong = {row["loc"][0] for row in error.errors() if row["loc"]}
            assert (name in wrong) is needed
        else:
            assert not needed
