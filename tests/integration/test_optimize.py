"""`forebay optimize` with the processes in which it measures, and what it says to set in a worker."""

from __future__ import annotations

import ctypes
from typing import Any

import orjson
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from forebay import Model, TensorSpec
from forebay.cli.app import app
from tests.integration.job import Job, ask, check_answers, check_once

FACTORY = "tests.inference.test_precision:Net"


def invoke(*arguments: str) -> Any:
    settings = (f"model.factory={FACTORY}", "inference.threads=1", "kafka.bootstrap_servers=localhost:1")
    return CliRunner().invoke(app, ["optimize", *arguments, *(part for one in settings for part in ("--set", one))])


def test_the_command_measures_in_processes_and_says_what_to_set() -> None:
    done = invoke("--json", "--precision", "fp32,tf32", "--compile", "none", "--sparsity", "none")
    assert done.exit_code == 0, done.output
    told = orjson.loads(done.stdout)
    assert [(one["precision"], one["verdict"][:8]) for one in told["candidates"]] == [
        ("fp32", "adopted"), ("tf32", "not here"),
    ]  # fmt: skip
    assert told["candidates"][0]["speedup"] == 1.0
    assert told["candidates"][0]["deviation"] == 0.0
    assert told["adopted"] == {"precision": "fp32", "compile": "none"}
    assert told["settings"] == "inference:\n  precision: fp32\n  compile: none\n"
    assert told["device"] == "cpu"


class Fragile(Model):
    """Twice the row plus one, by way of numbers that fp16 cannot hold; in bf16 it takes its process along."""

    inputs = (TensorSpec("x", "FP32", [-1, 4]),)
    outputs = (TensorSpec("y", "FP32", [-1, 4]),)

    def load(self, device: torch.device) -> None:
        self.net = nn.Linear(4, 4).to(device)
        with torch.no_grad():
            self.net.weight.copy_(2 * torch.eye(4))
            self.net.bias.fill_(1)

    def forward(self, x: torch.Tensor) -> Any:
        if x.dtype is torch.bfloat16:
            ctypes.string_at(0)
        y = self.net(x)
        return torch.where(y.abs() < 1e9, y * 2.0**17 / 2.0**17, y)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_crashes_or_overflows_is_a_row_with_its_reason_and_the_lines_to_paste_serve(job: Job) -> None:
    """An infinite deviation could not be told, and stood there as a process that ended with 0."""
    factory = "tests.integration.test_optimize:Fragile"
    settings = (f"model.factory={factory}", "inference.device=cpu", "batch.max_batch_size=8")
    arguments = ["--json", "--precision", "fp32,bf16,fp16", "--compile", "none", "--sparsity", "magnitude"]
    done = CliRunner().invoke(app, ["optimize", *arguments, *(part for one in settings for part in ("--set", one))])
    assert done.exit_code == 0, done.output
    told = orjson.loads(done.stdout)
    by_name = {(one["precision"], one["sparsity"]): one for one in told["candidates"]}
    assert by_name["fp32", None]["verdict"] == "adopted"
    assert by_name["bf16", None]["verdict"].startswith("fails: its process was ended by signal 11")
    assert by_name["fp16", None]["verdict"] == "deviates more than 0.02"
    assert by_name["fp16", None]["batch_ms"] > 0
    assert by_name["fp16", None]["deviation"] is None
    assert by_name["fp32", "magnitude"]["verdict"].startswith(("deviates", "passes"))

    config = job.folder / "worker.yaml"
    config.write_text(f"model:\n  factory: {factory}\n{told['settings']}")
    job.send(map(ask, range(20)))
    worker = job.launch(["--config", str(config), "--until-end"], model__factory=factory)
    assert worker.wait(180) == 0, worker.text()
    outcomes = job.outcomes()
    check_once(outcomes, map(str, range(20)))
    check_answers(outcomes)
