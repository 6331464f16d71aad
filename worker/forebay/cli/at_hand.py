"""The worker at hand: the one that listens on the HTTP port of this configuration, if one does, and what it says.

`forebay check` asks whose the port is, `forebay send` whether a request would be refused. Silent where there is none.
"""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forebay.errors import UsageError

if TYPE_CHECKING:
    from forebay.cli.documents import Prepared
    from forebay.settings import Limits, Ops
    from forebay.stream.codec import Decoder, Refusal

ASK_SECONDS = 1.0
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True)
class WorkerAtHand:
    """A running worker of this machine. `told` is what it says of itself."""

    url: str
    told: dict[str, Any]

    @property
    def group_id(self) -> str:
        """The consumer group that it is a member of."""
        return str(self.told.get("group_id"))

    def reads(self, topic: str) -> bool:
        """Whether requests of a topic may come to it."""
        return topic in self.told.get("input_topics", ())


def worker_at_hand(ops: Ops) -> WorkerAtHand | None:
    """Ask whatever listens on the HTTP port; None where nothing does, or what does is no worker of Forebay's."""
    if ops.port == 0:
        return None
    host = _EVERYWHERE.get(ops.host, ops.host)
    url = f"http://[{host}]:{ops.port}" if ":" in host else f"http://{host}:{ops.port}"
    told = _get(f"{url}/v2")
    if not isinstance(told, dict) or told.get("name") != "forebay":
        return None
    return WorkerAtHand(url, told)


class Fitting:
    """Says of requests what the worker at hand would say: it decodes them as that would, for its models."""

    def __init__(self, worker: WorkerAtHand, limits: Limits) -> None:
        from forebay.about import signature_of

        self._worker = worker
        self._signatures = {}
        for name in worker.told.get("models", ()):
            if (told := _get(f"{worker.url}/v2/models/{name}")) is not None:
                self._signatures[name] = signature_of(told)
        self._decoder: Decoder | None = None
        if self._signatures:
            from forebay.stream.codec import Decoder

            self._decoder = Decoder(list(self._signatures.values()), limits)

    def check(self, request: Prepared, input: str) -> None:
        """Raise UsageError for a request that the worker would refuse; `input` is what --input says."""
        from forebay.stream.codec import Refusal

        found = None if self._decoder is None else self._decoder.decode(_record(request), 0.0, 0.0)
        if isinstance(found, Refusal):
            raise UsageError(f"{request.origin}: {self._sentence(found, input)}")

    def _sentence(self, refusal: Refusal, input: str) -> str:
        told = f"the worker at {self._worker.url} would answer {refusal.failure.code.value}: {refusal.failure.message}"
        signature = self._signatures.get(refusal.model)
        mends = []
        if signature is not None:
            takes = ", ".join(f"{one.name} {one.datatype}{list(one.shape)}" for one in signature.inputs)
            told += f" ({signature.model} takes {takes})"
            if f"no input {input!r}" in refusal.failure.message:
                mends = [f"name it with --input {signature.inputs[0].name}"]
            elif "not INT64; send it as FP" in refusal.failure.message:
                mends = ["write 1.0 in place of 1"]
        return "; ".join([told, *mends, "--unchecked sends it all the same"])


def _record(request: Prepared) -> Any:
    from forebay.records import Record

    return Record("", 0, 0, b"", request.value, request.headers, 0)


def _get(url: str) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine: no proxy leads to it
    try:
        with opener.open(url, timeout=ASK_SECONDS) as answer:
            return json.loads(answer.read())
    except (OSError, ValueError):
        return None
