"""The server on Ray Serve: replicas are killed and exchanged under load, and no request fails.

Run it with `pytest -m slow tests/integrations/test_ray_serve.py`, where Ray is installed (extra `ray`).
"""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

import draftproof
from draftproof import Engine, SamplingParams, UserError
from draftproof.server.settings import Settings

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")

from draftproof.integrations.ray import deployment
from support.ray_processes import processes, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a busy machine starts processes slowly
SMALL = ("embedded:target", "embedded:draft")
REPLICA = "ray::ServeReplica:default:Replica"


def small(**options):
    return deployment(*SMALL, engine={"max_batch": 2}, cpus=0.5, **{"replicas": 2, **options})


def replicas():
    found = serve.status().applications["default"].deployments["Replica"]
    return found.replica_states.get("RUNNING", 0), found.status


@pytest.fixture(scope="module")
def base():
    """A local cluster with Ray Serve; its address."""
    os.environ["PYTHONPATH"] = str(Path(draftproof.__file__).parents[1])
    ray.init("local", num_cpus=4, object_store_memory=80_000_000, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": 8123})
    yield "http://127.0.0.1:8123"
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def expected():
    """The text of the engine for a seed."""
    engine = Engine.load(*SMALL)
    return lambda seed, prompt="Once upon a time": (
        engine.generate(prompt, SamplingParams(max_tokens=48, ignore_eos=True, seed=seed))[0].text
    )


def ask(base, seed, prompt="Once upon a time", **more):
    body = {"prompt": prompt, "max_tokens": 48, "ignore_eos": True, "seed": seed, **more}
    return httpx.post(f"{base}/v1/completions", json=body, timeout=60)


class Load:
    """Requests one after another from several clients, as long as the block runs and then some."""

    def __init__(self, base, clients=6):
        self._base, self._ended, self.answers = base, threading.Event(), {}
        self._pool = ThreadPoolExecutor(clients)
        self._clients = clients

    def _client(self, number):
        seed = number
        while not self._ended.is_set():
            self.answers[seed] = ask(self._base, seed)
            seed += self._clients

    def __enter__(self):
        self._futures = [self._pool.submit(self._client, number) for number in range(self._clients)]
        until(lambda: len(self.answers) >= self._clients)
        return self

    def __exit__(self, *_):
        most = len(self.answers) + 2 * self._clients
        until(lambda: len(self.answers) >= most)
        self._ended.set()
        for future in self._futures:
            future.result(timeout=60)
        self._pool.shutdown()


def assert_all_answered(answers, expected):
    failed = {seed: (answer.status_code, answer.text) for seed, answer in answers.items() if answer.status_code != 200}
    assert not failed
    wrong = [seed for seed, answer in answers.items() if answer.json()["choices"][0]["text"] != expected(seed)]
    assert not wrong


def test_a_replica_is_killed_under_load(base, expected):
    serve.run(small())
    assert ask(base, 1).json()["choices"][0]["text"] == expected(1)
    with Load(base) as load:
        first = processes(REPLICA)
        assert len(first) == 2
        os.kill(first[0], signal.SIGKILL)
        until(lambda: len(processes(REPLICA)) == 2 and first[0] not in processes(REPLICA) and replicas()[0] == 2)
    assert_all_answered(load.answers, expected)
    assert {answer.headers["x-replica"] for answer in load.answers.values()} >= {ask(base, 1).headers["x-replica"]}
    assert len({answer.headers["x-replica"] for answer in load.answers.values()}) >= 2


class Handle:
    """In the place of a handle of replicas: each request ends its replica, until some have ended."""

    def __init__(self, ends):
        self.ends, self.asked = ends, []
        self.answer = self

    def options(self, **_):
        return self

    def remote(self, asked):
        self.asked.append(asked)
        return self._answered(len(self.asked) <= self.ends)

    async def _answered(self, ends):
        if ends:
            raise ray.exceptions.ActorDiedError
        yield {"type": "http.response.start", "status": 200, "headers": []}
        yield {"type": "http.response.body", "body": b"fine"}


@pytest.mark.parametrize(
    ("ends", "more", "status", "asked"),
    [(0, {}, 200, 1), (1, {}, 200, 2), (9, {}, 503, 2), (1, {"structured_outputs": {"regex": "a"}}, 503, 1)],
)
def test_a_request_that_ends_replicas_is_not_passed_round(ends, more, status, asked):
    import asyncio

    from draftproof.integrations.ray.service import Front
    from draftproof.server.auth import ApiKeys

    async def post(key):
        app = Front(handle, Settings(), ApiKeys(["a-key-of-some-length"]), 8).__serve_build_asgi_app__()
        headers = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.post("/v1/completions", json={"prompt": "a", **more}, headers=headers)

    handle = Handle(ends)
    assert asyncio.run(post("another-key-of-some-length")).status_code == 401
    assert handle.asked == []
    assert asyncio.run(post("a-key-of-some-length")).status_code == status
    assert len(handle.asked) == asked


def test_a_record_of_prefixes_that_names_strangers_loses_no_request():
    import asyncio

    from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter

    from draftproof.integrations.ray.router import PrefixRouter

    async def stranger(*_):
        raise KeyError("a replica of another router")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrefixCacheAffinityRouter, "_prefix_match_best_replicas", stranger)
        router = object.__new__(PrefixRouter)
        assert asyncio.run(router._prefix_match_best_replicas(None, [])) == [[]]


