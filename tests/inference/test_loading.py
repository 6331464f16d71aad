"""Loading a model: every mistake of its author is one sentence, and nothing runs in training mode."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from forebay import Model, TensorSpec
from forebay.errors import ConfigError, ModelError
from forebay.inference.devices import Device, is_out_of_memory, is_sticky, open_device, resolve
from forebay.inference.loading import load, modules, verify_eval, where
from forebay.inference.messages import Failed, Ready, Run, Start, decode_to_loop, decode_to_replica, encode

CPU = torch.device("cpu")
GOOD = """
    import torch
    from forebay import Model, TensorSpec

    class Net(Model):
        inputs = [TensorSpec("x", "FP32", [-1, 2])]
        outputs = [TensorSpec("y", "FP32", [-1, 2])]

        def __init__(self, scale=1.0):
            self.scale = scale

        def load(self, device):
            self.net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(), torch.nn.BatchNorm1d(2)).train()

        def forward(self, x):
            return self.net(x) * self.scale
"""


@pytest.fixture
def written(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """A function that writes a module of a name of its own and loads its class `Net`."""
    before = dict(sys.modules)
    path = list(sys.path)
    name = f"model_of_{abs(hash(request.node.nodeid))}"

    def loaded(source: str = GOOD, attribute: str = "Net", **changes: Any) -> Model:
        (tmp_path / f"{name}.py").write_text(dedent(source))
        return load(start(factory=f"{name}:{attribute}", search=[str(tmp_path)], **changes), CPU)

    yield loaded
    sys.path[:] = path
    for module in set(sys.modules) - set(before):
        if module.startswith("model_of_"):
            del sys.modules[module]


def start(**changes: Any) -> Start:
    values: dict[str, Any] = {
        "model": "m", "version": "1", "factory": "a:B", "path": None, "weights": None, "options": {}, "device": "cpu",
        "precision": "fp32", "threads": None, "max_batch_size": 4, "slot_bytes": 10, "input_bytes": 5, "slots": 2,
        "search": [],
    }  # fmt: skip
    return Start(**{**values, **changes})


def test_every_module_is_put_into_eval_mode_and_needs_no_gradient(written: Any) -> None:
    model = written()
    assert not any(module.training for module in model.net.modules())
    assert not any(parameter.requires_grad for parameter in model.net.parameters())


def test_options_are_the_keyword_arguments_of_the_factory(written: Any) -> None:
    assert written(options={"scale": 3.0}).scale == 3.0


def test_a_factory_may_be_a_function_or_an_attribute_of_a_class(written: Any) -> None:
    source = GOOD + "\n    def make():\n        return Net(5.0)\n\n    class Box:\n        Inner = Net\n"
    assert written(source, "make").scale == 5.0
    assert written(source, "Box.Inner").scale == 1.0


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_weights_are_converted_to_the_precision_asked_for(written: Any, precision: str, dtype: torch.dtype) -> None:
    assert {weight.dtype for weight in written(precision=precision).net.parameters()} == {dtype}


def test_modules_are_found_in_attributes_lists_and_dicts() -> None:
    class Many(Model):
        def __init__(self) -> None:
            self.one = torch.nn.Linear(1, 1)
            self.several = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
            self.named = {"a": torch.nn.Linear(1, 1)}
            self.other = 5

    assert len(list(modules(Many()))) == 4


def test_training_mode_is_found_however_deep_it_hides() -> None:
    class Deep(Model):
        def __init__(self) -> None:
            self.net = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Dropout())).eval()
            self.net[0][0].train()

    with pytest.raises(ModelError, match=r"0\.0 \(Dropout\) is in training mode"):
        verify_eval(Deep())


@pytest.mark.parametrize(
    ("source", "mentions"),
    [
        ("import nothing_of_that_name", "nothing_of_that_name"),
        ("1 / 0", "ZeroDivisionError"),
        ("def broken(:", "SyntaxError"),
        ("raise SystemExit('enough')", "enough"),
        ("x = 1", "no 'Net'"),
        ("Net = 5", "not a class or a function"),
        ("def Net():\n    return 5", "made a int"),
        ("def Net():\n    raise ValueError('boom')", "boom"),
        (GOOD.replace("self.net = ", "raise OSError('no weights') #"), "no weights"),
        (GOOD.replace("    inputs = ", "    nothing = "), "must declare inputs"),
        (GOOD.replace('[TensorSpec("y", "FP32", [-1, 2])]', "[]"), "must declare outputs"),
        (GOOD.replace('[TensorSpec("y", "FP32", [-1, 2])]', '["y"]'), "list of TensorSpec"),
        (GOOD.replace('[TensorSpec("y", "FP32", [-1, 2])]', '[TensorSpec("y", "FP32", [-1])] * 2'), "same name twice"),
        (GOOD.replace('"FP32", [-1, 2])]\n        outputs', '"FLOAT", [-1, 2])]\n        outputs'), "unknown datatype"),
        (GOOD.replace("def forward(self, x)", "def forward(self, image)"), "no argument 'x'"),
        (GOOD + "\n        def prepare(self, x):\n            return x\n", "both prepare"),
    ],
)
def test_a_mistake_of_the_models_author_is_one_sentence(written: Any, source: str, mentions: str) -> None:
    with pytest.raises(ModelError) as raised:
        written(source)
    assert mentions in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "Traceback" not in str(raised.value)


def test_options_that_the_factory_does_not_take_are_named(written: Any) -> None:
    with pytest.raises(ModelError, match=r"model\.options.*colour"):
        written(options={"colour": "red"})


@pytest.mark.parametrize("name", ["no.such.package:Net", "no_such_module:Net"])
def test_a_module_that_is_not_there_says_where_it_was_looked_for(name: str) -> None:
    with pytest.raises(ModelError, match="there is no module") as raised:
        load(start(factory=name, search=["/somewhere"]), CPU)
    assert "/somewhere" in str(raised.value)


def test_a_module_that_the_model_misses_is_not_mistaken_for_the_model(written: Any) -> None:
    with pytest.raises(ModelError, match="importing"):
        written("import a_library_that_is_missing")


def test_forward_may_take_any_keywords(written: Any) -> None:
    assert written(GOOD.replace("def forward(self, x)", "def forward(self, **inputs)"))


@pytest.mark.parametrize(
    ("changes", "mentions"),
    [({"datatype": "FLOAT"}, "FLOAT"), ({"shape": [1, 2]}, "-1"), ({"shape": []}, "-1"), ({"pad": 0}, "pad"),
     ({"shape": [-1, 0]}, "positive"), ({"shape": [-1, -2]}, "positive"),
     ({"datatype": "BYTES", "shape": [-1, -1], "pad": 0}, "pad")],
)  # fmt: skip
def test_an_impossible_declaration_is_refused_where_it_stands(changes: dict[str, Any], mentions: str) -> None:
    with pytest.raises(ValueError, match=mentions):
        TensorSpec(**{"name": "x", "datatype": "FP32", "shape": [-1, 2], **changes})


def test_weights_come_from_a_safetensors_file(written: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = GOOD.replace(", torch.nn.Dropout(), torch.nn.BatchNorm1d(2)", "")
    weights = {"0.weight": torch.full((2, 2), 7.0), "0.bias": torch.zeros(2)}
    save_file(weights, tmp_path / "w.safetensors")
    assert (written(source, weights=str(tmp_path / "w.safetensors")).net[0].weight == 7).all()


@pytest.mark.parametrize(("file", "mentions"), [("w.pt", "safetensors"), ("w.safetensors", "does not fit")])
def test_weights_that_do_not_fit_are_refused(written: Any, tmp_path: Path, file: str, mentions: str) -> None:
    from safetensors.torch import save_file

    save_file({"other": torch.zeros(1)}, tmp_path / file)
    with pytest.raises(ModelError, match=mentions):
        written(weights=str(tmp_path / file))


def test_an_error_of_the_users_code_is_told_with_its_line() -> None:
    try:
        raise ValueError("first\nsecond" + "x" * 1_000)
    except ValueError as error:
        told = where(error)
    assert told.startswith("ValueError: first second")
    assert len(told) <= 500
    with pytest.raises(KeyError) as raised:
        {}["missing"]
    assert "test_loading.py:" in where(raised.value)
    assert where(RuntimeError()) == "RuntimeError: no message"


# ---------------------------------------------------------------------- devices


def test_auto_is_the_cpu_where_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve("auto").type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve("auto") == torch.device("cuda:0")


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_device_that_is_not_there_is_refused_and_never_replaced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="sees no CUDA device here: set it to auto or cpu"):
        resolve(name)


def test_a_device_number_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ConfigError, match="only cuda:0 to cuda:1 here: set it to one of those"):
        resolve("cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="only cuda:0 here: set it"):
        resolve("cuda:9")


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x", "meta", "mps"])
def test_a_device_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"inference\.device"):
        resolve(name)


def test_the_cpu_copies_what_it_is_given_and_reports_its_memory() -> None:
    device = open_device("cpu")
    assert type(device) is Device
    staged = torch.zeros(2)
    device.upload({"x": staged})["x"].add_(1)
    assert staged.tolist() == [0, 0]
    assert device.memory()["resident"] > 1_000_000


def test_only_a_lost_device_is_lost_and_only_missing_memory_is_missing() -> None:
    lost = torch.AcceleratorError("x")  # type: ignore[attr-defined]
    assert is_sticky(lost)
    assert not is_out_of_memory(lost)
    for error in (torch.OutOfMemoryError("x"), MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate")):
        assert is_out_of_memory(error)
        assert not is_sticky(error)
    for other in (ValueError("DefaultCPUAllocator"), RuntimeError("shape")):
        assert not is_out_of_memory(other)
        assert not is_sticky(other)


# ---------------------------------------------------------------------- messages


def test_messages_arrive_as_they_were_sent() -> None:
    job = Run(1, 0, 3, [1, 2, 1], [], [[[1, 2]]])
    assert decode_to_replica(encode(job)) == job
    assert decode_to_replica(encode(start(options={"a": [1, {"b": None}]}))).options == {"a": [1, {"b": None}]}  # type: ignore[union-attr]
    for message in (Failed("why"), Ready([], [], True, "cpu", 0.5, 0.25, [(0, 1, 0.1)], ["note"])):
        assert decode_to_loop(encode(message)) == message


class _Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_that_cannot_say_itself_is_still_described() -> None:
    """`where` called str() unguarded: an exception whose text raised took the replica along."""
    assert where(_Mute()).startswith("_Mute: its message cannot be shown")


def test_a_text_that_utf_8_cannot_carry_is_escaped() -> None:
    """A lone surrogate, as in a file name that is not UTF-8, could not be told to the loop."""
    assert "\\udcff" in where(ValueError("no such file \udcff"))
