"""Models from files: what a file says of itself, and what it is told."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forebay.errors import ModelError
from forebay.inference.files import _OneRowAsTwo, open_file
from forebay.inference.loading import load_plain
from tests.inference.test_loading import start

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).softmax(-1)


class Two(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return {"probabilities": self.linear(x).softmax(-1), "sum": x.sum(1)}


def _export(net: nn.Module, path: Path, *, fixed: bool = False) -> Path:
    shapes = None if fixed else {"x": {0: torch.export.Dim("rows")}}
    torch.export.save(torch.export.export(net.eval(), (torch.rand(3, 4),), dynamic_shapes=shapes), path)
    return path


def test_an_exported_program_says_its_own_signature_and_computes_what_the_module_did(tmp_path: Path) -> None:
    net = Two()
    model = open_file(_export(net, tmp_path / "two.pt2"), {})
    assert [(s.name, s.datatype, list(s.shape)) for s in model.inputs] == [("x", "FP32", [-1, 4])]
    assert [(s.name, list(s.shape)) for s in model.outputs] == [("probabilities", [-1, 3]), ("sum", [-1])]
    model.load(CPU)
    for rows in (1, 2, 7):
        x = torch.rand(rows, 4)
        with torch.inference_mode():
            found = model.forward(x=x)
        torch.testing.assert_close(found["probabilities"], net(x)["probabilities"].detach())


def test_the_outputs_of_an_export_may_be_named(tmp_path: Path) -> None:
    path = _export(Net(), tmp_path / "net.pt2")
    assert [spec.name for spec in open_file(path, {}).outputs] == ["output"]
    assert [spec.name for spec in open_file(path, {"outputs": ["probabilities"]}).outputs] == ["probabilities"]
    with pytest.raises(ModelError, match="names 2 outputs"):
        open_file(path, {"outputs": ["a", "b"]})


def test_an_export_of_one_batch_size_is_refused_with_the_mend(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="dynamic_shapes"):
        open_file(_export(Net(), tmp_path / "fixed.pt2", fixed=True), {})


def test_a_torchscript_file_runs_with_its_tensors_declared(tmp_path: Path) -> None:
    net = Net().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(net, torch.rand(2, 4)), tmp_path / "net.pt")
    declared = {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 3]}],
    }
    model = open_file(tmp_path / "net.pt", declared)
    model.load(CPU)
    x = torch.rand(5, 4)
    torch.testing.assert_close(model.forward(x=x)["y"], net(x))
    with pytest.raises(ModelError, match=r"model\.options\.inputs"):
        open_file(tmp_path / "net.pt", {})


def test_a_package_that_takes_two_rows_at_least_is_given_a_single_one_twice() -> None:
    """No package with a free number of rows could be served: the warm-up begins with a single one."""
    given: list[int] = []

    def package(x: torch.Tensor, y: torch.Tensor) -> Any:
        given.append(len(x))
        if len(x) < 2:
            raise RuntimeError("input_handles[0]: dim value is too small at 0, expected it to be >= 2, but got: 1")
        if x.shape[1] != 4:
            raise RuntimeError("input_handles[0]: unmatched dim value at 1, expected: 4, but got: 5")
        return x + y, y.sum(1)

    call = _OneRowAsTwo(package)
    for rows in (1, 1, 3):
        one, other = call(torch.ones(rows, 4), torch.ones(rows, 4))
        assert (one.tolist(), other.tolist()) == ([[2.0] * 4] * rows, [4.0] * rows)
    assert given == [1, 2, 2, 3]
    with pytest.raises(RuntimeError, match="unmatched dim value"):
        call(torch.ones(1, 5), torch.ones(1, 5))


@pytest.mark.parametrize("form", ["exported", "script"])
def test_a_file_is_loaded_as_a_replica_loads_it(form: str, tmp_path: Path) -> None:
    """A TorchScript file stopped the start: its modules have no requires_grad_."""
    net = Net().eval()
    path = _export(net, tmp_path / "net.pt2") if form == "exported" else tmp_path / "net.pt"
    if form == "script":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.jit.save(torch.jit.trace(net, torch.rand(2, 4)), path)
    options = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]} if form == "script" else {}
    options["outputs"] = [{"name": "y", "datatype": "FP32", "shape": [-1, 3]}] if form == "script" else ["y"]
    model = load_plain(start(factory=None, path=str(path), options=options), CPU)
    x = torch.rand(5, 4)
    torch.testing.assert_close(model.forward(x=x)["y"], net(x))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [("none.pt2", None, "no file"), ("net.bin", b"x", "files are"), ("rubbish.pt2", b"rubbish", "not a readable")],
)
def test_what_is_no_model_file_is_refused_in_a_sentence(
    tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match=said):
        open_file(tmp_path / name, {})