def test_a_rolling_restart_fails_no_request(base, expected):
    serve.run(small())
    with Load(base) as load:
        before = set(processes(REPLICA))
        serve.run(small(settings=Settings(max_waiting=65)))
        until(lambda: replicas() == (2, "HEALTHY") and not before & set(processes(REPLICA)))
    assert_all_answered(load.answers, expected)
    assert len({answer.headers["x-replica"] for answer in load.answers.values()}) >= 3


def test_prompts_that_begin_alike_go_to_the_same_replica(base):
    serve.run(small(settings=Settings(max_waiting=66)))
    openings = [f"{word} " * 60 for word in ("dog", "bird", "girl", "tree")]
    places = [{ask(base, 1, opening + str(number)).headers["x-replica"] for number in range(5)} for opening in openings]
    assert all(len(each) == 1 for each in places)
    assert len(set.union(*places)) == 2


def test_what_the_server_does_is_the_same_here(base, expected):
    key = "a key of some length"
    serve.run(small(keys=[key.replace(" ", "-")], settings=Settings(served_model_name="story", max_body=4000)))
    allowed = {"Authorization": f"Bearer {key.replace(' ', '-')}"}
    assert ask(base, 1).status_code == 401
    assert httpx.get(f"{base}/ready").status_code == 200
    with httpx.Client(base_url=base, headers=allowed, timeout=60) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == "story"
        assert client.post("/v1/completions", json={"prompt": "x" * 5000}).status_code == 413
        assert client.post("/v1/completions", json={"prompt": "x", "foo": 1}).json()["error"]["param"] == "foo"
        assert client.post("/v1/completions", content=b"{").status_code in (400, 422)
        body = {"prompt": "Once upon a time", "max_tokens": 48, "ignore_eos": True, "seed": 4, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: {")]
        import json

        assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == expected(4)
        # a client that leaves frees its place
        with client.stream("POST", "/v1/completions", json={**body, "max_tokens": 400}) as stream:
            next(stream.iter_lines())
        start = time.monotonic()
        assert client.post("/v1/completions", json={**body, "stream": False}).status_code == 200
        assert time.monotonic() - start < 30


@pytest.mark.parametrize("percent", [0, 1])
def test_with_a_surge_the_new_replica_comes_before_the_old_one_goes(base, expected, percent):
    serve.run(small(replicas=1, settings=Settings(max_waiting=67 + percent)))
    until(lambda: replicas() == (1, "HEALTHY"))  # those of the tests before have ended
    serving = []
    with Load(base) as load, ThreadPoolExecutor(1) as pool:
        before = set(processes(REPLICA))
        changed = small(replicas=1, settings=Settings(max_waiting=70), max_surge_percent=percent)
        restart = pool.submit(serve.run, changed)
        until(lambda: serving.append(replicas()[0]) or restart.done())
        restart.result()
        assert not before & set(processes(REPLICA))
    assert_all_answered(load.answers, expected)
    assert min(serving) == percent


def test_the_metrics_are_those_of_every_replica(base):
    from prometheus_client.parser import text_string_to_metric_families

    key = "a-key-of-some-length"
    serve.run(small(keys=[key], settings=Settings(max_waiting=71)))
    until(lambda: replicas() == (2, "HEALTHY"))
    assert httpx.get(f"{base}/metrics").status_code == 401
    with httpx.Client(base_url=base, headers={"Authorization": f"Bearer {key}"}, timeout=60) as client:
        made = {}
        for number in range(40):
            body = {"prompt": f"{number} dogs", "max_tokens": 5, "ignore_eos": True}
            answer = client.post("/v1/completions", json=body)
            made[answer.headers["x-replica"]] = made.get(answer.headers["x-replica"], 0) + 5
            if len(made) == 2:
                break
        page = client.get("/metrics")
    assert len(made) == 2
    assert page.headers["content-type"].startswith("text/plain")
    families = list(text_string_to_metric_families(page.text))
    assert len({family.name for family in families}) == len(families)
    (tokens,) = [family for family in families if family.name == "draftproof:generation_tokens"]
    found = {each.labels["replica"]: each.value for each in tokens.samples if each.name.endswith("_total")}
    assert found == made
    running = next(family for family in families if family.name == "draftproof:num_requests_running")
    assert {each.labels["replica"] for each in running.samples} == set(made)


def test_replicas_come_with_running_requests(base, expected):
    serve.delete("default")  # else it begins with the two replicas of the test before
    serve.run(small(replicas=1, max_replicas=2))
    assert replicas()[0] == 1
    with Load(base, clients=8) as load:
        until(lambda: replicas()[0] == 2, seconds=300)
    assert_all_answered(load.answers, expected)


def test_numbers_of_replicas_are_checked():
    with pytest.raises(UserError, match="got replicas=0"):
        small(replicas=0)
    with pytest.raises(UserError, match="max_replicas 1"):
        small(replicas=2, max_replicas=1)
