"""A replica's own side: load, warm up, then run batch after batch until the loop hangs up.

As a process, forked by the fork server or spawned, it is `run`; as a thread `serve` is called.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import NoReturn, Protocol

import torch

from forebay import failpoints
from forebay.errors import ForebayError
from forebay.inference import stages
from forebay.inference.adoption import adopt, adopt_shared
from forebay.inference.canary import Canary
from forebay.inference.compilation import thaw
from forebay.inference.devices import Device, open_device
from forebay.inference.example import DeviceLost
from forebay.inference.loading import sharing, where
from forebay.inference.messages import Done, Failed, Ready, Run, Spec, Stage, Start, decode_to_replica, encode
from forebay.inference.model import Model, TensorSpec, runs_in_steps
from forebay.inference.pipeline import HungUpError, Inbox, Pipeline
from forebay.inference.processes import be_a_process, name_process
from forebay.inference.rehearsal import measure, rehearse
from forebay.inference.runner import Runner
from forebay.inference.selfcheck import SelfCheck, self_check
from forebay.inference.staging import SlotSize, divide, slots_of
from forebay.inference.stepping import Stepping
from forebay.inference.steps import check_settings
from forebay.inference.warmup import WarmUp, may_take_fewer, sizes, take_threads, warm_up, with_fewer_threads

EXIT_DEVICE_LOST = 75


class Running(Protocol):
    """What runs the jobs of this process, once it has begun."""

    def run(self, job: Run) -> Done: ...


Begin = Callable[[Start, mmap.mmap], tuple[Ready | Failed, Running | None]]


def serve(connection: Connection, memory: mmap.mmap, begin: Begin | None = None) -> int:
    """Answer the loop's messages until it hangs up; return an exit code. `begin` makes what runs the jobs."""
    message = decode_to_replica(connection.recv_bytes())
    assert isinstance(message, Start)
    with stages.told_to(partial(_tell, connection)):
        told, runner = (begin or begin_replica)(message, memory)
    try:
        connection.send_bytes(encode(told))
    except ConnectionError:  # the loop has gone while this loaded
        return 0
    if runner is None:
        return 1
    inbox = Inbox(connection, partial(measure, runner) if isinstance(runner, Runner) else None)
    turn = _turns(runner, inbox) if isinstance(runner, Runner) else partial(_turn, runner, inbox)
    try:
        while True:
            turn()
    except HungUpError:
        if isinstance(runner, Runner):
            runner.close()
        return 0
    except DeviceLost as error:
        print(f"forebay replica: the device is lost: {error}", file=sys.stderr, flush=True)
        return EXIT_DEVICE_LOST


def _tell(connection: Connection, stage: Stage) -> None:
    with contextlib.suppress(OSError):  # the loop has gone: it is noticed when the answer is sent
        connection.send_bytes(encode(stage))


def _turns(runner: Runner, inbox: Inbox) -> Callable[[], None]:
    if runner.steps is None:
        return Pipeline(runner, inbox).turn
    stepping = Stepping(runner, runner.steps, inbox.answer)
    inbox.skip = stepping.skip
    return partial(stepping.turn, inbox)


def _turn(runner: Running, inbox: Inbox) -> None:
    job = inbox.next()
    failpoints.hit("replica_before_run")
    done = runner.run(job)
    failpoints.hit("replica_after_run")
    inbox.answer(done)


def begin_replica(start: Start, memory: mmap.mmap) -> tuple[Ready | Failed, Runner | None]:
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
    device = open_device(start.device, start.memory_fraction)
    take_threads(start, device)
    stages.reached("loading", device=device.name, precision=start.precision)
    note = device.pin(memory)
    try:
        return _get_ready(start, memory, device, [note] if note else [], began)
    except BaseException:
        device.unpin(memory)
        raise


def _get_ready(start: Start, memory: mmap.mmap, device: Device, notes: list[str], began: float) -> tuple[Ready, Runner]:
    with sharing(start):
        model, adopted = adopt_shared(start, device) if start.sharing > 1 else adopt(start, device)
        start.precision = adopted.precision
        check_settings(model, start)
        joins = runs_in_steps(model) and start.continuous
        if joins:
            divided = divide(SlotSize(start.input_bytes, start.slot_bytes - start.input_bytes), start)
            start.slots, start.input_bytes, start.slot_bytes = slots_of(start), divided.inputs, divided.total
        device.settle()
        if start.compile == "cudagraph" and not start.sizes:  # every size that is not one of these would have no graph
            start.sizes = sizes(start.max_batch_size)
        loaded = time.perf_counter()
        runner = Runner(model, device, start, memory)
        warm, checked = _prove(runner, model, device, start)
    ready = Ready(
        inputs=[_spec(spec) for spec in model.inputs],
        outputs=[_spec(spec) for spec in model.outputs],
        prepares=bool(model.prepared),
        device=device.name,
        load_seconds=loaded - began,
        warm_up_seconds=time.perf_counter() - loaded,
        curve=[] if joins else warm.curve,  # what the example took says nothing of how long another row runs
        notes=[*notes, *adopted.notes, *warm.notes, *(checked.notes if checked is not None else [])],
        prepared=[_spec(spec) for spec in model.prepared] if start.takes_prepared else [],
        peaks=warm.peaks,
        difference=checked.difference if checked is not None and checked.compared else None,
        precision=adopted.precision,
        compile=start.compile,
        deviation=adopted.deviation,
        tried=adopted.tried,
        threads=torch.get_num_threads() if device.device.type == "cpu" else 0,
        answer=runner.canary.answer if runner.canary is not None else [],
        slots=start.slots if joins else 0,
    )
    return ready, runner


def _prove(runner: Runner, model: Model, device: Device, start: Start) -> tuple[WarmUp, SelfCheck | None]:
    """Warm up and check; afterwards nothing is compiled any more."""
    compiled = runner.forward.compiled
    stages.reached("warming_up", up_to_rows=start.max_batch_size, compile=start.compile)
    if compiled is not None:
        thaw()
    warm = warm_up(runner, model, device, start)
    if compiled is not None and compiled.record():
        warm.curve = warm_up(runner, model, device, start).curve
    if may_take_fewer(device, start):
        warm = with_fewer_threads(warm, lambda: warm_up(runner, model, device, start))
    if start.self_check:
        stages.reached("checking")
    checked = self_check(runner, model, start, device.tolerance(start.precision)) if start.self_check else None
    if compiled is not None:
        compiled.freeze()
    device.recover()  # what loading and the check's threads left cached belongs to streams that no batch uses
    rehearse(runner, model, start)
    runner.canary = Canary(runner, model, start, device.tolerance(start.precision))
    if note := runner.canary.record():
        warm.notes.append(note)
    return warm, checked


def _spec(spec: TensorSpec) -> Spec:
    return Spec(spec.name, spec.datatype, list(spec.shape), spec.pad)


def run(connection: int, memory: int) -> NoReturn:
    """Be a replica, with the descriptors of its connection and of its staging memory."""
    failpoints.arm_from_environment()
    name_process("forebay-replica")
    torch.default_generator.seed()  # else what is forked of one server draws the same
    be_a_process(partial(serve, begin=_begin_and_freeze), connection, memory)


def _begin_and_freeze(start: Start, memory: mmap.mmap) -> tuple[Ready | Failed, Runner | None]:
    """Begin, and take what is there by then (torch, the model) out of the collector's rounds.

    Each allocation that fails is followed by a round: over all of torch it takes 100 ms, several times for one batch.
    """
    begun = begin_replica(start, memory)
    gc.collect()
    gc.freeze()
    return begun
