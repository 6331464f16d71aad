"""The fork server and the driver: what it has imported must not have touched the device, or no child could use it."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path

import psutil
import pytest

from forebay.inference.assembly import build_pool
from forebay.inference.transports import ProcessTransport
from forebay.settings import Batch, Delivery, Inference, ModelSettings

pytestmark = pytest.mark.gpu


def test_forked_replicas_share_the_device_and_are_forked_anew() -> None:
    model = ModelSettings(name="double", factory="tests.models:Double")
    pool = build_pool([model], (Inference(replicas=2, device="cuda"), Batch(), Delivery()), [Path.cwd()], count(1))
    try:
        for killed in range(3):
            while not pool.ready:
                pool.collect(time.monotonic(), wait=0.05)
            replica = next(pool.of("double"))
            assert replica.device.startswith("cuda")
            assert isinstance(replica.transport, ProcessTransport)
            process = psutil.Process(replica.transport.pid)
            assert process.name() == "forebay-replica"
            process.kill()
            while pool.restarts == killed:
                pool.collect(time.monotonic(), wait=0.05)
    finally:
        pool.stop()
