"""The audit of a running server: faults made on purpose are found, right servers pass, and what a user gets wrong."""

import asyncio
import json
import math
import re
import subprocess
import sys

import httpx
import pytest
import torch
from typer.testing import CliRunner

from draftproof import Engine, SamplingParams, UserError
from draftproof.audit.server import run as running_audit
from draftproof.audit.server.checks import NAMES, PROMPTS, SCHEMA, checks_for, violations
from draftproof.audit.server.client import Client, Refused, Reply, key_for
from draftproof.audit.server.evidence import Evidence, needed_tokens
from draftproof.audit.server.fault_models import FLOOR, kinds_of, looked_up, ratios, reference
from draftproof.audit.server.records import Records
from draftproof.audit.server.report import ServerReport
from draftproof.audit.server.run import CheckResult, ServerAudit, ServerAuditOptions
from draftproof.audit.server.scoring import Reference
from draftproof.audit.server.two_sample import PairEvidence, audit_pair, words
from draftproof.cli import app
from support.faulty_engines import FAULTS, faulty_engine
from support.serving import running

pytest.importorskip("fastapi", reason="the extra serve is not installed")
from draftproof.server.app import Server, make_app
from draftproof.server.settings import Settings

TARGET, DRAFT = "embedded:target", "embedded:draft"
SOON = {"numerics": "float32", "seeds": True, "parallel": 16, "budget": 3000}
FOUND = [
    name for name in FAULTS if name not in ("token residual in block verification", "penalty forgets drafted tokens")
]


@pytest.fixture(scope="module")
def engine():
    return Engine.load(
        TARGET, DRAFT, drafter="model", stopper="fixed:4", max_batch=32, dtype="float32", generation_config="none"
    )


@pytest.fixture(scope="module")
def known():
    return Reference.load(TARGET, DRAFT)


@pytest.fixture(scope="module")
def weights(known):
    return Reference(known.target, known.tokenizer, eos_token_ids=known.ends)


def audited(engine, right, checks, *, folder=None, **options):
    async def all_of_it():
        served = make_app(Server(engine, Settings(), "story"))
        async with served.router.lifespan_context(served):
            client = Client("http://server", transport=httpx.ASGITransport(served))
            audit = ServerAudit(
                client, right, ServerAuditOptions(checks=checks, **{**SOON, **options}), PROMPTS, folder=folder
            )
            return await audit.run()

    return asyncio.run(all_of_it())


# --- the test itself --------------------------------------------------------------------------------------------------


def drawn(rows, count, seed):
    return torch.multinomial(rows, count, replacement=True, generator=torch.Generator().manual_seed(seed))


P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
R = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)


def test_false_alarms_are_as_rare_as_stated_whenever_one_looks():
    """200 right sources, looked at after every token, alpha 0.1: 20 alarms are expected at most, 35 has p < 0.001."""
    alarms = 0
    for seed in range(200):
        evidence = Evidence(("fault",))
        for part in (R / P)[drawn(P, 400, seed)].split(20):
            evidence.add(part.unsqueeze(-1))
        alarms += evidence.found(0.1)
    assert alarms < 35


@pytest.mark.parametrize("share", [0.5, 0.2, 0.1])
def test_a_fault_is_found_in_about_the_tokens_that_are_stated(share):
    needed = needed_tokens(
        P.unsqueeze(0), (R / P).unsqueeze(0), R.unsqueeze(0), share=share, slack=0.0, alpha=0.01, bets=6
    )
    found = []
    for seed in range(20):
        evidence, steps = Evidence(("fault",)), 0
        for part in (R / P)[drawn((1 - share) * P + share * R, 20_000, seed)].split(50):
            evidence.add(part.unsqueeze(-1))
            steps += len(part)
            if evidence.found(0.01):
                break
        found.append(steps)
    assert needed / 3 < sum(found) / len(found) < 3 * needed + 50


def test_a_larger_share_is_excluded_under_a_right_source_and_not_under_the_fault():
    evidence = Evidence(("fault",), floor=FLOOR)
    evidence.add((R / P)[drawn(P, 2000, 0)].unsqueeze(-1))
    assert evidence.known(0.05)[0].share <= 0.1
    evidence = Evidence(("fault",), floor=FLOOR)
    evidence.add((R / P)[drawn(0.8 * P + 0.2 * R, 2000, 0)].unsqueeze(-1))
    assert evidence.known(0.05)[0].share in (0.9, 0.5)


