"""A link that loses packets, or lets little through, between a worker and its broker; checked whole.

In a network namespace: packets that the kernel drops, and a token bucket on the loopback device.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.alone import run, runs_alone
from tests.faults.dumps import Watch
from tests.faults.history import Promise
from tests.integration.job import Job, MakeJob, ask, ask_binary
from tests.kafka_probe import KafkaProbe

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

CHAIN = "nft add table inet t && nft add chain inet t i '{ type filter hook input priority 0; }'"
LOSS = "nft add rule inet t i meta l4proto tcp numgen random mod 100 '<' 10 drop"
LIMIT = "tc qdisc add dev lo root tbf rate 500kbit burst 16k latency 2s"
UP = "ip link set lo mtu 1500 up"
TOTAL = 3_000

every_guarantee = pytest.mark.parametrize("guarantee", ["at_least_once", "exactly_once"])


def works_through(request: pytest.FixtureRequest, guarantee: Any, fault: str, end: str) -> None:
    """Answer some requests, and the rest while there is a fault; nothing may be lost, and nothing is repeated."""
    make_job: MakeJob = request.getfixturevalue("make_job")
    kafka: KafkaProbe = request.getfixturevalue("kafka")
    job: Job = make_job(kafka)
    with Watch(job, Promise(guarantee)) as watch:
        worker = job.start(delivery__guarantee=guarantee, batch__max_batch_size=16, kafka__client={})
        job.send(ask(n) if n % 2 else ask_binary(n) for n in range(TOTAL // 2))
        job.await_answered(200)
        run(fault)
        job.send(ask(n) if n % 2 else ask_binary(n) for n in range(TOTAL // 2, TOTAL))
        job.await_settled(300)
        run(end)
    watch.fault("a bad link", since_start=True)
    history = watch.verify()
    visible = sum(outcome.position not in history.invisible for outcome in history.outcomes)
    rewound = worker.metric("forebay_rebalances_total", kind="rewound")
    print(f"{guarantee}: {visible - TOTAL} of {TOTAL} twice, {rewound:.0f} transactions in vain")
    assert worker.stop() == 0


@every_guarantee
def test_a_link_that_loses_every_tenth_packet_loses_no_request(request: pytest.FixtureRequest, guarantee: Any) -> None:
    if runs_alone(request, "net", f"{CHAIN} && {LOSS}", UP):
        works_through(request, guarantee, f"{CHAIN} && {LOSS}", "nft flush ruleset")


@every_guarantee
def test_a_link_that_lets_little_through_is_slow_and_nothing_else(
    request: pytest.FixtureRequest, guarantee: Any
) -> None:
    """With `exactly_once` what took longer than the transaction's time-out was tried again for ever, all of it."""
    if runs_alone(request, "net", LIMIT, UP):
        works_through(request, guarantee, LIMIT, "tc qdisc del dev lo root")
