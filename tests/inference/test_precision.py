"""Precisions: what a device has, what a conversion does to the outputs, and which one `auto` adopts."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from forebay import Model, TensorSpec
from forebay.errors import ConfigError, ModelError
from forebay.inference import adoption, precision
from forebay.inference.adoption import adopt
from forebay.inference.devices import open_device
from forebay.inference.golden import deviation, golden
from forebay.inference.messages import Start, Tried
from forebay.inference.verdicts import CANDIDATES, judge
from forebay.settings import Inference
from tests.inference.test_loading import start

CPU = torch.device("cpu")
SCORES = (TensorSpec("y", "FP32", [-1, 8]),)
LABELS = (TensorSpec("label", "INT64", [-1]),)
WORDS = (TensorSpec("word", "BYTES", [-1]),)


class Net(Model):
    """A perceptron of which each load is the same."""

    inputs = (TensorSpec("x", "FP32", [-1, 64]),)
    outputs: Any = SCORES

    def load(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).to(device)

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)

    def example(self) -> Mapping[str, Any]:
        return {"x": torch.randn(20, 64, generator=torch.Generator().manual_seed(1))}


class Overflows(Net):
    """Has numbers that 16 bits of fp16 cannot hold."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x) * 1e3 * 1e3


class Bare(Net):
    """Has no module."""

    def load(self, device: torch.device) -> None: ...

    def forward(self, x: torch.Tensor) -> Any:
        return x[:, :8]


def told(model: str = "Net", **changes: Any) -> Start:
    return start(factory=f"tests.inference.test_precision:{model}", search=[str(Path.cwd())], **changes)


# ---------------------------------------------------------------------- what a machine has


def test_every_precision_of_the_settings_is_known_here() -> None:
    named = Inference.model_fields["precision"].annotation
    assert set(getattr(named, "__args__")) == {*CANDIDATES, "auto"}  # noqa: B009


@pytest.mark.parametrize("name", ["tf32", "float8", "int4"])
def test_a_precision_that_the_device_lacks_stops_the_start_with_its_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"inference\.precision {name} needs a CUDA device .*, and .* is cpu"):
        adopt(told(precision=name), open_device("cpu"))


def test_without_torchao_the_mend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"int8 needs torchao: install the extra quantization \(pip install"):
        precision.check("int8", CPU)


def test_tf32_is_on_only_where_it_is_named() -> None:
    """torch has it on for convolutions from the start."""
    torch.backends.cudnn.allow_tf32 = True
    adopt(told(), open_device("cpu"))
    assert not torch.backends.cudnn.allow_tf32
    assert torch.get_float32_matmul_precision() == "highest"
    precision.set_matmul("tf32")
    assert torch.backends.cudnn.allow_tf32
    assert torch.get_float32_matmul_precision() == "high"
    precision.set_matmul("fp32")


# ---------------------------------------------------------------------- conversion


@pytest.mark.parametrize("name", ["int8", "int8_weight_only"])
def test_linear_layers_hold_bytes_and_the_outputs_are_near(name: str) -> None:
    pytest.importorskip("torchao")
    model, adopted = adopt(told(precision=name), open_device("cpu"))
    assert isinstance(model, Net)
    assert {type(part.weight).__name__ for part in model.net if isinstance(part, nn.Linear)} == {"Int8Tensor"}
    assert adopted.deviation is not None
    assert 0 < adopted.deviation < 0.1
    x = torch.ones(3, 64)
    assert torch.allclose(model.forward(x)[:1], model.forward(x[:1]), atol=1e-5)


def test_a_model_without_linear_layers_cannot_be_quantised() -> None:
    pytest.importorskip("torchao")
    with pytest.raises(ConfigError, match="Bare has none"):
        adopt(told("Bare", precision="int8"), open_device("cpu"))


def test_an_exported_program_keeps_its_precision(tmp_path: Path) -> None:
    rows = {0: torch.export.Dim("rows", min=1, max=8)}
    program = torch.export.export(nn.Linear(4, 2), (torch.ones(2, 4),), dynamic_shapes=(rows,))
    torch.export.save(program, tmp_path / "net.pt2")
    with pytest.raises(ConfigError, match="computes in what it was exported in"):
        adopt(start(factory=None, path=str(tmp_path / "net.pt2"), precision="bf16"), open_device("cpu"))


def test_more_deviation_than_is_allowed_stops_the_start() -> None:
    with pytest.raises(ModelError, match=r"bf16: golden outputs deviate by .*max_deviation is 1e-06"):
        adopt(told(precision="bf16", max_deviation=1e-6), open_device("cpu"))
    assert adopt(told(precision="bf16", max_deviation=0.1), open_device("cpu"))[1].precision == "bf16"


# ---------------------------------------------------------------------- golden inputs


def test_golden_inputs_are_the_rows_of_the_example() -> None:
    model, _ = adopt(told(), open_device("cpu"))
    known = golden(model, CPU, 32)
    assert (known.rows, known.notes) == (20, [])
    assert torch.equal(known.inputs["x"], model.example()["x"])  # type: ignore[index]
    assert golden(model, CPU, 4).rows == 4


