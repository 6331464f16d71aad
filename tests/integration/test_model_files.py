"""Models from files through `forebay run` on real Kafka: every form that the contract names, and a wrong one."""

from __future__ import annotations

import hashlib
import json
import signal
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_model
from torch import nn

from forebay import Model, TensorSpec
from tests.integration.job import Job, ask, ask_rows, check_answers, check_once, error_code
from tests.integration.test_compilation import needs_a_compiler
from tests.kafka_probe import KafkaProbe, Read, Send, eventually

FORMS = ("exported", "package", "script", "weights")
DECLARED = {
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}],
}
REQUESTS = 24


class Affine(Model):
    """A linear layer with weights of chance: what a file holds makes it twice the row plus one."""

    inputs = (TensorSpec("x", "FP32", [-1, 4]),)
    outputs = (TensorSpec("y", "FP32", [-1, 4]),)

    def load(self, device: torch.device) -> None:
        self.net = nn.Linear(4, 4).to(device)

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)


class Totals(Model):
    """The sum of a row's numbers, times `scale`: a ragged model whose weights an option changes."""

    inputs = (TensorSpec("ids", "INT64", [-1, -1], pad=0),)
    outputs = (TensorSpec("total", "FP32", [-1]),)

    def __init__(self, scale: int = 1) -> None:
        self.scale = scale

    def load(self, device: torch.device) -> None:
        self.table = nn.Embedding(100, 1, padding_idx=0).to(device)
        with torch.no_grad():
            self.table.weight.copy_(self.scale * torch.arange(100).unsqueeze(1))

    def forward(self, ids: torch.Tensor) -> Any:
        return self.table(ids).sum((1, 2))

    def example(self) -> Mapping[str, Any]:
        return {"ids": [[5, 7, 11]]}


def twice_plus_one() -> nn.Linear:
    """A layer that makes twice the row plus one, exactly."""
    net = nn.Linear(4, 4).eval().requires_grad_(False)
    net.weight.copy_(2 * torch.eye(4))
    net.bias.fill_(1)
    return net


def write(form: str, folder: Path) -> dict[str, Any]:
    """Write the layer in one form; return the model's section of the settings."""
    net, example = twice_plus_one(), torch.rand(3, 4)
    if form == "weights":
        save_model(net, str(folder / "net.safetensors"))
        factory = "tests.integration.test_model_files:Affine"
        return {"name": form, "factory": factory, "weights": str(folder / "net.safetensors")}
    path = folder / f"{form}.{'pt' if form == 'script' else 'pt2'}"
    if form == "script":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated
            torch.jit.save(torch.jit.trace(net, example), str(path))
        return {"name": form, "path": str(path), "options": DECLARED}
    program = torch.export.export(net, (example,), dynamic_shapes={"input": {0: torch.export.Dim("rows", min=1)}})
    if form == "package":
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
        return {"name": form, "path": str(path), "options": DECLARED}
    torch.export.save(program, path)
    return {"name": form, "path": str(path), "options": {"outputs": ["y"]}}


def to(form: str, number: int, count: int) -> Send:
    """Ask one of the models; an exported one calls its input what the module's forward did."""
    sent = ask(number, count, headers=[("model", form.encode())])
    if form != "exported":
        return sent
    body = json.loads(sent.value or b"")
    body["inputs"][0]["name"] = "input"
    return Send(json.dumps(body).encode(), sent.key, sent.headers)


class FileJob(Job):
    """A job whose model is in a file: the settings name no factory unless the test does."""

    def settings(self, **changes: Any) -> dict[str, Any]:
        found = super().settings(**changes)
        del found["model.factory"]
        return found


