"""A replica's own side: load, warm up, then run batch after batch until the loop hangs up.

As a process it is started as `python -m forebay.inference.replica FD MEMORY_FD`; as a thread `serve` is called. It
ignores SIGINT and SIGTERM, which a terminal or an orchestrator sends to the whole group: the loop decides when it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import sys
import time
from multiprocessing.connection import Connection

import torch

from forebay.errors import ForebayError
from forebay.inference.devices import open_device
from forebay.inference.loading import load, where
from forebay.inference.messages import Failed, Ready, Run, Spec, Start, decode_to_replica, encode
from forebay.inference.model import TensorSpec
from forebay.inference.runner import DeviceLost, Runner
from forebay.inference.warmup import warm_up

EXIT_DEVICE_LOST = 75
_PR_SET_PDEATHSIG = 1


def serve(connection: Connection, memory: mmap.mmap) -> int:
    """Answer the loop's messages until it hangs up; return an exit code."""
    message = decode_to_replica(connection.recv_bytes())
    assert isinstance(message, Start)
    answer, runner = begin(message, memory)
    connection.send_bytes(encode(answer))
    if runner is None:
        return 1
    while True:
        try:
            job = decode_to_replica(connection.recv_bytes())
        except (EOFError, OSError):
            return 0
        if not isinstance(job, Run):
            return 0
        try:
            done = runner.run(job)
        except DeviceLost as error:
            print(f"forebay replica: the device is lost: {error}", file=sys.stderr, flush=True)
            return EXIT_DEVICE_LOST
        try:
            connection.send_bytes(encode(done))
        except OSError:
            return 0


def begin(start: Start, memory: mmap.mmap) -> tuple[Ready | Failed, Runner | None]:
    """Load and warm up; return what to tell the loop, and the runner if there is one."""
    try:
        ready, runner = _load(start, memory)
    except ForebayError as error:
        return Failed(str(error)), None
    except Exception as error:
        return Failed(f"the replica could not start: {where(error)}"), None
    return ready, runner


def _load(start: Start, memory: mmap.mmap) -> tuple[Ready, Runner]:
    began = time.perf_counter()
    if start.threads is not None:
        torch.set_num_threads(start.threads)
    device = open_device(start.device)
    note = device.pin(memory)
    model = load(start, device.device)
    loaded = time.perf_counter()
    runner = Runner(model, device, start, memory)
    curve = warm_up(runner, model, device, start.max_batch_size)
    ready = Ready(
        inputs=[_spec(spec) for spec in model.inputs],
        outputs=[_spec(spec) for spec in model.outputs],
        prepares=bool(model.prepared),
        device=device.name,
        load_seconds=loaded - began,
        warm_up_seconds=time.perf_counter() - loaded,
        curve=curve,
        notes=[note] if note else [],
    )
    return ready, runner


def _spec(spec: TensorSpec) -> Spec:
    return Spec(spec.name, spec.datatype, list(spec.shape), spec.pad)


def _die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when the loop dies, however it dies; a forward may last for ever."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


def main() -> None:
    """Run as a process of its own."""
    descriptor, memory_descriptor, parent = map(int, sys.argv[1:4])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _die_with_parent(parent)
    memory = mmap.mmap(memory_descriptor, os.fstat(memory_descriptor).st_size)
    code = serve(Connection(descriptor), memory)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # not a normal exit: a broken device may hang in its destructors


if __name__ == "__main__":
    main()