def test_deviation_is_relative_for_fractions_and_a_share_for_labels_and_texts() -> None:
    ten = torch.tensor([[10.0] * 8])
    assert deviation(SCORES, [ten], [ten - 1]) == pytest.approx(0.1)
    assert deviation(SCORES, [ten], [ten / 0]) == float("inf")
    assert deviation(LABELS, [torch.tensor([1, 2, 3, 4])], [torch.tensor([1, 2, 3, 9])]) == 0.25
    assert deviation(WORDS, [[b"a", b"b"]], [[b"a", b"c"]]) == 0.5
    pixels = (TensorSpec("p", "UINT8", [-1]),)
    assert deviation(pixels, [torch.tensor([0], dtype=torch.uint8)], [torch.tensor([1], dtype=torch.uint8)]) == 0
    assert deviation(pixels, [torch.tensor([0], dtype=torch.uint8)], [torch.tensor([2], dtype=torch.uint8)]) == 1


# ---------------------------------------------------------------------- auto


def tried(name: str, seconds: float, apart: float, verdict: str = "") -> Tried:
    return Tried(name, "none", 32, seconds, seconds, apart, verdict)


def test_the_fastest_within_the_deviation_is_adopted_and_each_other_one_is_told_why_not() -> None:
    table = [
        tried("fp32", 4.0, 0.0),
        tried("tf32", 0.0, 0.0, "not here: no GPU"),
        tried("bf16", 2.0, 0.004),
        tried("fp16", 3.0, 0.001),
        tried("int8", 1.0, 0.03),
    ]
    assert judge(table, 0.02) is table[2]
    assert [one.verdict for one in table] == [
        "not faster", "not here: no GPU", "adopted", "not faster", "deviates more than 0.02",
    ]  # fmt: skip


def test_of_two_that_are_as_fast_the_more_exact_one_is_adopted() -> None:
    table = [tried("fp32", 1.04, 0.0), tried("bf16", 1.0, 0.004)]
    found = judge(table, 0.02)
    assert found is table[0]


def test_nothing_is_adopted_that_failed_or_gave_nan() -> None:
    table = [tried("fp32", 4.0, 0.0), tried("bf16", 1.0, float("inf")), tried("int8", 0.0, 0.0, "fails: oops")]
    assert judge(table, 0.02) is table[0]


def test_auto_measures_every_precision_that_the_device_has_and_serves_one() -> None:
    pytest.importorskip("torchao")
    model, adopted = adopt(told("Overflows", precision="auto", max_deviation=0.0), open_device("cpu"))
    assert adopted.precision == "fp32"  # every other one deviates by something
    assert next(iter(model.net.parameters())).dtype == torch.float32  # type: ignore[attr-defined]
    table = {one.precision: one for one in adopted.tried}
    assert tuple(table) == CANDIDATES
    assert table["fp32"].verdict == "adopted"
    assert table["fp32"].full_rows == 4
    assert {name for name, one in table.items() if one.verdict.startswith("not here")} == {"tf32", "float8", "int4"}
    assert {name for name, one in table.items() if one.full_seconds > 0} == {
        "fp32", "bf16", "fp16", "int8", "int8_weight_only",
    }  # fmt: skip
    assert table["fp16"].verdict == "deviates more than 0"


def test_replicas_of_one_worker_agree_on_what_the_first_has_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def once(asked: Start, device: Any) -> adoption.Adoption:
        monkeypatch.setattr(adoption, "_choose", None)
        return adoption.Adoption("bf16", None, [tried("bf16", 1.0, 0.004, "adopted")], ["measured"])

    monkeypatch.setattr(adoption, "_choose", once)
    asked = told(precision="auto", session="one", cache_dir=str(tmp_path))
    first, second = (adopt(asked, open_device("cpu"))[1] for _ in range(2))
    assert (first.precision, second.precision) == ("bf16", "bf16")
    assert first.tried == second.tried
    assert "chosen by another replica, or before" in second.notes
    with pytest.raises(TypeError):
        adopt(msgspec.structs.replace(asked, session="another worker"), open_device("cpu"))


def test_a_model_that_fails_in_fp32_stops_the_start_of_auto() -> None:
    with pytest.raises(ModelError, match=r"auto: the model failed in fp32: ValueError: never"):
        adopt(told("Fails", precision="auto"), open_device("cpu"))


class Fails(Net):
    """Fails always."""

    def forward(self, x: torch.Tensor) -> Any:
        raise ValueError("never")


def test_forebay_check_names_the_setting_where_the_machine_lacks_a_precision() -> None:
    from forebay.cli.check_machine import FIXES
    from forebay.cli.model_probe import probe

    found = probe(msgspec.json.encode(told(precision="float8")))
    assert "compute capability 8.9" in found["error"]
    assert found["error"].endswith("; set inference.precision to bf16, or to auto")
    assert "inference.precision" in FIXES[found["cause"]]
