"""`forebay optimize`: what it measures, adopts, says and writes. The processes that measure are the real ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from forebay.cli import optimize as command
from forebay.cli.app import app
from forebay.cli.optimize_view import Comparison, show
from forebay.errors import ModelError
from forebay.inference.candidate import answer
from forebay.inference.messages import Tried
from forebay.inference.pruning import prune
from forebay.inference.verdicts import Answer, Question, judge
from tests.inference.test_loading import start

FACTORY = "tests.inference.test_precision:Net"


def asked(**changes: Any) -> Question:
    told = {name: changes.pop(name) for name in ("precision", "compile", "factory") if name in changes}
    return Question(start(search=[str(Path.cwd())], **{"factory": FACTORY, **told}), **changes)


def invoke(*arguments: str) -> Any:
    settings = (f"model.factory={FACTORY}", "inference.threads=1", "kafka.bootstrap_servers=localhost:1")
    return CliRunner().invoke(app, ["optimize", *arguments, *(part for one in settings for part in ("--set", one))])


def tried(precision: str, seconds: float, apart: float, **more: str) -> Tried:
    return Tried(precision, more.pop("compile", "none"), 32, seconds, seconds / 2, apart, **more)


# ---------------------------------------------------------------------- pruning


def test_magnitude_pruning_zeroes_the_smallest_weights_of_each_layer() -> None:
    net = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 2))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[1.0, -8, 3, -4], [5, 2, -7, 6]]))
    assert prune([net], "magnitude", 0.5, "Net") == 6
    assert net[0].weight.tolist() == [[0, -8, 0, 0], [5, 0, -7, 6]]


def test_two_of_each_four_neighbours_stay() -> None:
    net = nn.Linear(8, 1)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[1.0, -8, 3, -4, 5, 2, -7, 6]]))
    assert prune([net], "2:4", 0.5, "Net") == 4
    assert net.weight.tolist() == [[0, -8, 0, -4, 0, 0, -7, 6]]
    with pytest.raises(ModelError, match=r"2:4 pruning takes linear layers.*and Odd has none"):
        prune([nn.Linear(3, 1)], "2:4", 0.5, "Odd")


# ---------------------------------------------------------------------- one candidate


def test_a_candidate_is_measured_as_it_would_be_served() -> None:
    found = answer(asked(precision="bf16"))
    assert (found.error, found.device, found.tried.verdict, found.tried.full_rows) == ("", "cpu", "", 4)
    assert found.tried.full_seconds > 0
    assert found.tried.one_seconds > 0
    assert 0 < found.tried.deviation < 0.02


def test_pruned_weights_are_measured_and_zeros_are_said_to_give_no_speed_here() -> None:
    found = answer(asked(precision="bf16", sparsity="2:4"))
    assert found.zeros == 64 * 72 // 2
    assert found.tried.sparsity == "2:4"
    assert found.tried.deviation > 0.02
    assert "dense kernels" in found.notes[0]


def test_weights_that_pass_are_written_and_a_model_takes_them(tmp_path: Path) -> None:
    path = tmp_path / "pruned.safetensors"
    found = answer(asked(sparsity="magnitude", share=0.1, most=0.9, output=str(path)))
    assert (found.error, found.written) == ("", str(path))
    again = answer(Question(start(search=[str(Path.cwd())], factory=FACTORY, weights=str(path))))
    assert again.error == ""
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


def test_weights_that_do_not_pass_are_not_written(tmp_path: Path) -> None:
    found = answer(asked(sparsity="magnitude", share=0.9, output=str(tmp_path / "pruned.safetensors")))
    assert re.search(r"magnitude pruning deviates by .* nothing was written", found.error)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- the command


def test_a_candidate_that_ends_its_process_is_one_row_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it keep the others from being measured; only the model as it is must work."""

    def ask(question: Question, timeout: float) -> Answer:
        precision = question.start.precision
        if precision == "bf16":
            return Answer(Tried("bf16", "none"), error="its process was ended by signal 11")
        return Answer(tried(precision, 2.0 if precision == "fp32" else 1.0, 0.001), "cpu")

    monkeypatch.setattr(command, "_ask", ask)
    questions = [asked(precision=one) for one in ("fp32", "bf16", "fp16")]
    found = command._compare(questions, 1.0, quiet=True)
    assert [one.verdict for one in found.tried] == [
        "not faster", "fails: its process was ended by signal 11", "adopted",
    ]  # fmt: skip
    with pytest.raises(ModelError, match="ended by signal 11"):
        command._compare(questions[1:], 1.0, quiet=True)


