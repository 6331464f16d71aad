"""What delivery costs: takeover after a death, exactly-once throughput, settle time: `python bench/delivery.py`.

Prints one row per promise and exits 1 where one is missed. `--rounds` repeats the throughput of each guarantee in turn;
`--kills` is the number of deaths. `--json` prints the figures for programs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import confluent_kafka as ck
from confluent_kafka.admin import AdminClient
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table
from rig import HERE, Topics, broker, fill, make_topics, median, rate, worker_command
from throughput import binary_requests

from forebay.broker import free_port

PARTITIONS = 4
TAKEOVER_SECONDS, RATIO, SETTLE_SECONDS = 7.0, 0.9, 0.015
STEADY = {"model.factory": "models:Steady", "batch.max_batch_size": 32, "inference.threads": 1}
"""A model that takes 5 ms for a batch, however large."""
STEADY_RATE, STEADY_REQUESTS = 1_000, 10_000


@dataclass(frozen=True, slots=True)
class Row:
    """One promise and what was measured."""

    what: str
    measured: float
    wanted: str
    holds: bool
    beside: str = ""


class Trickle:
    """Sends requests to each partition in turn, on a thread of its own, until the block ends."""

    def __init__(self, address: str, topic: str, per_second: float = 100.0) -> None:
        self._producer = ck.Producer({"bootstrap.servers": address, "linger.ms": 0})
        self._topic = topic
        self._gap = 1 / per_second
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)

    def __enter__(self) -> Trickle:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._producer.flush(10)

    def _send(self) -> None:
        [(value, headers)] = binary_requests(1)
        for number in range(1 << 60):
            if self._end.wait(self._gap):
                return
            self._producer.produce(self._topic, value, b"%d" % number, number % PARTITIONS, headers=headers)
            self._producer.poll(0)


def takeover(address: str, kills: int, seed: int) -> list[Row]:
    """Kill one of two workers under a trickle, again and again, with the settings that nobody has changed."""
    chance = random.Random(seed)
    topics, group = make_topics(address, PARTITIONS), f"takeover-{seed}"
    settings = {"kafka.group_id": group, **STEADY}
    command = worker_command(address, topics, settings)
    seconds: list[float] = []
    with Trickle(address, topics.requests), contextlib.ExitStack() as stack:
        workers = [stack.enter_context(_process(command)) for _ in range(2)]
        for kill in range(kills):
            _await_members(address, group, 2)
            time.sleep(chance.uniform(1, 3))
            victim = workers[kill % 2]
            victim.send_signal(signal.SIGKILL)
            seconds.append(_silence(address, topics.results, time.time()))
            print(f"kill {kill + 1} of {kills}: {seconds[-1]:.2f} s", file=sys.stderr, flush=True)
            workers[kill % 2] = stack.enter_context(_process(command))
    return [
        Row(
            f"seconds from kill -9 to the other worker's first result, worst of {kills}, seed {seed}",
            max(seconds),
            f"≤ {TAKEOVER_SECONDS:g}",
            max(seconds) <= TAKEOVER_SECONDS,
            f"median {median(seconds):.2f}",
        )
    ]


def _silence(address: str, results: str, killed: float) -> float:
    """Return how long after a death the last of the input partitions has a result again.

    Those of the survivor go on at once. What the dead worker had sent arrives within the first half second.
    """
    consumer = ck.Consumer({"bootstrap.servers": address, "group.id": "unused", "fetch.wait.max.ms": 50})
    parts = consumer.list_topics(results, timeout=10).topics[results].partitions
    consumer.assign([ck.TopicPartition(results, number, ck.OFFSET_END) for number in parts])
    first: dict[bytes, float] = {}
    deadline = time.time() + 120
    while len(first) < PARTITIONS and time.time() < deadline:
        for message in consumer.consume(500, 0.1):
            stamp = message.timestamp()[1] / 1000
            if message.error() is None and stamp > killed + 0.5:
                source = dict(message.headers() or [])["source"]
                first.setdefault(bytes(source).split(b"/")[1], stamp - killed)
    consumer.close()
    if len(first) < PARTITIONS:
        raise SystemExit("nobody took the partitions over within two minutes")
    return max(first.values())


def _await_members(address: str, group: str, wanted: int) -> None:
    """Return once that many members share the partitions evenly."""
    admin = AdminClient({"bootstrap.servers": address})
    deadline, held = time.time() + 300, [0]
    while time.time() < deadline:
        with contextlib.suppress(ck.KafkaException):
            found = admin.describe_consumer_groups([group])[group].result().members
            held = [len(one.assignment.topic_partitions) for one in found if one.assignment is not None]
            if held == [PARTITIONS // wanted] * wanted:
                return
        time.sleep(0.2)
    raise SystemExit(f"{group} does not get {wanted} members, it has some with {held} partitions")


def exactly_once(address: str, rounds: int, count: int) -> list[Row]:
    """A backlog for a model of 5 ms per batch, under each guarantee, in turn; and how long transactions took.

    A round before warms the broker up: Java interprets its first hundreds of transactions, which take three times as
    long. The last row is of requests that come steadily.
    """
    rates: dict[str, list[float]] = {"at_least_once": [], "exactly_once": []}
    buckets: dict[float, float] = {}
    for number in range(rounds + 1):
        for guarantee, found in rates.items():
            topics = make_topics(address, PARTITIONS)
            fill(address, topics.requests, binary_requests(count))
            durations = _serve(address, topics, guarantee, count)
            if number:
                found.append(rate(address, topics.results, count))
                buckets = {bound: buckets.get(bound, 0) + many for bound, many in durations.items()} or buckets
    steady = _steadily(address)
    fast, slow = median(rates["at_least_once"]), median(rates["exactly_once"])
    beside = f"{slow:,.0f}/s against {fast:,.0f}/s, {rounds} rounds of {count:,}"
    return [
        Row(
            "exactly_once : at_least_once, 5 ms per batch of 32",
            slow / fast,
            f"≥ {RATIO}",
            slow / fast >= RATIO,
            beside,
        ),
        _settle("full backlog", buckets),
        _settle(f"{STEADY_RATE:,}/s", steady),
    ]


def _settle(load: str, buckets: dict[float, float]) -> Row:
    """Judge how long transactions took."""
    p95, many = _quantile(buckets, 0.95), max(buckets.values())
    within = buckets.get(SETTLE_SECONDS, 0) / many
    beside = f"median {_quantile(buckets, 0.5) * 1000:.1f}, {within:.1%} within 15 ms, {many:.0f} of them"
    what = f"ms of a transaction, 95th percentile, {load}"
    return Row(what, p95 * 1000, "< 15", p95 < SETTLE_SECONDS, beside)


def _steadily(address: str) -> dict[float, float]:
    """Let a worker answer what comes steadily; return the buckets of its transactions' durations.

    What waited while it started, and as many requests again, are not counted.
    """
    topics = make_topics(address, PARTITIONS)
    with Trickle(address, topics.requests, STEADY_RATE), _worker(address, topics, "exactly_once") as (worker, port):
        begun = _answered(worker, port, STEADY_REQUESTS)
        ended = _answered(worker, port, 2 * STEADY_REQUESTS)
    return {bound: many - begun[bound] for bound, many in ended.items()}


def _serve(address: str, topics: Topics, guarantee: str, count: int) -> dict[float, float]:
    """Let a worker answer everything; return the buckets of its transactions' durations."""
    with _worker(address, topics, guarantee) as (worker, port):
        _answered(worker, port, count)
        time.sleep(1)  # the gauges are refreshed now and then
        found = _answered(worker, port, count)
        worker.send_signal(signal.SIGTERM)
        if worker.wait(60) != 0:
            raise SystemExit(f"the worker ended with {worker.returncode}")
    return found if found[float("inf")] else {}


