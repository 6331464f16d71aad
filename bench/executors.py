"""What an executor leaves of a model's own speed: `python bench/executors.py`.

A backlog of JSON requests on a real Kafka goes through the worker with `inference.executor` `process` and `thread`,
and through what is often written instead: a loop that hands batches to a pool of four threads, which parse, run the
model and produce. Each is compared with the model alone at the same batch size, on one thread of torch; `process` is
to keep 0.95. Prints ratios of medians; `--json` prints the figures. Exits with 1 where the wanted ratio is missed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console
from rich.table import Table
from rig import HERE, Message, broker, environment, fill, make_topics, median, rate, run, worker_command

WANTED = 0.95
NAIVE_THREADS = 4
_ALONE_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its batch size, and how many requests are a backlog of some seconds on one core."""

    name: str
    factory: str
    rows: int
    requests: int
    is_promised: bool


CASES = (
    Case("deep", "executor_models:Busy", 32, 8_000, True),
    Case("images", "executor_models:Pixels", 8, 160, True),
    Case("perceptron", "executor_models:Perceptron", 32, 60_000, False),
)
"""The perceptron of microseconds has no promise: there a row costs less than the JSON that brings it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant beside the model alone, in rows per second."""

    model: str
    contestant: str
    rows_per_second: float
    alone: float
    ratio: float


def requests(case: Case, count: int) -> Iterator[Message]:
    """Yield JSON requests of one row each."""
    random = np.random.default_rng(0)
    if case.name == "images":
        name, kind, shape = "pixels", "UINT8", [1, 224, 224, 3]
        rows = [random.integers(0, 256, 224 * 224 * 3).tolist() for _ in range(4)]
    else:
        name, kind, shape = "x", "FP32", [1, 384]
        rows = [random.random(384).round(7).tolist() for _ in range(64)]
    bodies = [json.dumps([{"name": name, "datatype": kind, "shape": shape, "data": row}]).encode() for row in rows]
    for number in range(count):
        yield b'{"id":"%d","inputs":%s}' % (number, bodies[number % len(bodies)]), []


def alone(name: str, rows: int) -> None:
    """Print the rows per second of full batches, one after the other."""
    import torch
    from executor_models import inputs_of, load

    torch.set_num_threads(1)
    model = load(name)
    inputs = inputs_of(model, rows)
    with torch.inference_mode():
        for _ in range(3):
            model.forward(**inputs)
        batches, began = 0, time.perf_counter()
        while (took := time.perf_counter() - began) < _ALONE_SECONDS:
            model.forward(**inputs)
            batches += 1
    print(rows * batches / took)


def naive(name: str, size: int, address: str, source: str, target: str, count: int) -> None:
    """Consume batches, hand each to a pool of threads, commit when all are answered."""
    import orjson
    import torch
    from bare import _clients
    from executor_models import load

    torch.set_num_threads(1)
    model = load(name)
    (spec,), dtype = model.inputs, torch.uint8 if name == "images" else torch.float32
    consumer, producer = _clients(address, source)

    def answer(values: list[bytes]) -> int:
        bodies = [orjson.loads(value) for value in values]
        rows = [torch.tensor(body["inputs"][0]["data"], dtype=dtype) for body in bodies]
        with torch.inference_mode():
            found = model.forward(**{spec.name: torch.stack(rows).view(len(rows), *list(spec.shape)[1:])})
        results = found["probabilities"] if isinstance(found, dict) else found
        for body, result in zip(bodies, results.tolist(), strict=True):
            output = {"name": "y", "shape": [1, len(result)], "datatype": "FP32", "data": result}
            producer.produce(target, orjson.dumps({"id": body["id"], "outputs": [output]}), body["id"])
        return len(bodies)

    done, running = 0, deque[Future[int]]()
    with ThreadPoolExecutor(NAIVE_THREADS) as pool:
        while done < count:
            if len(running) < 2 * NAIVE_THREADS and (messages := consumer.consume(size, 0.05)):
                running.append(pool.submit(answer, [message.value() for message in messages]))
            producer.poll(0)
            while running and (running[0].done() or len(running) >= 2 * NAIVE_THREADS):
                done += running.popleft().result()
    producer.flush()
    consumer.commit(asynchronous=False)
    consumer.close()


def measure(address: str, case: Case, contestant: str, count: int) -> float:
    """Return the results per second of one contestant."""
    if contestant == "alone":
        command = [sys.executable, "bench/executors.py", "--alone", case.name, str(case.rows)]
        return float(
            subprocess.run(
                command, cwd=HERE.parent, env=environment(), check=True, capture_output=True, text=True
            ).stdout
        )
    topics = make_topics(address)
    fill(address, topics.requests, requests(case, count))
    if contestant == "naive":
        command = [sys.executable, "bench/executors.py", "--naive", case.name, str(case.rows)]
        command += [address, topics.requests, topics.results, str(count)]
        run(command, folder=HERE.parent)
    else:
        settings: dict[str, object] = {
            "model.factory": case.factory,
            "batch.max_batch_size": case.rows,
            "inference.device": "cpu",
            "inference.threads": 1,
            "inference.executor": contestant,
        }
        run(worker_command(address, topics, settings, "--until-end"), folder=HERE.parent)
    return rate(address, topics.results, count)


def compare(rounds: int, scale: float, only: list[str]) -> list[Row]:
    """Measure every contestant of every case, in turn."""
    found: list[Row] = []
    contestants = ("alone", "process", "thread", "naive")
    with broker() as address:
        for case in (case for case in CASES if case.name in only):
            rates: dict[str, list[float]] = {contestant: [] for contestant in contestants}
            for _ in range(rounds):
                for contestant, measured in rates.items():
                    print(f"measuring {case.name}: {contestant} …", file=sys.stderr, flush=True)
                    measured.append(measure(address, case, contestant, max(int(case.requests * scale), 4 * case.rows)))
            reference = median(rates.pop("alone"))
            for contestant, measured in rates.items():
                found.append(Row(case.name, contestant, median(measured), reference, median(measured) / reference))
    return found


def main() -> None:
    """Measure and print, or be a contestant."""
    if sys.argv[1:2] == ["--alone"]:
        return alone(sys.argv[2], int(sys.argv[3]))
    if sys.argv[1:2] == ["--naive"]:
        return naive(sys.argv[2], int(sys.argv[3]), *sys.argv[4:7], int(sys.argv[7]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests")
    parser.add_argument("--only", choices=[case.name for case in CASES], nargs="*")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = compare(arguments.rounds, arguments.scale, arguments.only or [case.name for case in CASES])
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        table = Table("model", "executor", "rows/s", "the model alone", "ratio")
        for row in rows:
            table.add_row(
                row.model, row.contestant, f"{row.rows_per_second:,.0f}", f"{row.alone:,.0f}", f"{row.ratio:.2f}"
            )
        Console(width=100).print(table)
    promised = {case.name for case in CASES if case.is_promised}
    kept = [row.ratio >= WANTED for row in rows if row.contestant == "process" and row.model in promised]
    sys.exit(0 if all(kept) else 1)


if __name__ == "__main__":
    main()
