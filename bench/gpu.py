"""What a CUDA device makes of Forebay, in about ten minutes: `python bench/gpu.py`, with torch 2.11 or later.

Needs no Java and no Docker: Kafka is librdkafka's mock cluster, which keeps little, so requests are published while
they are answered. For each model it measures the model alone (inputs copied in and results out, the same batch size),
the worker with the CUDA device, and the worker with a model that does nothing: the ceiling of Kafka and Python.
`efficiency` is the worker over the smaller of the other two. Then `forebay optimize` measures every precision,
uncompiled and as CUDA graphs, on a model of many small kernels. `--device fake` tries the script where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass

import confluent_kafka as ck
import torch
from gpu_models import Copies, Wide
from rig import HERE, Topics, make_topics, median, worker_command
from throughput import binary_requests

from forebay import Model
from forebay.stream.mock import mock_cluster

MODELS: dict[str, tuple[Callable[[], Model], int, int]] = {"wide": (Wide, 1_024, 256), "copies": (Copies, 8_192, 64)}
"""Model, bytes per request, rows per batch."""

_KEPT_BYTES = 8_000_000
"""The mock keeps 5 MB in each of four partitions; requests do not spread evenly."""

_SETTLE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Requests per second of one model."""

    model: str
    batch: int
    alone: float
    ceiling: float
    worker: float
    efficiency: float
    idle_ms_per_batch: float


def alone(make: Callable[[], Model], size: int, batch: int, device: torch.device, seconds: float) -> float:
    """Run the model in a loop that copies in and out with page-locked memory, and return rows per second."""
    model = make()
    model.load(device)
    is_cuda = device.type == "cuda"
    staged = torch.randint(0, 256, (batch, size), dtype=torch.uint8)
    home = torch.empty(batch, dtype=torch.float32)
    if is_cuda:
        staged, home = staged.pin_memory(), home.pin_memory()
    done, began = 0, 0.0
    with torch.inference_mode():
        for turn in range(1_000_000):
            home.copy_(model.forward(staged.to(device, non_blocking=True)), non_blocking=True)
            if is_cuda and turn % 2:
                torch.cuda.synchronize()
            if turn == 20:
                began = time.perf_counter()
            elif turn > 20:
                done += batch
                if time.perf_counter() - began > seconds:
                    break
    if is_cuda:
        torch.cuda.synchronize()
    return done / (time.perf_counter() - began)


def served(address: str, model: str, size: int, settings: dict[str, object], seconds: float) -> float:
    """Let a worker answer for some seconds, with as many requests ahead of it as the mock keeps; return its rate."""
    topics = make_topics(address)
    worker = subprocess.Popen(worker_command(address, topics, {"model.factory": model, **settings}), cwd=HERE)
    try:
        return _rate(address, topics, size, seconds, worker)
    finally:
        worker.terminate()
        worker.wait(60)


def _rate(address: str, topics: Topics, size: int, seconds: float, worker: subprocess.Popen[bytes]) -> float:
    producer = ck.Producer({"bootstrap.servers": address, "linger.ms": 2})
    consumer = ck.Consumer({"bootstrap.servers": address, "group.id": uuid.uuid4().hex})
    partitions = consumer.list_topics(topics.results).topics[topics.results].partitions
    consumer.assign([ck.TopicPartition(topics.results, number, 0) for number in partitions])
    [(value, headers)] = binary_requests(1, size)
    ahead = _KEPT_BYTES // (size + 300)
    sent = got = 0
    first: tuple[float, int] | None = None
    since = time.monotonic()
    while worker.poll() is None:
        while sent - got < ahead:
            producer.produce(topics.requests, value, b"%d" % sent, headers=headers)
            sent += 1
        producer.poll(0)
        got += sum(message.error() is None for message in consumer.consume(5_000, 0.002))
        now = time.monotonic()
        if not got:
            since = now
        elif first is None and now - since > _SETTLE_SECONDS:
            first = (now, got)
        elif first is not None and now - first[0] > seconds:
            consumer.close()
            producer.purge()
            producer.flush(5)
            return (got - first[1]) / (now - first[0])
    raise SystemExit(f"the worker ended with {worker.returncode}")


def measure(address: str, name: str, asked: argparse.Namespace) -> Measured:
    """Measure one model."""
    make, size, batch = MODELS[name]
    device, seconds = asked.device, asked.seconds
    settings: dict[str, object] = {
        "inference.device": device,
        "inference.compile": asked.compile,
        "batch.max_batch_size": batch,
    }
    place = torch.device("cpu" if device.startswith("fake") else device)
    rates: dict[str, list[float]] = {"alone": [], "ceiling": [], "worker": []}
    for _ in range(asked.rounds):
        rates["alone"].append(alone(make, size, batch, place, seconds / 2))
        nothing = {**settings, "inference.device": "cpu", "inference.compile": "none", "model.options": {"size": size}}
        rates["ceiling"].append(served(address, "gpu_models:Nothing", size, nothing, seconds))
        rates["worker"].append(served(address, f"gpu_models:{make.__name__}", size, settings, seconds))
    found = {kind: median(values) for kind, values in rates.items()}
    efficiency = found["worker"] / min(found["alone"], found["ceiling"])
    idle = 1000 * batch * max(1 / found["worker"] - 1 / found["alone"], 0.0)
    return Measured(name, batch, found["alone"], found["ceiling"], found["worker"], efficiency, idle)


def optimised(device: str, precisions: str) -> dict[str, object]:
    """Return what `forebay optimize` finds for the model of many small kernels."""
    settings = {"model.factory": "gpu_models:Deep", "inference.device": device, "batch.max_batch_size": 32}
    command = [sys.executable, "-m", "forebay", "optimize", "--json", "--compile", "none,cudagraph"]
    command += ["--precision", precisions, "--sparsity", "2:4"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else {"optimize": done.stderr.strip()}  # type: ignore[no-any-return]


def describe(device: str) -> dict[str, object]:
    """Return what the figures are of."""
    found: dict[str, object] = {"torch": torch.__version__, "python": platform.python_version(), "device": device}
    if device.startswith("cuda"):
        found["gpu"] = torch.cuda.get_device_name(device)
        found["matmul_precision"] = torch.get_float32_matmul_precision()
        found["clocks"] = _clocks()
    return found


def _clocks() -> str:
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,temperature.gpu,power.draw", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def run_gpu_tests() -> bool:
    """Run the tests that need a device; return whether they passed."""
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-m", "gpu", "tests/gpu"]
    return subprocess.run(command, cwd=HERE.parent, check=False).returncode == 0


def main() -> None:
    """Measure every model and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--only", choices=MODELS, nargs="*", default=list(MODELS))
    parser.add_argument("--no-tests", action="store_true", help="leave out tests/gpu")
    parser.add_argument("--compile", default="none", help="inference.compile of the worker")
    parser.add_argument("--precisions", default="all", help="those that forebay optimize tries; none leaves it out")
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} sees no CUDA device; --device fake tries the script without one")
    passed = arguments.no_tests or run_gpu_tests()
    print(json.dumps(describe(arguments.device)), flush=True)
    with mock_cluster() as address:
        for name in arguments.only:
            found = measure(address, name, arguments)
            print(json.dumps(asdict(found)), flush=True)
    if arguments.precisions != "none":
        print(json.dumps(optimised(arguments.device, arguments.precisions)), flush=True)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
