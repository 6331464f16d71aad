"""The demo's worker: a real `forebay run` in a process of its own, its log kept in a file, gone when the demo is.

The demo's thread starts it, asks its HTTP port and ends it. It knows nothing of requests and results.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Self

from forebay.brokers.leash import die_with_the_leash
from forebay.brokers.ports import free_port
from forebay.cli.demo_examples import Example
from forebay.errors import EXIT_INTERNAL, ForebayError
from forebay.settings import Kafka

READY_SECONDS = 180.0
DRAIN_SECONDS = 10.0
HOST = "127.0.0.1"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PASSED_ON = ("FOREBAY_KAFKA__", "FOREBAY_INFERENCE__", "FOREBAY_SECRETS_DIR")


class WorkerEndedError(ForebayError):
    """The demo's worker ended by itself. `exit_code` is its own, so that a script sees what kind of trouble it was."""

    def __init__(self, status: int) -> None:
        how = f"with exit status {status}" if status >= 0 else f"by signal {-status}"
        super().__init__(f"the worker ended {how}; the end of its log is above")
        self.exit_code = status if status > 0 else EXIT_INTERNAL


class DemoWorker:
    """One worker that serves `example` on `kafka`'s topics."""

    def __init__(self, example: Example, kafka: Kafka) -> None:
        self._example = example
        self._kafka = kafka
        self._port = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._port = free_port()
        self._folder = tempfile.TemporaryDirectory(prefix="forebay-demo-")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(),
                start_new_session=True,  # a terminal's Ctrl-C is for the demo, which then ends the worker in order
                preexec_fn=die_with_the_leash,  # if the demo is killed outright
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(DRAIN_SECONDS)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._folder is not None:
            self._folder.cleanup()

    @property
    def ops_url(self) -> str:
        """Where its metrics and health are."""
        return f"http://{HOST}:{self._port}"

    def await_ready(self) -> None:
        """Return once it serves requests of every partition; raises WorkerEndedError, or ForebayError in the end."""
        deadline = time.monotonic() + READY_SECONDS
        reason = "it does not answer"
        while time.monotonic() < deadline:
            self.insist_it_runs()
            try:
                self._get("/readyz")
                if self._metric("forebay_partitions_assigned").get("", 0):
                    return
                reason = "no partition is assigned to it"
            except urllib.error.HTTPError as error:
                reason = _reason(error)
            except OSError:
                pass
            time.sleep(0.05)
        raise ForebayError(f"the worker is not ready after {READY_SECONDS:.0f} s: {reason}")

    def insist_it_runs(self) -> None:
        """Raise WorkerEndedError if it ended."""
        status = None if self._process is None else self._process.poll()
        if status is not None:
            raise WorkerEndedError(status)

    def cuts(self) -> dict[str, int]:
        """Return how many batches it cut for which reason."""
        return {reason: count for reason, count in self._metric("forebay_batch_cuts_total", "reason").items() if count}

    def last_lines(self, count: int = 15) -> str:
        """Return the end of its log, without colours."""
        try:
            lines = self._log.read_text(errors="replace").splitlines()[-count:]
            return "\n".join(_COLOUR.sub("", line) for line in lines)
        except OSError:
            return ""

    @property
    def _log(self) -> Path:
        assert self._folder is not None, "the worker was not started"
        return Path(self._folder.name) / "worker.log"

    def _command(self) -> list[str]:
        example, kafka = self._example, self._kafka
        model = import_name(example)
        values = {
            "kafka.bootstrap_servers": kafka.bootstrap_servers,
            "kafka.input_topics": json.dumps(kafka.input_topics),
            "kafka.output_topic": kafka.output_topic,
            "kafka.dead_letter_topic": kafka.dead_letter_topic,
            "kafka.group_id": kafka.group_id,
            "model.factory": model,
            "ops.host": HOST,
            "ops.port": self._port,
            "ops.log_format": "console",
        }
        settings = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        return [sys.executable, "-m", "forebay", "run", "--config", str(example.config), *settings]

    def _environment(self) -> dict[str, str]:
        """The demo's own environment, with the examples importable, and without settings meant for another worker."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith("FOREBAY_") or k.startswith(_PASSED_ON)}
        root = self._example.home.import_root
        if root is not None:
            kept["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), kept.get("PYTHONPATH"))))
        return kept | {"PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}

    def _metric(self, name: str, label: str = "") -> dict[str, int]:
        """Return a metric's values by one of its labels, added up over the others."""
        from prometheus_client.parser import text_string_to_metric_families

        values: dict[str, int] = {}
        for family in text_string_to_metric_families(self._get("/metrics")):
            for sample in family.samples:
                if sample.name == name:
                    key = sample.labels.get(label, "")
                    values[key] = values.get(key, 0) + int(sample.value)
        return values

    def _get(self, path: str) -> str:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{self.ops_url}{path}", timeout=5) as answer:
            return str(answer.read().decode())


def import_name(example: Example) -> str:
    """Return the model's factory as it is importable here: the file names it as a checkout has it."""
    import yaml

    factory = str(yaml.safe_load(example.config.read_text())["model"]["factory"])
    return factory if example.home.import_root is not None else f"forebay.{factory}"


def _reason(error: urllib.error.HTTPError) -> str:
    return " ".join(error.read().decode(errors="replace").split())[:200]
