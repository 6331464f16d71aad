"""The supervisor: starts one worker per device, starts those again that died, and drains all of them at the end.

One thread, which only looks after processes: a signal handler sets flags, the loop acts. It keeps no request and no
offset, so it may die at any moment: its workers notice and leave in good order.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forebay.errors import (
    EXIT_CONFIG,
    EXIT_DEVICE_LOST,
    EXIT_INTERNAL,
    EXIT_UNAVAILABLE,
    EXIT_USAGE,
    ConfigError,
    DeviceLostError,
    ForebayError,
    KafkaUnavailableError,
)
from forebay.logs import logger
from forebay.metrics import SupervisorMetrics
from forebay.supervision.workers import DeviceWorker, ended_with

_LOOK_SECONDS = 0.1
_WINDOW_SECONDS = 600.0
_BADNESS = (0, EXIT_DEVICE_LOST, EXIT_UNAVAILABLE, EXIT_INTERNAL, EXIT_USAGE, EXIT_CONFIG)
"""Exit codes from the harmless to the worst; another start helps less and less."""

_FOR_GOOD = (EXIT_CONFIG, EXIT_USAGE, EXIT_UNAVAILABLE)
"""What ends all where a worker has never run; one that has run once is tried again."""

_log = logger("supervisor")


@dataclass(frozen=True, slots=True)
class Patience:
    """What a supervisor tolerates: restarts of a worker within ten minutes, and the seconds that a drain may take.

    `pause` is before the first restart; each further one within ten minutes waits twice as long, at most `longest`.
    """

    restarts: int
    drain: float
    pause: float = 1.0
    longest: float = 30.0


class Supervisor:
    """Runs workers until all have ended. `on_signal` is what to install for SIGTERM, SIGINT and SIGHUP."""

    def __init__(
        self,
        workers: Sequence[DeviceWorker],
        patience: Patience,
        metrics: SupervisorMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.workers = list(workers)
        self._patience = patience
        self._metrics = metrics
        self._clock = clock
        self._stops: list[int] = []
        self._passed_on: deque[int] = deque()
        self._deadline: float | None = None
        self._deaths: dict[str, deque[float]] = {worker.name: deque() for worker in workers}
        self._verdict: int | None = None
        self._sentence: str | None = None

    def on_signal(self, number: int, _: object = None) -> None:
        """Note a signal; the loop acts on it."""
        (self._passed_on if number == signal.SIGHUP else self._stops).append(number)

    def run(self) -> int:
        """Return the worst exit code of the workers once all have ended, 128 + N after a second signal N.

        Raises the error that ended a worker for good, where it said why.
        """
        try:
            for worker in self.workers:
                self._launch(worker)
            while any(worker.is_running or worker.restart_at is not None for worker in self.workers):
                time.sleep(_LOOK_SECONDS)
                if len(self._stops) > 1:
                    return 128 + self._stops[1]
                self._turn(self._clock())
        finally:
            for worker in self.workers:
                if worker.is_running:
                    worker.kill()
        return self._end()

    def _turn(self, now: float) -> None:
        if self._stops:
            self._drain(now, "signal")
        while self._passed_on:
            number = self._passed_on.popleft()
            for worker in self.workers:
                worker.signal(number)
        for worker in self.workers:
            if worker.look():
                self._ended(worker, now)
            elif worker.restart_at is not None and now >= worker.restart_at:
                self._metrics.restarts.labels(worker.name).inc()
                self._launch(worker)
            elif worker.is_running and self._deadline is not None and now > self._deadline:
                _log.warning("worker_killed", device=worker.name, why="it has not drained in time")
                worker.kill()
        self._metrics.running.set(sum(worker.is_running for worker in self.workers))

    def _launch(self, worker: DeviceWorker) -> None:
        worker.launch()
        _log.info("worker_started", device=worker.name, pid=worker.pid, starts=worker.launches)

    def _ended(self, worker: DeviceWorker, now: float) -> None:
        """Decide what the end of a worker means: nothing, another start, or the end of all."""
        code = worker.code or 0
        told = {"device": worker.name, "how": ended_with(code), "why": worker.sentence}
        if code == 0 or self._deadline is not None:
            _log.info("worker_ended", **told)
        elif code in _FOR_GOOD and worker.launches == 1:
            _log.error("worker_failed", **told, next="every worker is drained: another start would fail alike")
            self._give_up(worker, code, now)
        elif code in _FOR_GOOD:  # Kafka is away, or the settings were spoilt since: the others go on as they are
            worker.restart_at = now + self._patience.longest
            _log.warning("worker_lost", **told, again_in_seconds=self._patience.longest)
        else:
            deaths = self._deaths[worker.name]
            deaths.append(now)
            while now - deaths[0] > _WINDOW_SECONDS:
                deaths.popleft()
            if len(deaths) > self._patience.restarts:
                _log.error("worker_failed", **told, deaths=len(deaths), next="every worker is drained")
                self._give_up(worker, code, now)
                return
            pause = min(self._patience.pause * 2 ** (len(deaths) - 1), self._patience.longest)
            worker.restart_at = now + pause
            _log.warning("worker_lost", **told, deaths=len(deaths), again_in_seconds=pause)

    def _give_up(self, worker: DeviceWorker, code: int, now: float) -> None:
        if self._verdict is None:
            self._verdict = code if code >= 0 else EXIT_INTERNAL
            self._sentence = f"{worker.name}: {worker.sentence}" if worker.sentence else None
        self._drain(now, f"{worker.name} has {ended_with(code)}")

    def _drain(self, now: float, why: str) -> None:
        """Let every worker finish what it has and leave; start none again."""
        if self._deadline is not None:
            return
        self._deadline = now + self._patience.drain
        _log.info("draining", why=why, workers=sum(worker.is_running for worker in self.workers))
        for worker in self.workers:
            worker.restart_at = None
            worker.signal(signal.SIGTERM)

    def _end(self) -> int:
        if self._verdict is not None and self._sentence is not None:
            raise _error(self._verdict)(self._sentence)
        codes = [self._code_of(worker) for worker in self.workers]
        worst = max([*codes, self._verdict or 0], key=lambda code: _BADNESS.index(code) if code in _BADNESS else 99)
        _log.info("supervisor_ended", code=worst)
        return worst

    def _code_of(self, worker: DeviceWorker) -> int:
        """Return a worker's code as an exit code; one that our SIGTERM ended had not begun to serve."""
        code = worker.code or 0
        if code == -signal.SIGTERM and self._deadline is not None:
            return 0
        return code if code >= 0 else EXIT_INTERNAL


def _error(code: int) -> type[ForebayError]:
    kinds = {EXIT_CONFIG: ConfigError, EXIT_UNAVAILABLE: KafkaUnavailableError, EXIT_DEVICE_LOST: DeviceLostError}
    return kinds.get(code, ForebayError)