def test_nothing_is_excluded_where_a_fault_changes_nothing():
    evidence = Evidence(("nothing",), floor=FLOOR)
    evidence.add(torch.full((100_000, 1), 1 - FLOOR))
    assert evidence.known(0.05)[0].share is None
    assert not evidence.found(0.5)


def test_slack_protects_a_source_within_it():
    near = torch.tensor([0.47, 0.3, 0.23], dtype=torch.float64)
    mean = float((near * R / P).sum()) - 1
    tokens = (R / P)[drawn(near, 20_000, 1)].unsqueeze(-1)
    strict, wide = Evidence(("fault",)), Evidence(("fault",), {"fault": 1.05 * mean})
    strict.add(tokens)
    wide.add(tokens)
    assert strict.found(0.01)
    assert not wide.found(0.01)


def test_the_mean_ratio_under_the_target_is_at_most_one(known):
    """In every context and for every kind, or the wealth would be no martingale."""
    for check in checks_for((290, 300, 310)).values():
        params = check.params(32)
        if params.temperature == 0 or check.form:
            continue
        prompt = known.encode(PROMPTS[0])
        (answer,) = known.read(params, [prompt[:12]], [prompt[12:]])
        p, mixed = reference(answer)
        for name, make in kinds_of(params, drafted=True).items():
            other = make(answer, p)
            assert torch.allclose(other.sum(-1), torch.ones(len(other), dtype=other.dtype), atol=1e-4), name
            assert (other >= 0).all(), name
            assert float((p * (1 - FLOOR) * other / mixed).sum(-1).max()) <= 1 + 1e-4, name


def test_ratios_are_those_of_the_sampled_tokens(weights):
    prompt = weights.encode(PROMPTS[2])
    (answer,) = weights.read(SamplingParams(temperature=0.7), [prompt[:10]], [prompt[10:]])
    kinds = kinds_of(answer.transforms.params, drafted=False)
    found = ratios(answer, kinds)
    p = answer.logits.float().div(0.7).softmax(-1)
    at = torch.tensor(prompt[10:]).unsqueeze(-1)
    right = answer.logits.float().softmax(-1).gather(-1, at) / p.gather(-1, at)
    own = found[:, list(kinds).index("temperature skipped")]
    assert torch.allclose(own, right.squeeze(-1), rtol=0.3)


def test_lookup_takes_the_latest_of_the_longest_matches():
    assert looked_up([1, 2, 3, 9, 1, 2, 4, 1, 2]) == 4
    assert looked_up([1, 2, 3]) is None


# --- servers ----------------------------------------------------------------------------------------------------------


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", FOUND)
def test_a_faulty_server_is_found(name, engine, weights):
    check = FAULTS[name][2]
    (finding,) = audited(faulty_engine(name, engine), weights, (check,), budget=6000)
    assert finding.verdict == "FAIL", finding.why
    assert finding.examples


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAULTS if name not in FOUND])
def test_a_subtle_fault_is_found_with_more_tokens(name, known):
    right = Engine.load(
        TARGET,
        "embedded:fast-draft",
        drafter="model",
        stopper="fixed:8",
        max_batch=64,
        dtype="float32",
        generation_config="none",
    )
    reference = Reference.load(TARGET, "embedded:fast-draft")
    (finding,) = audited(
        faulty_engine(name, right), reference, (FAULTS[name][2],), budget=80_000, parallel=64, alpha=0.05
    )
    assert finding.verdict == "FAIL", finding.why


def test_our_own_server_passes(engine, weights):
    findings = audited(
        engine, weights, ("plain", "greedy", "top_p", "repetition", "min_tokens", "stop", "json_schema"), budget=800
    )
    assert {finding.verdict for finding in findings} <= {"ok", "open"}, [f.why for f in findings]
    assert next(f for f in findings if f.check.name == "greedy").verdict == "ok"


