"""The engine on Ray: workers, nodes, drivers and replicas are killed, and nothing is lost or comes twice.

Run it with `pytest -m slow tests/integrations/test_ray.py`, where Ray is installed (extra `ray`).
"""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

import draftproof
from draftproof import Engine, UserError
from draftproof.batch.answering import Answerer
from draftproof.batch.folder import AnswerFolder
from draftproof.batch.rows import RowOptions, columns
from draftproof.batch.run import answer_all, settings_of
from draftproof.batch.source import RowSource

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

from draftproof.integrations.ray import Generate, cluster_answers
from support.ray_processes import processes, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a busy machine starts processes slowly
SOURCES = str(Path(draftproof.__file__).parents[1])
MODEL = {"target": "embedded:target", "draft": "embedded:draft", "max_batch": 2}
SAMPLING = {"max_tokens": 24, "seed": 5}
NODE = {"num_cpus": 2, "object_store_memory": 80_000_000, "include_dashboard": False}


@pytest.fixture
def cluster(monkeypatch):
    """A head node without room for workers, and two nodes for one each."""
    monkeypatch.setenv("PYTHONPATH", SOURCES)
    monkeypatch.setenv("RAY_health_check_period_ms", "500")
    made = cluster_utils.Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0})
    made.nodes = [made.add_node(**NODE), made.add_node(**NODE)]
    yield made
    ray.shutdown()
    made.shutdown()


def some_rows(count):
    return [{"id": f"row {number}", "prompt": f"Once upon a time there were {number}"} for number in range(count)]


def source_of(folder, count):
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in some_rows(count)), encoding="utf-8")
    return RowSource(path)


def folder_of(source, out):
    options = RowOptions(sampling=SAMPLING)
    settings = settings_of(source, MODEL, options)
    return AnswerFolder(out, settings, form="jsonl", names=columns(options), integers=source.integers, rows_per_file=4)


def outputs(out):
    return [json.loads(line) for file in sorted(out.glob("part-*.jsonl")) for line in file.read_text().splitlines()]


def alone(source):
    """The answers of one process, by id."""
    found = Answerer(Engine.load(**MODEL), RowOptions(sampling=SAMPLING))(source.rows())
    return {result.id: result.rows[0]["token_ids"] for some in found for result in some}


# --- rows on a cluster ---------------------------------------------------------------------------------------------


def test_a_worker_and_a_node_are_killed(cluster, tmp_path):
    source = source_of(tmp_path, 40)
    options, out, steps = RowOptions(sampling=SAMPLING), tmp_path / "out", []
    on_cluster = cluster_answers(cluster.address, MODEL, options, workers=2, rows=40)

    def disturbed(rows):
        for results in on_cluster(rows):
            yield results
            if len(outputs(out)) >= 4 and not steps:
                steps.append("a worker's process is killed")
                os.kill(processes("ray::Worker")[0], signal.SIGKILL)
            elif len(outputs(out)) >= 16 and len(steps) == 1:
                steps.append("a node is lost, and none takes its place")
                cluster.remove_node(cluster.nodes[0], allow_graceful=False)

    summary = answer_all(source, folder_of(source, out), disturbed, run={})
    assert len(steps) == 2
    assert summary.answered == 40
    assert not ray.is_initialized()
    assert Counter(row["id"] for row in outputs(out)) == Counter(row.id for row in source.rows())
    assert {row["id"]: row["token_ids"] for row in outputs(out)} == alone(source)


def test_the_driver_is_killed(cluster, tmp_path):
    source, out = source_of(tmp_path, 40), tmp_path / "out"
    words = ["--in", source.path, "--out", out, "--target", "embedded:target", "--max-batch", 2, "--max-tokens", 24]
    words += ["--seed", 5, "--rows-per-file", 4, "--ray", cluster.address, "--json"]
    code = "import sys; sys.argv[0] = 'draftproof'; from draftproof.cli import main; main()"
    whole = [sys.executable, "-c", code, "batch", *map(str, words)]
    process = subprocess.Popen(whole, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: len(outputs(out)) >= 8)
    process.kill()
    process.wait()
    before = outputs(out)
    assert 8 <= len(before) < 40
    found = subprocess.run(whole, capture_output=True, text=True, check=True, timeout=200)
    assert json.loads(found.stdout)["before"] == len(before)
    assert outputs(out)[: len(before)] == before
    assert Counter(row["id"] for row in outputs(out)) == Counter(row.id for row in source.rows())
    assert {row["id"]: row["token_ids"] for row in outputs(out)} == alone(source)


