"""The local stack, for real: built, started, fed from the host, scaled to three workers, stopped, removed.

Needs a Docker engine; the first build takes minutes because the image holds torch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from threading import Thread

import pytest

from tests.integration.stack import (
    DEAD_LETTERS,
    RESULTS,
    ROOT,
    Stack,
    digits,
    docker,
    headers,
    missing_engine,
    outcomes,
    publish,
    unfinished,
    wait_for,
)

MISSING = missing_engine()
pytestmark = [
    pytest.mark.docker,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(MISSING is not None, reason=MISSING or ""),
]
PROMETHEUS_IMAGE = "prom/prometheus:v2.53.0"
QUIET = {"Device memory", "Isolation", "Dead letters", "Given back unanswered", "Kafka client events"}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """A running stack with one worker; afterwards nothing of it is left."""
    running = Stack(f"forebay-test-{os.getpid()}")
    try:
        running.up()
        yield running
    finally:
        running.down()
    assert running.left_over() == ""


def test_a_request_from_the_host_is_answered_with_the_right_label(stack: Stack) -> None:
    requests = digits("first", 300)
    publish(stack, {name: value for name, (value, _) in requests.items()})
    for name, messages in outcomes(stack, RESULTS, requests).items():
        assert len(messages) == 1
        assert headers(messages[0])["status"] == "ok"
        result = json.loads(messages[0].value() or b"")
        read = next(output for output in result["outputs"] if output["name"] == "digit")
        assert read["data"] == [requests[name][1]]
        assert result["id"] == name


def test_a_broken_request_gets_an_error_result_and_a_dead_letter(stack: Stack) -> None:
    publish(stack, {"broken": b'{"inputs": ['})
    result = outcomes(stack, RESULTS, ["broken"])["broken"]
    assert [headers(message)["error-code"] for message in result] == ["invalid_payload"]
    letter = outcomes(stack, DEAD_LETTERS, ["broken"])["broken"]
    assert [message.value() for message in letter] == [b'{"inputs": [']


def test_the_workers_container_has_no_rights_no_compiler_and_nothing_to_write_on(stack: Stack) -> None:
    container = stack.containers("worker")[0]
    assert container["Config"]["User"] == "10001:10001"
    assert container["HostConfig"]["ReadonlyRootfs"]
    assert not container["HostConfig"]["Privileged"]
    assert container["HostConfig"]["Memory"] > 0
    look = "which cc gcc g++ clang; touch /opt/mark 2>/dev/null && echo writable; ls -A ~/.cache 2>/dev/null; id -u"
    assert docker("exec", container["Id"], "sh", "-c", look).split() == ["10001"]


def test_three_workers_share_the_partitions_and_answer_every_request_once(stack: Stack) -> None:
    requests = digits("scaled", 1500)
    names = list(requests)
    publish(stack, {name: requests[name][0] for name in names[:500]})
    stack.scale(3)
    publish(stack, {name: requests[name][0] for name in names[500:1000]})  # while the group rebalances
    wait_for("three healthy workers", lambda: len(stack.healthy()) == 3)
    wait_for("two partitions for each of three members", lambda: stack.shares() == [2, 2, 2])
    publish(stack, {name: requests[name][0] for name in names[1000:]})
    found = outcomes(stack, RESULTS, requests)
    assert {len(messages) for messages in found.values()} == {1}
    assert {headers(messages[0])["status"] for messages in found.values()} == {"ok"}
    assert len({headers(messages[0])["source"] for messages in found.values()}) == len(requests)


def test_prometheus_finds_every_worker_and_answers_every_panel(stack: Stack) -> None:
    stack.scale(3)
    wait_for("three healthy targets", lambda: len(stack.healthy_targets()) == 3)
    requests = digits("measured", 600)
    publish(stack, {name: value for name, (value, _) in requests.items()})
    outcomes(stack, RESULTS, requests)
    busy = "sum by (instance) (forebay_requests_total) > 0"
    wait_for("requests counted by all three workers", lambda: len(stack.query(busy)) == 3)
    empty = [title for title, expression in _panel_queries() if not _has_series(stack, expression)]
    assert set(empty) <= QUIET, "a panel shows nothing"


def test_the_alert_rules_fire_when_they_should_and_only_then(stack: Stack) -> None:
    rules = ["--volume", f"{ROOT / 'deploy/prometheus'}:/rules:ro", "--workdir", "/rules", "--tmpfs", "/tmp"]
    promtool = ["run", "--rm", *rules, "--entrypoint", "promtool", PROMETHEUS_IMAGE]
    docker(*promtool, "check", "config", "prometheus.yml")
    docker(*promtool, "test", "rules", "alerts.test.yml")
    groups = stack.prometheus("rules")["data"]["groups"]
    assert {rule["health"] for group in groups for rule in group["rules"]} <= {"ok", "unknown"}


def test_workers_that_are_stopped_under_load_drain_and_the_next_ones_answer_the_rest(stack: Stack) -> None:
    requests = digits("last", 3000)
    values = [(name, value) for name, (value, _) in requests.items()]
    publish(stack, dict(values[:1000]))
    stopping = Thread(target=stack.compose, args=("stop", "worker"))
    stopping.start()
    for start in range(1000, 3000, 100):
        publish(stack, dict(values[start : start + 100]))
    stopping.join()
    assert {each["State"]["ExitCode"] for each in stack.containers("worker")} == {0}
    stack.compose("start", "worker")
    found = outcomes(stack, RESULTS, requests)
    assert {len(messages) for messages in found.values()} == {1}
    wait_for("a committed offset behind the last request of each partition", lambda: unfinished(stack) == 0)


def _panel_queries() -> list[tuple[str, str]]:
    """Each panel's title and query, with Grafana's variables filled in."""
    board = json.loads((ROOT / "deploy/grafana/dashboards/forebay.json").read_text())
    values = {"$__rate_interval": "1m", "$__range": "15m", "$model": ".*", "$instance": ".*"}
    found = []
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for name, value in values.items():
                expression = expression.replace(name, value)
            found.append((panel["title"], expression))
    assert found
    return found


def _has_series(stack: Stack, expression: str) -> bool:
    """Whether the query over the last five minutes gives a series; an error fails."""
    now = time.time()
    answer = stack.prometheus("query_range", query=expression, start=now - 300, end=now, step=5)
    assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
    return bool(answer["data"]["result"])