@pytest.mark.parametrize(("ahead", "ends"), [(False, True), (True, False)])
def test_an_audit_goes_on_while_its_bets_are_ahead(weights, ahead, ends):
    """Kinds that the budget is enough for are excluded; one that was judged too subtle may still win."""
    audit = ServerAudit(Client("http://nowhere"), weights, ServerAuditOptions(checks=("plain",), budget=3000), ["Once"])
    finding = CheckResult(audit.checks["plain"], needed={"enough": 100.0, "subtle": 9000.0})
    evidence = Evidence(("enough", "subtle"))
    subtle = 1.12 if ahead else 0.9
    for _ in range(400):
        evidence.add(torch.tensor([[0.5, subtle]]))
    assert (evidence.log_e_value > 0) is ahead
    assert not evidence.found(1e-30)
    assert audit._decided(finding, evidence, 1e-30) is ends


def test_an_interrupted_audit_goes_on(engine, weights, tmp_path):
    first = audited(engine, weights, ("plain",), budget=500, folder=tmp_path)
    path = tmp_path / "answers.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:5]) + "\n" + lines[5][:20])  # cut off in the middle of a line
    again = audited(engine, weights, ("plain",), budget=500, folder=tmp_path)
    assert again[0].evidence == first[0].evidence
    assert path.read_text().splitlines()[:5] == lines[:5]
    with pytest.raises(UserError, match="other settings"):
        audited(engine, weights, ("plain",), budget=500, folder=tmp_path, max_tokens=32)


def test_another_model_is_named(engine, weights, monkeypatch):
    monkeypatch.setattr(weights.target.__class__, "vocab_size", property(lambda _: 100), raising=False)
    with pytest.raises(UserError, match=r"sampled token \d+, and the target has 100|outside the vocabulary|0 <= id"):
        audited(engine, weights, ("plain",), budget=100)


def test_two_servers(engine):
    async def both(one, two):
        apps = [make_app(Server(each, Settings(), "story")) for each in (one, two)]
        async with apps[0].router.lifespan_context(apps[0]), apps[1].router.lifespan_context(apps[1]):
            clients = [Client("http://server", transport=httpx.ASGITransport(each)) for each in apps]
            options = ServerAuditOptions(checks=("plain",), seeds=True, parallel=16, budget=1500, numerics=0.01)
            return (await audit_pair(*clients, options, PROMPTS, words))[1][0]

    plain = Engine.load(TARGET, drafter="none", max_batch=32, dtype="float32", generation_config="none")
    assert asyncio.run(both(engine, plain)).verdict == "open"


def test_two_servers_that_differ_are_found():
    evidence = PairEvidence(0.01, 30)
    answers = [drawn(rows, 6000, seed).view(200, 30).tolist() for seed, rows in enumerate((P, R))]
    for first, second in zip(*answers, strict=True):
        evidence.add(first, second)
    assert evidence.p_value < 1e-6


def test_two_servers_false_alarms():
    """100 right pairs of sources at level 0.1: 10 alarms are expected at most, 24 has p < 0.001."""
    alarms = 0
    for seed in range(100):
        evidence = PairEvidence(0.0, 30)
        tokens = drawn(P, 60 * 60, seed).view(60, 2, 30).tolist()
        for first, second in tokens:
            evidence.add(first, second)
        alarms += evidence.p_value <= 0.1
    assert alarms < 24


# --- answers that break a rule whatever was drawn ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "what"),
    [
        ("plain", {"tokens": [5] * 33}, "max_tokens is 32"),
        ("plain", {"finish": "length", "tokens": [5, 6]}, "length"),
        ("plain", {"tokens": [5, 2, 6], "finish": "stop"}, "goes on after"),
        ("min_tokens", {"tokens": [5, 7]}, "before min_tokens"),
        ("stop", {"text": "go to the sea"}, "holds the stop string"),
        ("stop", {"decoded": "a. b", "text": "a"}, "did not end"),
        ("regex", {"text": "Ab1", "finish": "stop"}, "does not match"),
        ("json_schema", {"text": "{", "finish": "stop"}, "is not JSON"),
        ("json_schema", {"text": '{"answer": "so"}', "finish": "stop"}, "does not fit"),
    ],
)
def test_broken_answers(name, change, what):
    right = {"text": "a", "tokens": [5] * 8, "finish": None, "max_tokens": 32, "ends": (2,), "decoded": "a"}
    check = checks_for((7, 8, 9))[name]
    assert not violations(check, **right)
    assert re.search(what, " ".join(violations(check, **{**right, **change})))


