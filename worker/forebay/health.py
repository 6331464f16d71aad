"""Health and metrics over HTTP: the only place that knows HTTP. Live means that the loop makes progress, ready that
requests are being served. The server has a thread of its own and only reads what the loop wrote.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from forebay.about import About
from forebay.errors import ConfigError
from forebay.settings import Ops

STALLED_AFTER_SECONDS = 30.0


class Health:
    """What the loop tells about itself. The loop's thread writes, the server's threads read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._beat = clock()
        self.phase = "starting"
        self.troubles: dict[str, str] = {}
        self._stalls: dict[str, str] = {}
        self.models: dict[str, bool] = {}
        self.about = About()

    def beat(self, now: float) -> None:
        """Note that the loop came round."""
        self._beat = now

    def trouble(self, name: str, sentence: str | None) -> None:
        """Set or clear a reason for not being ready."""
        if sentence is not None:
            self.troubles[name] = sentence
        else:
            self.troubles.pop(name, None)

    @property
    def may_take(self) -> bool:
        """Whether what is taken now could be answered; trouble with Kafka's answers alone says nothing about that."""
        if self.phase not in ("serving", "joining the group") or not all(self.models.values()):
            return False
        return not any(name.startswith(("delivery", "breaker ", "preparers of ")) for name in self.troubles)

    def stall(self, name: str, sentence: str | None) -> None:
        """Set or clear a reason for not being live: something stands still while the loop turns."""
        if sentence is not None:
            self._stalls[name] = sentence
        else:
            self._stalls.pop(name, None)

    def live(self) -> dict[str, str]:
        """Return why the worker should be restarted; empty if it is live."""
        silent = self._clock() - self._beat
        if silent <= STALLED_AFTER_SECONDS:
            return dict(self._stalls)
        return {"loop": f"no progress for {silent:.0f} s"}

    def ready(self) -> dict[str, str]:
        """Return why requests are not being served; empty if they are."""
        missing = {f"model {name}": "no replica is ready" for name, ok in list(self.models.items()) if not ok}
        return self._worker_ready() | missing

    def _worker_ready(self) -> dict[str, str]:
        reasons = self.live() | dict(self.troubles)
        if self.phase != "serving":
            reasons["phase"] = f"the worker is {self.phase}"
        return reasons

    def started(self) -> dict[str, str]:
        """Return what the start still waits for; empty once the group was joined."""
        return {"phase": f"the worker is {self.phase}"} if self.phase in ("starting", "joining the group") else {}

    def model_ready(self, name: str) -> dict[str, str] | None:
        """Return why a model is not ready; None where there is no such model."""
        if name not in self.models:
            return None
        missing = {} if self.models[name] else {f"model {name}": "no replica is ready"}
        return self._worker_ready() | missing


_NOTICES_STOP_SECONDS = 0.1
"""The server looks so often whether it is to stop, and a worker that ends waits for it: by default half a second."""


class OpsServer:
    """An HTTP port. `respond` makes status, content type and body of a path; its threads call it."""

    def __init__(self, ops: Ops, respond: Callable[[str], tuple[int, str, bytes]]) -> None:
        self._ops = ops
        self._respond = respond
        self._server: ThreadingHTTPServer | None = None

    def start(self) -> str:
        """Listen, and return the address. Raises ConfigError where the port is taken."""
        respond = self._respond

        class Exchange(BaseHTTPRequestHandler):
            def handle(self) -> None:
                with suppress(ConnectionError):  # who asked did not wait for the answer
                    super().handle()

            def do_GET(self) -> None:
                status, kind, body = respond(self.path.split("?", 1)[0])
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing: probes come every second."""

        try:
            self._server = ThreadingHTTPServer((self._ops.host, self._ops.port), Exchange)
        except OSError as error:
            raise ConfigError(
                f"ops.port {self._ops.port} on {self._ops.host} cannot be opened ({error.strerror}); "
                "set ops.port to a free one, or to 0 to have one chosen"
            ) from error
        self._server.daemon_threads = True
        threading.Thread(
            target=self._server.serve_forever, args=(_NOTICES_STOP_SECONDS,), name="forebay-ops", daemon=True
        ).start()
        host, port = self._server.server_address[:2]
        return f"http://{host if isinstance(host, str) else host.decode()}:{port}"

    def stop(self) -> None:
        """Close the port."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


def answer(path: str, health: Health, registry: CollectorRegistry) -> tuple[int, str, bytes]:
    """Return status, content type and body for a path."""
    if path == "/metrics":
        return 200, CONTENT_TYPE_LATEST, generate_latest(registry)
    if path in ("/livez", "/v2/health/live"):
        return _verdict("live", health.live())
    if path in ("/readyz", "/v2/health/ready"):
        return _verdict("ready", health.ready())
    if path == "/startupz":
        return _verdict("started", health.started())
    if path == "/v2":
        return _json(200, health.about.server())
    parts = path.strip("/").split("/")
    if len(parts) in (3, 5) and parts[:2] == ["v2", "models"] and (told := health.about.model(parts[2])) is not None:
        return _json(200, told)
    if len(parts) in (4, 6) and parts[:2] == ["v2", "models"] and parts[-1] == "ready":
        reasons = health.model_ready(parts[2])
        if reasons is not None:
            return _verdict("ready", reasons, name=parts[2])
        return _json(404, {"error": f"this worker does not serve {parts[2]!r}; it serves {', '.join(health.models)}"})
    return _json(404, {"error": f"there is no {path}; try /metrics, /livez, /readyz, /startupz, /v2"})


def _verdict(word: str, reasons: dict[str, str], **extra: str) -> tuple[int, str, bytes]:
    return _json(503 if reasons else 200, {**extra, word: not reasons, "reasons": reasons})


def _json(status: int, body: dict[str, Any]) -> tuple[int, str, bytes]:
    return status, "application/json", json.dumps(body).encode()