@contextlib.contextmanager
def _worker(address: str, topics: Topics, guarantee: str) -> Iterator[tuple[subprocess.Popen[Any], int]]:
    """Run a worker for the model of 5 ms; yield it and its HTTP port."""
    port = free_port()
    settings = {"delivery.guarantee": guarantee, "ops.port": port, **STEADY}
    with _process(worker_command(address, topics, settings)) as worker:
        yield worker, port


def _answered(worker: subprocess.Popen[Any], port: int, count: int) -> dict[float, float]:
    """Wait until so many requests are answered; return the buckets of the transactions' durations."""
    deadline = time.time() + 300
    while (metrics := _metrics(port)).get("forebay_requests_total", {}).get(0.0, 0) < count:
        if worker.poll() is not None or time.time() > deadline:
            raise SystemExit(f"the worker has not answered {count} requests")
        time.sleep(0.3)
    return metrics["forebay_transaction_duration_seconds_bucket"]


def _metrics(port: int) -> dict[str, dict[float, float]]:
    """Return every sample by its name and bucket, summed over other labels."""
    found: dict[str, dict[float, float]] = {}
    with contextlib.suppress(OSError):
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                own = found.setdefault(sample.name, {})
                bucket = float(sample.labels.get("le", 0))
                own[bucket] = own.get(bucket, 0) + sample.value
    return found


def _quantile(buckets: dict[float, float], share: float) -> float:
    """Return a quantile, interpolated within its bucket."""
    wanted, below, lower = share * max(buckets.values()), 0.0, 0.0
    for bound, number in sorted(buckets.items()):
        if number >= wanted:
            return lower + (bound - lower) * (wanted - below) / (number - below) if bound != float("inf") else bound
        below, lower = number, bound
    return lower


@contextlib.contextmanager
def _process(command: list[str]) -> Iterator[subprocess.Popen[Any]]:
    """Run a worker whose log is shown if it ends by itself; kill what is left of it."""
    with tempfile.TemporaryFile() as log:
        worker = subprocess.Popen(command, cwd=HERE, stderr=log)
        try:
            yield worker
        finally:
            if worker.poll() is None:
                worker.kill()
            if worker.wait() not in (0, -signal.SIGKILL):
                log.seek(0)
                print(log.read().decode()[-2000:], file=sys.stderr)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["takeover", "exactly-once"], nargs="*", default=["takeover", "exactly-once"])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, default=40_000, help="requests of a round")
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows: list[Row] = []
    with broker() as address:
        if "takeover" in arguments.only:
            rows += takeover(address, arguments.kills, arguments.seed)
        if "exactly-once" in arguments.only:
            rows += exactly_once(address, arguments.rounds, arguments.count)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2, ensure_ascii=False))
    else:
        table = Table("promise", "measured", "wanted", "", "")
        for row in rows:
            verdict = "[green]holds[/]" if row.holds else "[red]missed[/]"
            table.add_row(row.what, f"{row.measured:.2f}", row.wanted, verdict, row.beside)
        Console(width=150).print(table)
    sys.exit(0 if all(row.holds for row in rows) else 1)


if __name__ == "__main__":
    main()
