"""Latency of a lone request on an idle worker against a bare echo: `python bench/latency.py`.

Both answer the same requests, one at a time, in turn: what Forebay adds is the difference of the medians. Exits 1 where
it is more than the project promises. `--json` prints the figures for programs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import uuid

import confluent_kafka as ck
from rich.console import Console
from rich.table import Table
from rig import HERE, Message, Topics, broker, environment, make_topics, worker_command
from throughput import binary_requests

ADDED_MS = 3.0


class Asker:
    """Sends one request at a time and waits for its answer."""

    def __init__(self, address: str, topics: Topics) -> None:
        self._producer = ck.Producer({"bootstrap.servers": address, "linger.ms": 0})
        self._consumer = ck.Consumer(
            {"bootstrap.servers": address, "group.id": uuid.uuid4().hex, "fetch.wait.max.ms": 500}
        )
        partitions = self._consumer.list_topics(topics.results).topics[topics.results].partitions
        self._consumer.assign([ck.TopicPartition(topics.results, number, ck.OFFSET_BEGINNING) for number in partitions])
        self._topic = topics.requests

    def ask(self, message: Message, timeout: float = 60.0) -> float:
        """Return the milliseconds from sending a request to reading its answer."""
        value, headers = message
        key = uuid.uuid4().hex.encode()
        began = time.perf_counter()
        self._producer.produce(self._topic, value, key, headers=headers)
        self._producer.poll(0)
        while time.perf_counter() - began < timeout:
            answer = self._consumer.poll(0.2)
            if answer is not None and answer.error() is None and answer.key() == key:
                return (time.perf_counter() - began) * 1000
        raise SystemExit(f"no answer on the results of {self._topic} within {timeout:.0f} s")


def main() -> None:
    """Measure both, in turn, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with broker() as address:
        ours, bare = make_topics(address, 1), make_topics(address, 1)
        settings: dict[str, object] = {"model.factory": "models:Identity", "inference.threads": 1}
        contestants = [
            subprocess.Popen(worker_command(address, ours, settings), cwd=HERE, env=environment()),
            subprocess.Popen(
                [sys.executable, "bare.py", "echo", address, bare.requests, bare.results, "0"],
                cwd=HERE,
                env=environment(),
            ),
        ]
        try:
            times = measure(Asker(address, ours), Asker(address, bare), arguments.requests)
        finally:
            for contestant in contestants:
                contestant.terminate()
            for contestant in contestants:
                contestant.wait()
    show(times, as_json=arguments.json)


def measure(ours: Asker, bare: Asker, count: int) -> tuple[list[float], list[float]]:
    """Ask both in turn, after some requests to warm up."""
    message = next(binary_requests(1))
    for _ in range(20):
        ours.ask(message)
        bare.ask(message)
    forebay: list[float] = []
    echo: list[float] = []
    for _ in range(count):
        forebay.append(ours.ask(message))
        echo.append(bare.ask(message))
        time.sleep(0.005)
    return forebay, echo


def show(times: tuple[list[float], list[float]], *, as_json: bool) -> None:
    """Print the quantiles, and exit 1 where the median is too far from the echo's."""
    rows = {
        name: {"p50": statistics.median(values), "p99": statistics.quantiles(values, n=100)[98]}
        for name, values in zip(("forebay", "bare echo"), times, strict=True)
    }
    added = rows["forebay"]["p50"] - rows["bare echo"]["p50"]
    if as_json:
        print(json.dumps({**rows, "added_p50_ms": added, "wanted_ms": ADDED_MS}, indent=2))
    else:
        table = Table("a lone request", "p50 ms", "p99 ms")
        for name, row in rows.items():
            table.add_row(name, f"{row['p50']:.2f}", f"{row['p99']:.2f}")
        verdict = "[green]holds[/]" if added <= ADDED_MS else "[red]missed[/]"
        table.add_row(f"added (wanted: at most {ADDED_MS:.0f} ms) {verdict}", f"{added:.2f}", "")
        Console().print(table)
    sys.exit(0 if added <= ADDED_MS else 1)


if __name__ == "__main__":
    main()