@pytest.fixture
def files(kafka: KafkaProbe, tmp_path: Path) -> Iterator[Job]:
    (tmp_path / "job").mkdir()
    made = FileJob(kafka, tmp_path / "job")
    yield made
    made.close()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The section of a compiled package; a compiler takes ten seconds for it."""
    return write("package", tmp_path_factory.mktemp("package"))


@needs_a_compiler
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_form_of_a_model_file_serves_right_answers(files: Job, package: dict[str, Any], tmp_path: Path) -> None:
    models = [package if form == "package" else write(form, tmp_path) for form in FORMS]
    config = tmp_path / "worker.yaml"
    config.write_text(yaml.safe_dump({"models": models}))
    counts = {number: 1 + number // 4 % 5 for number in range(REQUESTS)}
    files.send(to(FORMS[number % 4], number, count) for number, count in counts.items())
    wide = np.ones((1, 5), np.float32)
    files.send(
        ask_rows(f"wide {form}", wide, headers=[("model", form.encode())]) for form in FORMS if form != "exported"
    )
    worker = files.launch(["--config", str(config)]).await_ready(300)
    outcomes = files.await_settled()
    refused = [one for one in outcomes if one.header("status") == b"error"]
    results = [one for one in outcomes if one.header("status") == b"ok"]
    check_once(results, map(str, range(REQUESTS)))
    check_answers(results, counts)
    assert {(one.key or b"").decode(): error_code(one) for one in refused} == {
        f"wide {form}": "invalid_tensor" for form in FORMS if form != "exported"
    }
    assert {(one.header("model") or b"").decode() for one in results} == set(FORMS)
    assert worker.metric("forebay_replica_restarts_total") == 0
    assert worker.stop() == 0


@needs_a_compiler
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_package_that_is_declared_with_another_shape_never_serves(files: Job, package: dict[str, Any]) -> None:
    """By itself a package computes wrong values for a wrong shape, in silence."""
    options = {**DECLARED, "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 5]}]}
    worker = files.launch(["--set", f"model.path={package['path']}", "--set", f"model.options={json.dumps(options)}"])
    assert worker.wait(180) == 78
    last = worker.text().strip().splitlines()[-1]
    assert last.startswith("forebay: the model failed its warm-up")
    assert "Traceback" not in worker.text()


def totals(outcomes: list[Read], version: str) -> dict[int, float]:
    found = {}
    for outcome in outcomes:
        if outcome.header("model-version") == version.encode():
            body = json.loads(outcome.value or b"")
            found[int(outcome.key or b"")] = body["outputs"][0]["data"][0]
    return found


def ids(number: int) -> Send:
    """A request of 1 to 40 numbers: some fill a bucket, some none, some are longer than all."""
    given = [1 + (number + place) % 99 for place in range(1 + number % 40)]
    tensor = {"name": "ids", "datatype": "INT64", "shape": [1, len(given)], "data": given}
    return Send(json.dumps({"id": str(number), "inputs": [tensor]}).encode(), str(number).encode())


def total(number: int) -> int:
    return sum(1 + (number + place) % 99 for place in range(1 + number % 40))


@needs_a_compiler
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_compiled_package_serves_two_buckets_and_a_new_version_gets_one_of_its_own(job: Job, tmp_path: Path) -> None:
    config, cache = tmp_path / "worker.yaml", tmp_path / "cache"

    def configure(version: str, scale: int) -> None:
        model = {"version": version, "options": {"scale": scale}}
        config.write_text(yaml.safe_dump({"model": model}))

    def packages() -> list[Path]:
        return sorted((cache / "aoti").glob("*.pt2"))

    configure("1", 1)
    settings: dict[str, Any] = {
        "model__factory": "tests.integration.test_model_files:Totals",
        "inference__compile": "aoti",
        "inference__cache_dir": str(cache),
        "inference__threads": 1,
        "batch__max_batch_size": 8,
        "batch__shape_buckets": [8, 32],
    }
    job.send(map(ids, range(100)))
    worker = job.launch(["--config", str(config)], **settings).await_ready(300)
    job.await_answered(100)
    [first] = packages()
    seal = hashlib.sha256(first.read_bytes()).digest()

    configure("2", 3)
    worker.signal(signal.SIGHUP)
    eventually(lambda: worker.events("model_reloaded"), "the new version has taken over", 300)
    job.send(map(ids, range(100, 200)))
    outcomes = job.await_settled()
    check_once(outcomes, map(str, range(200)))
    assert totals(outcomes, "1") == {number: total(number) for number in range(100)}
    assert totals(outcomes, "2") == {number: 3 * total(number) for number in range(100, 200)}
    assert len(packages()) == 2
    assert worker.metric("forebay_recompiles_total") == 0
    assert worker.stop() == 0
    assert hashlib.sha256(first.read_bytes()).digest() == seal
