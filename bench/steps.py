"""Continuous against static batching of a model that runs in steps: rows per second and latency, in one run.

The loop's own pool and batcher with a replica in a process; no Kafka, which costs both the same. A backlog for the
throughput; then arrivals at half of static's, for the latency.

    python bench/steps.py --requests 256 --rows 16
"""

from __future__ import annotations

import argparse
import random
import time
from itertools import count
from pathlib import Path
from statistics import quantiles

import numpy as np

from forebay.assembly import axes_of, joining, policy_of
from forebay.batching.batcher import Batcher
from forebay.inference.assembly import build_pool
from forebay.records import Encoding, Record, Request
from forebay.testing import memory_settings

ROOT = Path(__file__).resolve().parents[1]
SHORT, LONG = (5, 40), (150, 250)


def lengths(number: int) -> list[int]:
    """Return how many steps each request takes: one in eight is long."""
    dice = random.Random(1)
    return [dice.randint(*(LONG if dice.random() < 0.125 else SHORT)) for _ in range(number)]


class Side:
    """One way to dispatch, with a replica of its own."""

    def __init__(self, dispatch: str, rows: int) -> None:
        settings = memory_settings(
            {
                "model.factory": "bench.step_models:Writer",
                "batch.max_batch_size": rows,
                "batch.dispatch": dispatch,
                "inference.executor": "process",
                "inference.threads": 1,
            }
        )
        numbers = count(1)
        self.pool = build_pool(
            settings.served, (settings.inference, settings.batch, settings.delivery), [ROOT], numbers
        )
        self.pool.launch(time.monotonic())
        while not self.pool.ready:
            self.pool.collect(time.monotonic(), 0.05)
        signature = self.pool.signatures["model"]
        policy = policy_of(settings.batch)
        self.batcher = Batcher("model", joining(policy) if signature.room else policy, numbers, axes_of(signature))

    def run(self, steps: list[int], gaps: list[float]) -> tuple[float, list[float]]:
        """Return the seconds for all requests, which arrive after these gaps, and the latency of each."""
        began = time.monotonic()
        arrivals, at = [], 0.0
        for gap in gaps:
            at += gap
            arrivals.append(began + at)
        sent, latencies = 0, []
        while len(latencies) < len(steps):
            now = time.monotonic()
            while sent < len(steps) and arrivals[sent] <= now:
                self.batcher.add(asked(sent, steps[sent], arrivals[sent]))
                sent += 1
            while (free_at := self.pool.free_at("model")) is not None:
                batch = self.batcher.cut(now, free_at=free_at, draining=sent == len(steps))
                if batch is None:
                    break
                self.pool.submit(batch, now)
            for back in self.pool.collect(now, 0.002):
                assert not back.failures, back.failures[0][1]
                latencies += [time.monotonic() - one.arrived for members, _ in back.results for one in members]
        return time.monotonic() - began, latencies


def asked(number: int, steps: int, arrived: float) -> Request:
    """Return a request for a text of `steps` characters."""
    prompt = np.arange(1, 4 + number % 5, dtype="<i8")
    tensors = [prompt.tobytes(), np.array([steps], "<i8").tobytes()]
    record = Record("requests", 0, number, None, b"", [], 0)
    return Request(
        record=record,
        id=str(number),
        model="model",
        tensors=tensors,
        shapes=[(1, len(prompt)), (1, 1)],
        rows=1,
        item_bytes=sum(map(len, tensors)),
        lane="a",
        arrived=arrived,
        encoding=Encoding.BINARY,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--rows", type=int, default=16)
    options = parser.parse_args()
    steps = lengths(options.requests)
    sides = {dispatch: Side(dispatch, options.rows) for dispatch in ("static", "eager")}
    rates = {}
    for name, side in sides.items():
        seconds, _ = side.run(steps, [0.0] * len(steps))
        rates[name] = len(steps) / seconds
        print(f"{name:8} backlog: {rates[name]:7.1f} rows/s")
    print(f"ratio of throughput, continuous to static: {rates['eager'] / rates['static']:.2f}")
    dice = random.Random(2)
    gaps = [dice.expovariate(rates["static"] / 2) for _ in steps]
    for name, side in sides.items():
        _, latencies = side.run(steps, gaps)
        cuts = quantiles(latencies, n=100)
        print(f"{name:8} at half of static's rate: p50 {cuts[49] * 1000:7.0f} ms, p99 {cuts[98] * 1000:7.0f} ms")
    for side in sides.values():
        side.pool.stop(at_once=True)


if __name__ == "__main__":
    main()