def test_the_schema_is_one():
    fits = violations(
        checks_for((1, 2, 3))["json_schema"],
        text=json.dumps({"answer": "yes", "sure": True}),
        tokens=[5],
        finish="stop",
        max_tokens=8,
        ends=(),
        decoded="",
    )
    assert not fits
    assert SCHEMA["required"] == ["answer", "sure"]


# --- the client -------------------------------------------------------------------------------------------------------


def client_of(handler, **options):
    return Client("http://server/v1/", transport=httpx.MockTransport(handler), **options)


def answered(**choice):
    return httpx.Response(200, json={"choices": [{"text": "a", "finish_reason": "length", **choice}], "usage": {}})


def test_a_busy_server_is_asked_again(monkeypatch):
    waits, calls = [], []

    async def slept(seconds):
        waits.append(seconds)

    monkeypatch.setattr("draftproof.audit.server.client.asyncio.sleep", slept)

    def handler(request):
        calls.append(request)
        if len(calls) == 1:
            return httpx.Response(429, headers={"Retry-After": "3"}, json={"error": {"message": "later"}})
        if len(calls) == 2:
            raise httpx.ConnectTimeout("slow")
        return answered(token_ids=[1, 2])

    reply = asyncio.run(client_of(handler, model="m").complete([1], "a", {}))
    assert reply.tokens == (1, 2)
    assert waits[0] == 3
    assert len(calls) == 3


def test_a_server_that_stays_away(monkeypatch):
    async def slept(_):
        return None

    monkeypatch.setattr("draftproof.audit.server.client.asyncio.sleep", slept)
    client = client_of(lambda _: httpx.Response(503, text="no"), model="m", retries=2)
    with pytest.raises(UserError, match="failed 3 times, last: status 503: no"):
        asyncio.run(client.complete([1], "a", {}))


@pytest.mark.parametrize(
    ("status", "error", "text"),
    [(401, UserError, "refuses the key"), (404, UserError, "check the URL"), (400, Refused, "not supported")],
)
def test_refusals(status, error, text):
    client = client_of(lambda _: httpx.Response(status, json={"error": {"message": "not supported"}}), model="m")
    with pytest.raises(error, match=text):
        asyncio.run(client.complete([1], "a", {}))


def test_keys_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("DRAFTPROOF_AUDIT_KEY", "secret")
    seen = []

    def handler(request):
        seen.append(request.headers.get("Authorization"))
        return answered()

    asyncio.run(client_of(handler, model="m").complete([1], "a", {}))
    assert seen == ["Bearer secret"]


