"""Throughput against a hand-written loop, a bare copy loop and the model alone: `python bench/throughput.py`.

Prints one row per comparison with the ratio that the project promises, and exits 1 where one is missed. `--rounds`
repeats every contestant, in turn; the medians are compared. `--json` prints the figures for programs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table
from rig import HERE, Message, broker, fill, make_topics, median, rate, run, worker_command

BARE = [sys.executable, "bare.py"]


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison."""

    what: str
    forebay: float
    reference: float
    ratio: float
    wanted: str
    holds: bool


def json_requests(count: int) -> Iterator[Message]:
    """Yield requests of 384 floats in JSON."""
    random = np.random.default_rng(0)
    bodies = [json.dumps(random.random(384).round(7).tolist()) for _ in range(64)]
    for number in range(count):
        data = bodies[number % len(bodies)]
        yield (
            b'{"id":"%d","inputs":[{"name":"x","shape":[1,384],"datatype":"FP32","data":%s}]}'
            % (number, data.encode()),
            [],
        )


def binary_requests(count: int, size: int = 256, name: str = "x") -> Iterator[Message]:
    """Yield requests of one UINT8 tensor in the binary encoding."""
    tensor = {"name": name, "shape": [1, size], "datatype": "UINT8", "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [tensor]}).encode()
    value = head + os.urandom(size)
    headers = [
        ("content-type", b"application/octet-stream"),
        ("inference-header-content-length", b"%d" % len(head)),
    ]
    for _ in range(count):
        yield value, headers


def compare_with_loop(address: str, rounds: int, count: int) -> list[Row]:
    """JSON with 384 floats through a three-layer perceptron, against the hand-written loop."""
    found: dict[str, list[float]] = {"loop": [], "32": [], "256": []}
    for _ in range(rounds):
        for kind in found:
            topics = make_topics(address)
            fill(address, topics.requests, json_requests(count))
            if kind == "loop":
                run([*BARE, "loop", address, topics.requests, topics.results, str(count)])
            else:
                settings = {"model.factory": "models:Perceptron", "batch.max_batch_size": kind, "inference.threads": 1}
                run(worker_command(address, topics, settings, "--until-end"))
            found[kind].append(rate(address, topics.results, count))
    reference = median(found["loop"])
    return [
        _row(f"JSON, 384 floats, perceptron, batches of {size}: hand-written loop", median(found[size]), reference, 2.5)
        for size in ("32", "256")
    ]


def compare_with_copy(address: str, rounds: int, count: int) -> list[Row]:
    """256-byte binary requests through an identity model, against a loop that only copies."""
    found: dict[str, list[float]] = {"copy": [], "forebay": []}
    for _ in range(rounds):
        for kind in found:
            topics = make_topics(address)
            fill(address, topics.requests, binary_requests(count))
            if kind == "copy":
                run([*BARE, "copy", address, topics.requests, topics.results, str(count)])
            else:
                settings = {"model.factory": "models:Identity", "batch.max_batch_size": 512, "inference.threads": 1}
                run(worker_command(address, topics, settings, "--until-end"))
            found[kind].append(rate(address, topics.results, count))
    return [_row("256 bytes, identity: consume, produce, commit", median(found["forebay"]), median(found["copy"]), 0.6)]


def compare_with_model(address: str, rounds: int, count: int) -> list[Row]:
    """A full backlog for a model of some milliseconds per batch of 32, against the model alone on one core."""
    alone: list[float] = []
    found: list[float] = []
    for _ in range(rounds):
        output = subprocess.run(
            [sys.executable, "alone.py", "32", str(count // 32)], cwd=HERE, check=True, capture_output=True
        ).stdout
        alone.append(float(output))
        topics = make_topics(address)
        fill(address, topics.requests, json_requests(count))
        settings = {"model.factory": "models:Busy", "batch.max_batch_size": 32, "inference.threads": 1}
        run(worker_command(address, topics, settings, "--until-end"))
        found.append(rate(address, topics.results, count))
    milliseconds = 32_000 / median(alone)
    return [
        _row(
            f"full backlog, {milliseconds:.0f} ms per batch of 32: the model alone", median(found), median(alone), 0.95
        )
    ]


def measure_memory(address: str, _: int, count: int) -> list[Row]:
    """Resident memory of the parent with a backlog of requests of 175 KB, against 150 MB plus the queue limits."""
    topics = make_topics(address)
    fill(address, topics.requests, binary_requests(count, 175_000, "image"))
    settings = {"model.factory": "models:Large", "inference.threads": 1}
    worker = subprocess.Popen(worker_command(address, topics, settings, "--until-end"), cwd=HERE)
    largest, process = 0, psutil.Process(worker.pid)
    while worker.poll() is None:
        try:
            memory = process.memory_full_info()
            largest = max(largest, memory.rss)
        except psutil.Error:
            break
        time.sleep(0.05)
    if worker.wait() != 0:
        raise SystemExit(f"the worker ended with {worker.returncode}")
    megabytes = largest / 1_000_000
    limit = 150 + (67_108_864 + 32_768 * 1024) / 1_000_000
    return [
        Row(
            f"MB of the parent, {count} requests of 175 KB (limit: 150 + queues)",
            megabytes,
            limit,
            megabytes / limit,
            "≤ 1",
            megabytes <= limit,
        )
    ]


def _row(what: str, forebay: float, reference: float, wanted: float) -> Row:
    return Row(what, forebay, reference, forebay / reference, f"≥ {wanted}", forebay / reference >= wanted)


PARTS: dict[str, tuple[Callable[[str, int, int], list[Row]], int]] = {
    "loop": (compare_with_loop, 60_000),
    "copy": (compare_with_copy, 300_000),
    "model": (compare_with_model, 16_000),
    "memory": (measure_memory, 20_000),
}


def main() -> None:
    """Run the comparisons and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=PARTS, nargs="*", default=list(PARTS))
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows: list[Row] = []
    with broker() as address:
        for name in arguments.only:
            part, count = PARTS[name]
            print(f"measuring {name} …", file=sys.stderr, flush=True)
            rows += part(address, arguments.rounds, int(count * arguments.scale))
    show(rows, as_json=arguments.json)
    sys.exit(0 if all(row.holds for row in rows) else 1)


def show(rows: list[Row], *, as_json: bool) -> None:
    """Print the rows."""
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2, ensure_ascii=False))
        return
    table = Table("comparison", "forebay", "reference", "ratio", "wanted", "")
    for row in rows:
        table.add_row(
            row.what,
            f"{row.forebay:,.0f}" if row.forebay >= 100 else f"{row.forebay:,.2f}",
            f"{row.reference:,.0f}" if row.reference >= 100 else f"{row.reference:,.2f}",
            f"{row.ratio:.2f}",
            row.wanted,
            "[green]holds[/]" if row.holds else "[red]missed[/]",
        )
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