def test_what_a_cluster_cannot_do_is_one_line(cluster, tmp_path):
    source = source_of(tmp_path, 3)
    options = RowOptions(sampling=SAMPLING)
    for model, message in (
        ({"target": "no/such-model"}, "a worker on the cluster failed: .*no/such-model"),
        ({"target": "embedded:target", "max_batch": 0}, "a worker on the cluster failed: .*max_batch: expected 1"),
    ):
        with pytest.raises(UserError, match=message):
            list(cluster_answers(cluster.address, model, options)(source.rows()))
    with pytest.raises(UserError, match="workers: expected 1 or more, got 0"):
        cluster_answers(cluster.address, MODEL, options, workers=0)
    with pytest.raises(UserError, match=r"cannot reach a Ray cluster at '127.0.0.1:1'"):
        list(cluster_answers("127.0.0.1:1", MODEL, options)(source.rows()))


def test_rows_that_kill_every_worker_end_the_run(cluster, tmp_path):
    source = source_of(tmp_path, 8)
    on_cluster = cluster_answers(cluster.address, MODEL, RowOptions(sampling=SAMPLING), workers=1, rows=8)
    ended = threading.Event()

    def kill():
        while not ended.wait(0.05):
            for each in processes("ray::Worker.answer"):
                os.kill(each, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(UserError, match="3 workers died while they answered"):
            list(on_cluster(source.rows()))
    finally:
        ended.set()
        killer.join()


# --- Ray Data -------------------------------------------------------------------------------------------------------


def test_map_batches_gives_each_row_its_answer(cluster, tmp_path):
    import pyarrow as pa

    rows = [{**row, "kept": number} for number, row in enumerate(some_rows(24))]
    ray.init(cluster.address, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    data = ray.data.from_arrow(pa.Table.from_pylist(rows)).repartition(6)
    killed = []

    def kill():
        until(lambda: len(processes("ray::MapWorker(MapBatches(Generate))")) == 2)
        until(lambda: processes("ray::MapWorker(MapBatches(Generate)).submit"))
        killed.append(processes("ray::MapWorker(MapBatches(Generate)).submit")[0])
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    made = data.map_batches(
        Generate,
        fn_constructor_args=("embedded:target", "embedded:draft"),
        fn_constructor_kwargs={"options": RowOptions(sampling=SAMPLING), "engine": {"max_batch": 2}},
        batch_size=4,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=2),
        num_cpus=1,  # the rest is for tasks that read and write
    )
    made.write_parquet(str(tmp_path / "out"))
    killer.join()
    found = ray.data.read_parquet(str(tmp_path / "out")).take_all()
    assert killed
    assert Counter(row["id"] for row in found) == Counter(row["id"] for row in rows)
    assert {row["id"]: row["kept"] for row in found} == {row["id"]: row["kept"] for row in rows}
    assert {row["id"]: list(row["token_ids"]) for row in found} == alone(source_of(tmp_path, 24))


def test_generate_takes_both_formats_of_batches():
    import numpy as np

    generate = Generate(
        "embedded:target", "embedded:draft", options=RowOptions(sampling=SAMPLING | {"n": 2}), keep=["kept"]
    )
    rows = some_rows(3)
    made = generate({
        "id": np.array([row["id"] for row in rows], dtype=object),
        "prompt": np.array([row["prompt"] for row in rows], dtype=object),
        "kept": np.arange(3),
    })  # fmt: skip
    assert [row["id"] for row in made.to_pylist()] == ["row 0", "row 0", "row 1", "row 1", "row 2", "row 2"]
    assert [(row["index"], row["kept"]) for row in made.to_pylist()] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    with pytest.raises(UserError, match="the rows have no column 'id'"):
        generate({"prompt": np.array(["a"], dtype=object)})
    with pytest.raises(UserError, match="missing or occur twice"):
        generate({"id": np.array(["a", "a"], dtype=object), "prompt": np.array(["a", "b"], dtype=object)})