@pytest.mark.parametrize(
    ("url", "sent"),
    [
        ("https://api.openai.com", True),
        ("https://api.openai.com/v1", True),
        ("https://API.openai.com", True),
        ("http://api.openai.com", False),
        ("https://api.openai.com:8443", False),
        ("https://api.openai.com.example.org", False),
        ("https://api.openai.com@example.org", False),
        ("https://example.org/api.openai.com", False),
        ("http://127.0.0.1:8000", False),
        ("http://[", False),
    ],
)
def test_a_key_of_openai_goes_to_openai_only(url, sent, monkeypatch):
    monkeypatch.delenv("DRAFTPROOF_AUDIT_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "a key of OpenAI")
    assert key_for(url) == ("a key of OpenAI" if sent else None)
    monkeypatch.setenv("DRAFTPROOF_AUDIT_KEY", "a key for audits")
    assert key_for(url) == "a key for audits"
    assert key_for(url, "DRAFTPROOF_REFERENCE_KEY") == ("a key of OpenAI" if sent else None)


def test_no_key_is_sent_to_a_stranger(monkeypatch):
    monkeypatch.delenv("DRAFTPROOF_AUDIT_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "a key of OpenAI")
    seen = []

    def handler(request):
        seen.append(request.headers.get("Authorization"))
        return httpx.Response(401) if len(seen) == 2 else answered()

    client = client_of(handler, model="m")
    asyncio.run(client.complete([1], "a", {}))
    message = r"set DRAFTPROOF_AUDIT_KEY.*OPENAI_API_KEY is sent to https://api\.openai\.com only"
    with pytest.raises(UserError, match=message):
        asyncio.run(client.complete([1], "a", {}))
    assert seen == [None, None]
    asyncio.run(client_of(handler, model="m", key="given").complete([1], "a", {}))
    assert seen[2] == "Bearer given"
    with pytest.raises(UserError, match="printable ASCII characters"):
        client_of(handler, key="with\na line end")


def test_the_options_for_keys_are_for_one_server_each(monkeypatch):
    made = []

    def client(url, **options):
        made.append((url, options["key"], options.get("key_name")))
        if len(made) == 2:
            raise ZeroDivisionError
        return url

    monkeypatch.setattr("draftproof.cli._audit_server.Client", client)
    words = ["audit", "server", "http://a", "--api-key", "one"]
    words += ["--reference-url", "http://b", "--reference-api-key", "two"]
    assert "ZeroDivisionError" in CliRunner().invoke(app, words).stderr
    assert made == [("http://a", "one", None), ("http://b", "two", "DRAFTPROOF_REFERENCE_KEY")]


def test_an_answer_without_end_is_given_up():
    sent = []

    async def without_end():
        while True:
            sent.append(1 << 20)
            yield b"x" * (1 << 20)

    client = client_of(lambda _: httpx.Response(200, content=without_end()), model="m")
    with pytest.raises(UserError, match="answers with more than 32 MiB"):
        asyncio.run(client.complete([1], "a", {}))
    assert sum(sent) < 40 << 20


def test_an_answer_that_drips_is_given_up():
    async def drips():
        while True:
            await asyncio.sleep(0.05)
            yield b" "

    client = client_of(lambda _: httpx.Response(200, content=drips()), model="m", timeout=0.5, retries=0)
    with pytest.raises(UserError, match="it did not answer in time"):
        asyncio.run(asyncio.wait_for(client.complete([1], "a", {}), 20))


HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202egone"


@pytest.mark.parametrize("status", [400, 404, 500])
@pytest.mark.parametrize("form", ["json", "text"])
def test_words_of_the_server_do_not_control_the_terminal(status, form):
    body = json.dumps({"error": {"message": HOSTILE}}) if form == "json" else HOSTILE
    client = client_of(lambda _: httpx.Response(status, text=body), model="m", retries=0)
    with pytest.raises((UserError, Refused)) as found:
        asyncio.run(client.complete([1], "a", {}))
    assert str(found.value).isprintable()
    assert r"\x1b" in str(found.value)


def test_what_the_server_says_of_itself_does_not_control_the_terminal():
    def handler(request):
        if request.url.path == "/version":
            return httpx.Response(200, json={"version": HOSTILE})
        if request.method == "GET":
            return httpx.Response(200, json={"data": ["no card", {"id": "m", "owned_by": HOSTILE}]})
        return answered(token_ids=[1])

    facts = asyncio.run(client_of(handler).start([1], "a"))
    assert all(str(value).isprintable() for value in facts.values())
    named = client_of(lambda _: httpx.Response(200, json={"data": [{"id": HOSTILE}]}))
    with pytest.raises(UserError, match="which is no name: give one with --model"):
        asyncio.run(named.start([1], "a"))
    finding = CheckResult(checks_for((1, 2, 3))["plain"], verdict="FAIL", why=HOSTILE, broken=[HOSTILE] * 2)
    finding.evidence = {"p_value": 1e-9, "kinds": []}
    report = ServerReport({"model": HOSTILE, "url": "u"}, "weights", ServerAuditOptions(), ["a"], [finding])
    assert all(cell.isprintable() for row in report.rows() for cell in row)
    assert all(line.isprintable() for line in report.markdown().split("\n"))


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff", b"3"])
def test_an_answer_that_is_no_object_is_one_error(content):
    client = client_of(lambda _: httpx.Response(200, content=content), model="m")
    with pytest.raises(UserError, match="answered something that is no JSON object"):
        asyncio.run(client.complete([1], "a", {}))


def test_answers_are_not_written_through_a_link(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "answers.jsonl").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="is a link"):
        Records(tmp_path / "out", {"a": 1})
    assert (tmp_path / "precious").read_text() == "precious"


def test_the_client_finds_out_how_tokens_are_returned():
    def handler(request):
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "m", "owned_by": "they"}]})
        body = json.loads(request.content)
        if "return_token_ids" in body or not isinstance(body["prompt"], str):
            return httpx.Response(400, json={"error": {"message": "unknown field"}})
        return answered(logprobs={"tokens": ["token_id:7"]} if "logprobs" in body else None)

    client = client_of(handler)
    facts = asyncio.run(client.start([1], "a"))
    assert facts["model"] == "m"
    assert client.returns_tokens
    assert not client.prompts_as_ids
    assert asyncio.run(client.complete([1], "a", {})).tokens == (7,)


