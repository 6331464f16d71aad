"""One HTTP port for all workers of a supervisor: health of all together, and their metrics with a label `device`.

Probes and scrapers need not know how many devices there are. Runs on the HTTP server's threads; each worker is asked on
its own port when somebody asks, so that nothing here is ever older than the question.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from forebay.supervision.workers import DeviceWorker

_ASK_SECONDS = 2.0
_WORDS = {"/livez": "live", "/v2/health/live": "live", "/readyz": "ready", "/v2/health/ready": "ready"}
_WORDS["/startupz"] = "started"

Answer = tuple[int, str, bytes]


class Combined:
    """Answers for all workers. `registry` has the supervisor's own metrics."""

    def __init__(self, workers: Sequence[DeviceWorker], registry: CollectorRegistry) -> None:
        self._workers = list(workers)
        self._registry = registry

    def __call__(self, path: str) -> Answer:
        """Return status, content type and body for a path."""
        answers = self._ask(path)
        if path == "/metrics":
            texts = {name: body.decode() for name, (status, body) in answers.items() if status == 200}
            return 200, CONTENT_TYPE_LATEST, generate_latest(self._registry) + merge(texts).encode()
        if _is_description(path):  # all of them serve the same
            told = [body for status, body in answers.values() if status == 200]
            missing = json.dumps({"error": "no worker tells it by now"}).encode()
            return 200 if told else 404, "application/json", told[0] if told else missing
        word = _WORDS.get(path) or ("ready" if path.startswith("/v2/models/") else None)
        unknown = next((body for status, body in answers.values() if status == 404), None)
        if word is None or unknown is not None:
            return 404, "application/json", unknown or json.dumps({"error": f"there is no {path}"}).encode()
        reasons = self._reasons(word, answers)
        return 503 if reasons else 200, "application/json", json.dumps({word: not reasons, "reasons": reasons}).encode()

    def _reasons(self, word: str, answers: Mapping[str, tuple[int, bytes]]) -> dict[str, str]:
        found: dict[str, str] = {}
        for worker in self._workers:
            status, body = answers.get(worker.name, (0, b""))
            if status:
                said: dict[str, Any] = json.loads(body).get("reasons", {})
                found |= {f"{worker.name} {name}": why for name, why in said.items()}
            elif worker.name in answers:
                found[f"{worker.name} worker"] = "it does not answer"
            elif word != "live":  # one that starts, or waits for its restart, is in the supervisor's hands
                found[f"{worker.name} worker"] = worker.state
        return found

    def _ask(self, path: str) -> dict[str, tuple[int, bytes]]:
        """Return what each worker that has a port answers: its status, 0 where there was no answer, and the body."""
        asked = {worker.name: url + path for worker in self._workers if (url := worker.url) is not None}
        if not asked:
            return {}
        with ThreadPoolExecutor(len(asked)) as threads:
            return dict(zip(asked, threads.map(_get, asked.values()), strict=True))


def _is_description(path: str) -> bool:
    parts = path.strip("/").split("/")
    return path == "/v2" or (parts[:2] == ["v2", "models"] and len(parts) in (3, 5))


def _get(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=_ASK_SECONDS) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, b""


def merge(texts: Mapping[str, str]) -> str:
    """Return several expositions as one, each sample with the label `device`; a family is described once."""
    families: dict[str, list[str]] = {}
    heads: dict[str, list[str]] = {}
    for device, text in texts.items():
        name = ""
        for line in text.splitlines():
            if line.startswith("# "):
                name = line.split(" ", 3)[2]
                head = heads.setdefault(name, [])
                if line not in head:
                    head.append(line)
            elif line:
                families.setdefault(name, []).append(_labelled(line, device))
    return "".join(f"{line}\n" for name, head in heads.items() for line in _block(head, families.get(name, ())))


def _block(head: Iterable[str], samples: Iterable[str]) -> Iterable[str]:
    yield from head
    yield from samples


def _labelled(sample: str, device: str) -> str:
    brace, space = sample.find("{"), sample.find(" ")
    if 0 <= brace < space:
        return f'{sample[: brace + 1]}device="{device}",{sample[brace + 1 :]}'
    return f'{sample[:space]}{{device="{device}"}}{sample[space:]}'