def test_what_the_machine_lacks_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU twenty of the thirty-two candidates were processes that imported torch to say so."""
    asked_for: list[tuple[str, str]] = []

    def ask(question: Question, timeout: float) -> Answer:
        precision, how = question.start.precision, question.start.compile
        asked_for.append((precision, how))
        lacks = precision == "tf32" or how == "cudagraph"
        return Answer(Tried(precision, how, verdict="not here: no GPU") if lacks else tried(precision, 1.0, 0.0))

    monkeypatch.setattr(command, "_ask", ask)
    pairs = [(one, how) for how in ("none", "aoti", "cudagraph") for one in ("fp32", "tf32", "bf16")]
    found = command._compare([asked(precision=one, compile=how) for one, how in pairs], 1.0, quiet=True)
    assert [(one.precision, one.compile) for one in found.tried if one.verdict == "not here: no GPU"] == [
        pair for pair in pairs if "tf32" in pair or "cudagraph" in pair
    ]
    assert asked_for == [pair for pair in pairs if pair not in (
        ("tf32", "aoti"), ("tf32", "cudagraph"), ("bf16", "cudagraph"))]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--precision", "fp31"], "there is no 'fp31'; there are fp32"),
        (["--compile", "jit"], "there is no 'jit'"),
        (["--output", "x.safetensors"], "one --sparsity"),
        (["--output", "x.bin", "--sparsity", "2:4"], "takes a .safetensors file"),
        (["--model", "nobody"], "the settings have no model 'nobody'; choose one with --model: model"),
    ],
)
def test_a_wrong_option_is_one_sentence_with_what_there_is(arguments: Sequence[str], said: str) -> None:
    done = invoke(*arguments)
    assert said in str(done.exception)
    assert "UsageError" in type(done.exception).__name__


def test_the_table_has_every_candidate_and_the_lines_to_paste(capsys: pytest.CaptureFixture[str]) -> None:
    table = [
        tried("fp32", 4.0, 0.0),
        tried("bf16", 1.0, 0.004),
        tried("fp32", 3.9, 0.3, sparsity="magnitude", verdict="x"),
    ]
    show(Comparison("m", "cpu", 0.02, table, judge(table[:2], 0.02), ["a note"]))
    said = capsys.readouterr().out
    assert "4.00×" in said
    assert "note: a note" in said
    assert said.endswith("inference:\n  precision: bf16\n  compile: none\n")
    assert "magnitude" in said


@pytest.mark.parametrize("width", [80, 120])
def test_the_whole_matrix_can_be_read_on_a_screen(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On 80 columns the verdicts were cut off, and most lines told what the machine has not, again and again."""
    monkeypatch.setattr("forebay.cli.optimize_view._WIDE", width)
    needs = "needs a CUDA device of compute capability 8.0 or later, and inference.device is cpu"
    compilers = ("none", "inductor", "aoti", "cudagraph")
    table = [tried("fp32", 4.0, 0.0), tried("fp16", 1.0, float("inf"))]
    table += [tried("int8_weight_only", 3.0, 0.004, compile=one) for one in compilers[:3]]
    table += [tried("tf32", 0.0, 0.0, compile=one, verdict=f"not here: {needs}") for one in compilers]
    table += [tried(one, 0.0, 0.0, compile="cudagraph", verdict="not here: needs a GPU") for one in ("fp32", "bf16")]
    table += [tried("int8", 0.0, 0.0, compile="aoti", verdict="fails: torch.export cannot export Net; set none")]
    table += [tried("fp32", 4.0, 0.3, sparsity="magnitude", verdict="passes; --output writes it")]
    show(Comparison("m", "cpu", 0.02, table, judge(table[:5], 0.02)))
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= width
    lines = [" ".join(line.split()) for line in said.splitlines()]
    assert sum(line.startswith("not here: tf32: needs a CUDA device") for line in lines) == 1
    assert "not here: cudagraph: needs a GPU" in lines
    assert any(line.startswith("fails: int8 aoti: torch.export cannot export Net") for line in lines)
    assert any(line.startswith("fp16 1000.000 500.000 4.00× inf deviates") for line in lines)
    assert any(line.startswith("int8_weight_only inductor") and line.endswith("not faster") for line in lines)


def test_precisions_that_the_machine_lacks_are_named_where_nothing_is_compiled(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They used to be called by their compilation, none."""
    table = [Tried("fp32", "none", 8, 0.004, 0.001, 0.0, "ran")]
    table += [Tried(name, "none", verdict="not here: needs a CUDA device") for name in ("tf32", "int4")]
    show(Comparison("m", "cpu", 0.02, table, table[0]))
    assert "not here: tf32, int4: needs a CUDA device" in capsys.readouterr().out


def test_where_nothing_passes_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    table = [tried("fp32", 0.0, 0.0, verdict="fails: no memory")]
    show(Comparison("m", "cpu", 0.02, table, judge(table, 0.02)))
    assert capsys.readouterr().out.strip().endswith("nothing to set: no candidate ran and deviates at most 0.02")
