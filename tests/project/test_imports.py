"""Importing forebay is cheap and brings nothing heavy, and the rooms stay apart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.markdown import ROOT

MEASURE = """
import time
start = time.process_time()
import forebay
print(time.process_time() - start)
"""


def python(code: str) -> str:
    """Return what a new interpreter prints for the code."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_by(statement: str) -> set[str]:
    """Return the top-level modules that are loaded after the statement."""
    return set(python(f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})").split())


def test_importing_forebay_takes_under_three_tenths_of_a_second() -> None:
    """Of a core: what others do on this machine does not count."""
    best = min(float(python(MEASURE)) for _ in range(5))
    assert best < 0.3, f"the best of 5 imports took {best:.3f} s; look at python -X importtime -c 'import forebay'"


@pytest.mark.parametrize("statement", ["import forebay", "from forebay import Model, TensorSpec"])
def test_importing_forebay_loads_neither_torch_nor_the_kafka_client_nor_pydantic(statement: str) -> None:
    assert not loaded_by(statement) & {"torch", "confluent_kafka", "pydantic", "numpy", "typer"}


def test_the_command_line_loads_neither_torch_nor_the_kafka_client_before_a_command_runs() -> None:
    assert not loaded_by("import forebay.cli") & {"torch", "confluent_kafka"}


def test_the_import_contracts_hold() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
