"""The questions of `forebay check` about this machine: torch, device, model, memory, the HTTP port."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cli.findings import Finding, failed, ok, skipped, warning
from forebay.wording import counted

if TYPE_CHECKING:
    from forebay.settings import ModelSettings, Ops, Settings

FIXES = {
    "syntax": "mend that file of the model: it does not parse",
    "import": "install that package in the worker's environment, or mend the import in the model's file",
    "factory": "mend model.factory of {name}: MODULE:CLASS, importable from here or from the folder of --config",
    "options": "mend model.options of {name}, or what the factory does with them",
    "weights": "mend model.weights of {name}",
    "code": "mend the model's code",
    "prepare": "mend what {name} prepares with, or set inference.prepare_workers to 0",
    "precision": "set inference.precision to fp32 or auto; forebay optimize tells what this machine has",
    "crash": "see the end of its message; python -c 'import MODULE' shows the rest",
}
"""What to do about a model that does not load, by the cause that `model_probe` names."""

REPLICA_BYTES = 500 * 2**20
"""What a replica takes before its model: torch alone is about 400 MB resident."""


def check_machine(settings: Settings, search: list[Path], *, load: bool) -> Iterator[Finding]:
    """Ask everything about this machine. `search` are folders to import models from; `load` False loads none."""
    yield from _models(settings, search, load=load)
    yield _memory(settings)
    yield _port(settings.ops, settings.kafka.group_id)


def _models(settings: Settings, search: list[Path], *, load: bool) -> Iterator[Finding]:
    if find_spec("torch") is None:
        yield failed("torch", "is not installed", "pip install 'forebay[torch]', or the build for your CUDA")
        return
    try:
        yield ok("torch", version("torch"))
    except PackageNotFoundError:
        yield ok("torch", "installed")
    if not settings.served:
        yield failed("model", "none is configured", "set model.factory (package.module:Class) in --config")
        return
    for model in settings.served:
        if load:
            yield from _probed(settings, model, search)
        else:
            yield skipped(f"model {model.name}", "not loaded (--no-load)")


def _probed(settings: Settings, model: ModelSettings, search: list[Path]) -> Iterator[Finding]:
    question = f"model {model.name}"
    seconds = settings.inference.start_timeout_ms / 1000
    try:
        done = subprocess.run(
            [sys.executable, "-m", "forebay.cli.model_probe"],
            input=_start(settings, model, search),
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        yield failed(question, f"is not loaded after {seconds:g} s", "raise inference.start_timeout_ms")
        return
    answer = _answer(done)
    if "device" in answer:
        yield ok("device", _describe(answer))
    error = answer.get("error")
    if error is None:
        yield ok(question, f"loads and runs: {', '.join(answer['inputs'])} → {', '.join(answer['outputs'])}")
    elif answer.get("question") == "device":
        yield failed("device", error, "set inference.device to auto or cpu, or install a torch build for the device")
    else:
        yield failed(question, error, FIXES[answer.get("cause", "crash")].format(name=model.name))


def _start(settings: Settings, model: ModelSettings, search: list[Path]) -> bytes:
    import msgspec

    from forebay.inference.assembly import start_of
    from forebay.inference.staging import SlotSize

    start = start_of(model, settings.inference, settings.batch, search, SlotSize(0, 0))
    return msgspec.json.encode(start)


def _answer(done: subprocess.CompletedProcess[bytes]) -> dict[str, Any]:
    import orjson

    try:
        answer: dict[str, Any] = orjson.loads(done.stdout)
    except orjson.JSONDecodeError:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        last = lines[-1] if lines else "no message"
        return {"error": f"its process ended with {done.returncode}: {last}"}
    return answer


def _describe(answer: dict[str, Any]) -> str:
    if "device_name" not in answer:
        return str(answer["device"])
    free, total = answer["free_bytes"] / 2**30, answer["total_bytes"] / 2**30
    return f"{answer['device']}: {answer['device_name']}, {free:.1f} of {total:.1f} GiB free"


def _memory(settings: Settings) -> Finding:
    import psutil

    inference = settings.inference
    told_of = counted(inference.replicas * max(1, len(settings.served)), "replica")
    if inference.prepare_workers:
        told_of += f" with {counted(inference.prepare_workers * max(1, len(settings.served)), 'preparer')}"
    replicas = (inference.replicas + inference.prepare_workers) * max(1, len(settings.served))
    needed = settings.batch.max_queue_bytes + replicas * (REPLICA_BYTES + 2 * settings.batch.max_batch_bytes)
    free = psutil.virtual_memory().available
    limit = _container_limit()
    if limit is not None:
        free = min(free, limit)
    told = f"{free / 2**30:.1f} GiB free; queue, staging and {told_of} take about "
    told += f"{needed / 2**30:.1f} GiB before their models"
    if free < needed:
        fix = "lower inference.replicas, inference.prepare_workers, batch.max_queue_bytes or batch.max_batch_bytes, "
        fix += "or give the worker more memory"
        return warning("memory", told, fix)
    return ok("memory", told)


def _container_limit() -> int | None:
    """Give what a cgroup leaves, None without a limit."""
    folder = Path("/sys/fs/cgroup")
    try:
        return int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
    except (OSError, ValueError):
        return None


def _port(ops: Ops, group: str) -> Finding:
    if ops.port == 0:
        return ok("HTTP port", "a free one is taken at start")
    family = socket.AF_INET6 if ":" in ops.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((ops.host, ops.port))
        except OSError as error:
            return _taken(ops, group, (error.strerror or str(error)).lower())
    return ok("HTTP port", f"{ops.host}:{ops.port} is free")


def _taken(ops: Ops, group: str, why: str) -> Finding:
    """Tell whose the port is: beside a running worker of this group a check of its configuration is no failure."""
    from forebay.cli.at_hand import worker_at_hand

    question, where, free = "HTTP port", f"{ops.host}:{ops.port}", "set ops.port to another; 0 takes a free one"
    worker = worker_at_hand(ops)
    if worker is None:
        return failed(question, f"{where} cannot be taken: {why}", f"stop what listens there, or {free}")
    if worker.group_id == group:
        return warning(question, f"a worker of this group, {group}, runs on {where}", f"for one more here {free}")
    return failed(question, f"a worker of another group, {worker.group_id}, runs on {where}", free)