def test_without_token_ids_there_is_no_verdict(engine, weights, monkeypatch):
    monkeypatch.setattr("draftproof.audit.server.client._tokens", lambda _: None)
    (finding,) = audited(engine, weights, ("plain",), budget=300)
    assert finding.verdict == "open"
    assert "--reference-url" in finding.why


# --- options, report, command -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"alpha": 1.0}, {"share": 0.001}, {"budget": 0}, {"numerics": "float8"}, {"checks": ("other",)}, {"parallel": -1}],
)
def test_wrong_options(options):
    with pytest.raises(UserError, match="expected"):
        ServerAuditOptions(**options)


def test_a_prompt_that_does_not_fit(engine, weights):
    with pytest.raises(UserError, match="do not fit"):
        audited(engine, weights, ("plain",), max_tokens=500)


def test_the_page_for_maintainers():
    finding = CheckResult(checks_for((1, 2, 3))["plain"], verdict="FAIL", why="it is", examples=[{"prompt": [1]}])
    finding.evidence = {"p_value": 1e-9, "kinds": [{"kind": "too hot", "e_value": 1e9, "excluded_share": None}]}
    finding.slack, finding.needed = {"too hot": 0.1}, {"too hot": None}
    report = ServerReport({"url": "http://x", "model": "m"}, "weights", ServerAuditOptions(), ["a"], [finding])
    page = report.markdown()
    assert "**FAIL: plain." in page
    assert '{"prompt": [1]}' in page
    assert report.to_dict()["verdict"] == "FAIL"
    assert running_audit.worst([]) == "open"


def test_the_command(engine, tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    runner = CliRunner()
    with running(engine, max_waiting=64) as (base, _):
        wanted = ["audit", "server", base, "--target", TARGET, "--numerics", "float32", "--check", "plain", "--seeds"]
        right = runner.invoke(app, [*wanted, "--budget", "400", "--out", str(tmp_path / "audit"), "--json"])
    assert right.exit_code == 0, right.output
    last = json.loads(right.stdout.splitlines()[-1])
    assert last["checks"]["plain"] in ("ok", "open")
    assert (tmp_path / "audit" / "report.md").read_text().startswith("# Audit of story at")
    assert json.loads((tmp_path / "audit" / "report.json").read_text())["findings"]


def test_mistakes_on_the_command_line():
    runner = CliRunner()
    for arguments, text in (
        (["http://x"], "expected --target"),
        (["http://x", "--target", "a", "--reference-url", "http://y"], "expected --target"),
        (["x", "--target", TARGET], "expected an address"),
        (["http://x", "--target", TARGET, "--check", "nothing"], "check: expected one of plain"),
    ):
        made = runner.invoke(app, ["audit", "server", *arguments])
        assert made.exit_code != 0
        assert text in str(made.exception) + made.output


def test_every_check_has_parameters_of_ours():
    assert {check.name for check in checks_for((1, 2, 3)).values()} == set(NAMES)
    assert all(math.isfinite(check.params(32).temperature) for check in checks_for((1, 2, 3)).values())
    assert Reply.of(Reply("a", None, None, (1,), 1).to_dict()).tokens == (1,)


def test_only_audits_of_servers_need_httpx():
    """Which is of the extra audit, and which nothing else brings along."""
    script = """
import sys
sys.modules["httpx"] = None
from typer.testing import CliRunner
from draftproof.cli import app
assert CliRunner().invoke(app, ["audit", "rules", "--help"]).exit_code == 0
found = CliRunner().invoke(app, ["audit", "server", "http://127.0.0.1:9", "--target", "embedded:target"])
print(found.output)
"""
    made = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "needs httpx: pip install 'draftproof[audit]'" in made.stdout, made.stdout + made.stderr
