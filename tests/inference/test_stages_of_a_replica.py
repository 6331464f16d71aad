"""The stages of a replica's start, as the replica tells them."""

from __future__ import annotations

from mmap import mmap
from multiprocessing import Pipe

import pytest

from forebay.inference.messages import Ready, Stage, Start, decode_to_loop, encode


def started(**changes: object) -> Start:
    told = {"device": "cpu", "precision": "fp32", "threads": 1, "max_batch_size": 4, "slot_bytes": 65_536}
    sizes = {"input_bytes": 32_768, "slots": 1, "search": []}
    named = {"model": "m", "version": "1", "factory": "tests.inference.models:Sums", "path": None, "weights": None}
    return Start(**{**named, "options": {}, **told, **sizes, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("checks", [True, False])
def test_a_replica_tells_what_it_does_before_it_is_ready(checks: bool) -> None:
    """A start of a large model was silent for a minute: nobody knew whether it loaded, compiled or hung."""
    pytest.importorskip("torch")
    from forebay.inference.replica import serve

    ours, theirs = Pipe()
    ours.send_bytes(encode(started(self_check=checks)))
    memory = mmap(-1, 65_536)
    ours_told = []

    class HangsUp:
        """The far end, which has gone once the replica is ready."""

        def recv_bytes(self) -> bytes:
            if ours_told and isinstance(ours_told[-1], Ready):
                raise EOFError
            return theirs.recv_bytes()

        def send_bytes(self, raw: bytes) -> None:
            ours_told.append(decode_to_loop(raw))

        def poll(self, *_: object) -> bool:
            return True

    assert serve(HangsUp(), memory) == 0  # type: ignore[arg-type]
    *stages, ready = ours_told
    assert isinstance(ready, Ready)
    assert all(isinstance(one, Stage) for one in stages)
    assert [one.name for one in stages] == ["loading", "warming_up", *(["checking"] if checks else [])]
    assert stages[0].fields == {"device": "cpu", "precision": "fp32"}
    assert stages[1].fields == {"up_to_rows": 4, "compile": "none"}


def test_loading_without_a_listener_says_nothing() -> None:
    pytest.importorskip("torch")
    from forebay.inference.replica import begin_replica

    assert isinstance(begin_replica(started(), mmap(-1, 65_536))[0], Ready)
