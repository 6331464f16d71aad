"""`forebay run` as a process of its own: start it with settings, ask its port, send it signals, read its log.

A test sees the worker as an operator does: a command, a port, a log and an exit code. Whatever becomes of the test,
`close` leaves no process behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import Popen
from typing import IO, Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.kafka_probe import eventually, is_gone
from tests.quick_python import QuickProcess, is_quick

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120.0
STOP_SECONDS = 60.0
FORK_SERVER = "forebay-forks"


def name_of(process: psutil.Process) -> str:
    """Return the name that a process has given itself; empty where it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if not is_gone(process):
            return str(process.name())
    return ""


def _start(words: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> Popen[bytes] | QuickProcess:
    if is_quick():
        return QuickProcess(words, ROOT, environment, output)
    return Popen(
        [sys.executable, "-m", "forebay", *words],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # a Ctrl-C in the terminal is for pytest alone
    )


class WorkerProcess:
    """One running `forebay run`. `settings` are dotted keys; the log goes to a file of its own."""

    def __init__(
        self, settings: Mapping[str, Any], log: Path, arguments: Sequence[str] = (), failpoints: str = ""
    ) -> None:
        self.log = log
        self.was_killed = False
        values = {"ops.port": 0, "ops.log_format": "json", "inference.device": "cpu", **settings}
        words = ["run", *arguments]
        for key, value in values.items():
            words += ["--set", f"{key}={json.dumps(value)}"]
        ours = {key: value for key, value in os.environ.items() if not key.startswith("FOREBAY_")}
        if failpoints:
            ours["FOREBAY_FAILPOINTS"] = failpoints
        with log.open("wb") as output:
            self.process = _start(words, {**ours, "OMP_NUM_THREADS": "1"}, output)
        self._seen: dict[int, psutil.Process] = {}

    def await_ready(self, timeout_s: float = START_SECONDS) -> WorkerProcess:
        """Return once /readyz says yes; fails with the log if the worker ends before."""

        def ready() -> bool:
            assert self.process.poll() is None, f"the worker ended with code {self.process.returncode}:\n{self.text()}"
            return self.url is not None and self.get("/readyz")[0] == 200

        eventually(ready, "the worker is ready", timeout_s, 0.1)
        return self

    def await_not_ready(self, timeout_s: float = 60.0) -> dict[str, str]:
        """Return the reasons of /readyz once it says no."""
        eventually(lambda: self.get("/readyz")[0] == 503, "the worker says that it is not ready", timeout_s)
        reasons: dict[str, str] = self.get("/readyz")[1]["reasons"]
        return reasons

    @property
    def url(self) -> str | None:
        """The address of the worker's port, once the log has it."""
        return next((event["ops_url"] for event in self.events("ops")), None)

    def get(self, path: str) -> tuple[int, Any]:
        """Ask the worker's port; returns the status, 0 if nobody answers, and the JSON body or the text."""
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=10) as answer:
                status, body = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, body = error.code, error.read()
        except OSError:
            return 0, None
        return status, body.decode() if path == "/metrics" else json.loads(body)

    def metric(self, name: str, /, **labels: str) -> float:
        """Return a metric's value, summed over its samples that have these labels."""
        status, text = self.get("/metrics")
        assert status == 200, f"/metrics answers {status}"
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def await_metric(self, name: str, value: float, /, **labels: str) -> None:
        """Return once a metric has this value."""
        eventually(lambda: self.metric(name, **labels) == value, f"{name} {labels or ''} is {value}", 60)

    def await_held(self, count: int) -> None:
        """Return once this many requests wait or run."""

        def held() -> float:
            return self.metric("forebay_queue_requests") + self.metric("forebay_in_flight_requests")

        eventually(lambda: held() == count, f"{count} requests wait or run", 60)

    def await_event(self, name: str) -> dict[str, Any]:
        """Return the first event of that name once the log has it."""
        eventually(lambda: self.events(name), f"the log has {name}", 60)
        return self.events(name)[0]

    def text(self) -> str:
        """Return the log as it is."""
        return self.log.read_text(errors="replace")

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return the log's events, or those of one name."""
        found = []
        for line in self.text().splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and name in (None, event.get("event")):
                    found.append(event)
        return found

    def replicas(self) -> list[psutil.Process]:
        """Return the processes of replicas and preparers that live now; not the one that they are forked of."""
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self._seen |= {child.pid: child for child in children}
        return [child for child in children if name_of(child) not in ("", FORK_SERVER)]

    def parent_rss(self) -> int:
        """Return the resident bytes of the loop's process."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def signal(self, number: int) -> None:
        """Send a signal to the loop's process alone."""
        self.replicas()
        self.process.send_signal(number)

    def kill(self) -> None:
        """Kill it as a crash would, and wait until it and its replicas are gone."""
        self.signal(signal.SIGKILL)
        self.await_killed()

    def await_killed(self, timeout_s: float = START_SECONDS) -> None:
        """Return once it was killed, by a failpoint of its own too, and its replicas are gone; any other end fails."""
        code = self.wait(timeout_s)
        assert code == -signal.SIGKILL, f"the worker ended with {code} and was to be killed:\n{self.text()}"
        self.was_killed = True

    def stop(self, timeout_s: float = STOP_SECONDS) -> int:
        """Send SIGTERM; return the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = START_SECONDS) -> int:
        """Return the exit code once it ends; fails with the log if it does not."""
        self.replicas()
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the worker has not ended within {timeout_s} s:\n{self.text()}") from None
        self.await_no_leftovers()
        return code

    def await_no_leftovers(self) -> None:
        """Fail if a replica outlives the worker."""
        eventually(lambda: all(map(is_gone, self._seen.values())), "the replicas end with their worker")

    def close(self) -> None:
        """End whatever still runs."""
        left = self.replicas()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for replica in [*left, *self._seen.values()]:
            if not is_gone(replica):
                replica.kill()
