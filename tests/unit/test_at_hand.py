"""The worker at hand: what it says of itself, and what commands beside it make of that."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from forebay.about import About, signature_of
from forebay.cli.app import app
from forebay.cli.at_hand import worker_at_hand
from forebay.cli.check_machine import _port
from forebay.cli.findings import State
from forebay.errors import KafkaUnavailableError, UsageError
from forebay.health import Health, OpsServer, answer
from forebay.metrics import Metrics, SupervisorMetrics
from forebay.records import Signature, TensorShape
from forebay.settings import Ops
from forebay.supervision.combined import Combined

SIGNATURE = Signature(
    "m",
    "3",
    (TensorShape("x", "FP32", (-1, 4)),),
    (TensorShape("y", "FP32", (-1, 2)), TensorShape("n", "BYTES", (-1,))),
)


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FOREBAY_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def worker() -> Iterator[Ops]:
    """The HTTP port of a worker of the group `mine` that reads `in`, with one model."""
    health, metrics = Health(), Metrics()
    health.about = About("mine", ("in",), {"m": SIGNATURE})
    server = OpsServer(Ops(port=0), lambda path: answer(path, health, metrics.registry))
    port = int(server.start().rpartition(":")[2])
    try:
        yield Ops(port=port)
    finally:
        server.stop()


@pytest.fixture
def stranger() -> Iterator[Ops]:
    """Something else that speaks HTTP."""
    server = OpsServer(Ops(port=0), lambda _: (200, "text/html", b"<p>hello"))
    port = int(server.start().rpartition(":")[2])
    try:
        yield Ops(port=port)
    finally:
        server.stop()


def test_a_worker_tells_its_group_its_topics_and_its_models_as_the_protocol_names_them() -> None:
    health = Health()
    health.about = About("g", ("in", "more"), {"m": SIGNATURE})

    def ask(path: str) -> tuple[int, Any]:
        status, _, body = answer(path, health, Metrics().registry)
        return status, json.loads(body)

    status, server = ask("/v2")
    assert status == 200
    assert (server["name"], server["group_id"], server["input_topics"]) == ("forebay", "g", ["in", "more"])
    assert server["models"] == ["m"]
    for path in ("/v2/models/m", "/v2/models/m/versions/3"):
        status, model = ask(path)
        assert (status, model["name"], model["versions"]) == (200, "m", ["3"])
        assert model["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
        assert signature_of(model) == SIGNATURE
    assert ask("/v2/models/other")[0] == 404


def test_nothing_and_strangers_are_no_worker(worker: Ops, stranger: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    found = worker_at_hand(worker)
    assert found is not None
    assert (found.group_id, found.reads("in"), found.reads("out")) == ("mine", True, False)
    assert worker_at_hand(worker.model_copy(update={"host": "0.0.0.0"})) is not None
    assert worker_at_hand(stranger) is None
    assert worker_at_hand(Ops(port=0)) is None
    assert worker_at_hand(Ops(port=1)) is None


def test_a_port_that_a_worker_of_this_group_has_is_no_failure(worker: Ops, stranger: Ops) -> None:
    """A check beside its own running worker failed with 78, because the port was taken."""
    mine, other, strange = _port(worker, "mine"), _port(worker, "yours"), _port(stranger, "mine")
    assert (mine.state, "a worker of this group, mine, runs on" in mine.told) == (State.WARNING, True)
    assert (other.state, "another group, mine" in other.told) == (State.FAILED, True)
    assert (strange.state, "cannot be taken" in strange.told) == (State.FAILED, True)
    assert all("ops.port" in (one.fix or "") for one in (mine, other, strange))


def send(worker: Ops, tmp_path: Path, *arguments: str, topic: str = "in", stdin: str | None = None) -> str:
    """Run `forebay send` towards a Kafka that is not there; return what it said in the end."""
    config = tmp_path / "w.yaml"
    config.write_text(
        f"kafka: {{bootstrap_servers: '127.0.0.1:1', input_topics: [{topic}]}}\nops: {{port: {worker.port}}}"
    )
    command = ["send", "-c", str(config), *arguments]
    result = CliRunner().invoke(app, command, input=stdin, standalone_mode=False)
    assert isinstance(result.exception, UsageError | KafkaUnavailableError), result.output
    return str(result.exception)


def test_send_notices_a_wrong_name_before_anything_is_sent(worker: Ops, tmp_path: Path) -> None:
    """It sent them all; each became an error on the output topic, which nobody may look at."""
    np.save(tmp_path / "rows.npy", np.zeros((1, 4), np.float32))
    told = send(worker, tmp_path, str(tmp_path / "rows.npy"))
    assert "rows.npy: the worker at http://127.0.0.1:" in told
    assert "would answer invalid_tensor: the model has no input 'input'; it takes x (m takes x FP32[-1, 4])" in told
    assert told.endswith("; name it with --input x; --unchecked sends it all the same; nothing was sent")
    assert "does not answer" in send(worker, tmp_path, str(tmp_path / "rows.npy"), "--input", "x")


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ('{"x": [[1, 2, 3, 4]]}', "INT64"),
        ('{"x": [[1.0, 2.0]]}', "takes x FP32[-1, 4]"),
        ('{"x": [[1.0, 2.0, 3.0, 4.0]], "z": [1]}', "no input 'z'"),
        ('{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 5], "data": [1, 2, 3, 4, 5]}]}', "[-1, 4]"),
    ],
)
def test_send_notices_types_and_shapes_that_the_model_does_not_take(
    line: str, part: str, worker: Ops, tmp_path: Path
) -> None:
    (tmp_path / "r.jsonl").write_text('{"x": [[1.0, 2.0, 3.0, 4.0]]}\n' + line + "\n")
    told = send(worker, tmp_path, str(tmp_path / "r.jsonl"))
    assert "r.jsonl:2: the worker at" in told
    assert part in told


@pytest.mark.parametrize("options", [["--unchecked"], ["--raw"]])
def test_what_the_worker_would_refuse_can_be_sent_all_the_same(options: list[str], worker: Ops, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"wrong": [1]}\n')
    assert "does not answer" in send(worker, tmp_path, str(tmp_path / "r.jsonl"), *options)


def test_a_worker_of_other_topics_has_no_say(worker: Ops, stranger: Ops, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"wrong": [1]}\n')
    assert "does not answer" in send(worker, tmp_path, str(tmp_path / "r.jsonl"), topic="elsewhere")
    assert "does not answer" in send(stranger, tmp_path, str(tmp_path / "r.jsonl"))


def test_a_supervisor_tells_what_its_workers_tell(worker: Ops) -> None:
    class OfOneDevice:
        name, state, url = "fake:0", "running", f"http://127.0.0.1:{worker.port}"

    class Restarting:
        name, state, url = "fake:1", "restarting", None

    combined = Combined([OfOneDevice(), Restarting()], SupervisorMetrics().registry)  # type: ignore[list-item]
    for path, name in (("/v2", "forebay"), ("/v2/models/m", "m")):
        status, kind, body = combined(path)
        assert (status, kind, json.loads(body)["name"]) == (200, "application/json", name)
    assert combined("/v2/models/other")[0] == 404
    alone = Combined([Restarting()], SupervisorMetrics().registry)  # type: ignore[list-item]
    assert alone("/v2")[0] == 404
