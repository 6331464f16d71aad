"""Precision and compilation through a whole worker on real Kafka: measured at the start, told, and right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from forebay import Model, TensorSpec
from tests.integration.job import Job, answer, ask, check_answers, check_once, rows

REQUESTS = 30


class Twice(Model):
    """Twice the row plus one, by a linear layer."""

    inputs = (TensorSpec("x", "FP32", [-1, 4]),)
    outputs = (TensorSpec("y", "FP32", [-1, 4]),)

    def load(self, device: torch.device) -> None:
        self.net = nn.Linear(4, 4).to(device)
        with torch.no_grad():
            self.net.weight.copy_(2 * torch.eye(4))
            self.net.bias.fill_(1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)


def test_a_precision_is_measured_against_fp32_published_and_right(job: Job) -> None:
    """The numbers of these requests are exact in bf16; the golden inputs are not."""
    counts = {number: 1 + number % 3 for number in range(REQUESTS)}
    job.send(ask(number, count) for number, count in counts.items())
    worker = job.start(
        model__factory="tests.integration.test_precision:Twice",
        inference__precision="bf16",
        inference__max_deviation=0.05,
        inference__threads=1,
    )
    outcomes = job.await_settled()
    check_once(outcomes, map(str, range(REQUESTS)))
    check_answers(outcomes, counts)
    [told] = worker.events("precision")
    assert (told["precision"], told["model"]) == ("bf16", "model")
    assert 0 < told["deviation"] < 0.05
    assert worker.metric("forebay_precision_deviation", model="model") == pytest.approx(told["deviation"], abs=1e-6)
    assert worker.metric("forebay_model_precision_info", model="model", precision="bf16", compile="none") == 1
    assert worker.stop() == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_worker_measures_every_precision_and_adopts_one(job: Job, tmp_path: Path) -> None:
    """The weights of this model are exact in few bits; its inputs are not, so bf16 and int8 deviate."""
    pytest.importorskip("torchao")
    job.send(ask(number) for number in range(REQUESTS))
    worker = job.launch(
        model__factory="tests.integration.test_precision:Twice",
        inference__precision="auto",
        inference__max_deviation=0.05,
        inference__cache_dir=str(tmp_path),
        inference__threads=1,
    ).await_ready(400)  # it loads five times, and torchao comes with torch's compiler
    outcomes = job.await_settled()
    check_once(outcomes, map(str, range(REQUESTS)))
    for outcome in outcomes:
        expected = rows(int(outcome.key or b"0"), 1) * 2 + 1
        np.testing.assert_allclose(answer(outcome), expected, atol=0.2 * float(np.abs(expected).max()))

    [told] = worker.events("precision")
    table = {one["precision"]: one for one in told["tried"]}
    assert len(table) == 8
    assert table[told["precision"]]["verdict"] == "adopted"
    assert table["bf16"]["deviation"] > 0
    assert (
        worker.metric("forebay_model_precision_info", model="model", precision=told["precision"], compile="none") == 1
    )
    assert worker.stop() == 0


def test_a_precision_that_the_machine_lacks_ends_the_worker_with_78_and_one_sentence(job: Job) -> None:
    worker = job.launch(
        model__factory="tests.integration.test_precision:Twice", inference__precision="float8", inference__device="cpu"
    )
    assert worker.wait(120) == 78
    assert "inference.precision float8 needs a CUDA device of compute capability 8.9 or later" in worker.text()
    assert "Traceback" not in worker.text()


def test_graphs_serve_a_worker_on_the_fake_accelerator(job: Job) -> None:
    counts = {number: 1 + number % 3 for number in range(REQUESTS)}
    job.send(ask(number, count) for number, count in counts.items())
    worker = job.start(
        model__factory="tests.integration.test_precision:Twice",
        inference__compile="cudagraph",
        inference__device="fake",
        inference__threads=1,
        batch__max_batch_size=8,
    )
    outcomes = job.await_settled()
    check_once(outcomes, map(str, range(REQUESTS)))
    check_answers(outcomes, counts)
    assert worker.metric("forebay_recompiles_total", model="model") == 0
    assert worker.metric("forebay_model_precision_info", precision="fp32", compile="cudagraph") == 1
    assert worker.stop() == 0
