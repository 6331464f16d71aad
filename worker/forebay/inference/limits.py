"""What a pool tolerates, and what it tells: values, nothing else. `kind` is replica or preparer."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field

from forebay.inference.messages import Checked, Ready, Stage

_MENDS = {
    errno.EMFILE: "raise the worker's limit of open files (ulimit -n)",
    errno.ENFILE: "raise the machine's limit of open files (fs.file-max)",
    errno.EAGAIN: "raise the limit of processes (ulimit -u, or the container's)",
    errno.ENOMEM: "there is too little memory",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the pool tolerates; times are seconds. A replica that is idle for `canary_interval` is checked; 0: never."""

    execution_timeout: float
    start_timeout: float
    max_attempts: int
    max_restarts: int
    canary_interval: float = 0.0


@dataclass(slots=True)
class Notice:
    """Something for the log and the metrics: a replica gets on with its start, got ready, was checked, or died."""

    event: str
    model: str
    fields: dict[str, object] = field(default_factory=dict)
    ready: Ready | None = None


def on_ready(kind: str, name: str, model: str, ready: Ready) -> Notice:
    """Return what is told of a replica that can take batches."""
    fields: dict[str, object] = {
        kind: name,
        "device": ready.device,
        "load_seconds": round(ready.load_seconds, 3),
        "warm_up_seconds": round(ready.warm_up_seconds, 3),
    }
    if ready.threads:
        fields["threads"] = ready.threads
    if ready.notes:
        fields["notes"] = ready.notes
    return Notice(f"{kind}_ready", model, fields, ready)


def on_stage(kind: str, name: str, model: str, stage: Stage) -> Notice:
    """Return what is told of one that starts."""
    return Notice(f"{kind}_{stage.name}", model, {kind: name, **stage.fields})


def on_checked(kind: str, name: str, model: str, checked: Checked) -> Notice:
    """Return what is told of a canary that has run."""
    fields: dict[str, object] = {"result": "wrong" if checked.wrong else "failed" if checked.failed else "ok"}
    if checked.wrong or checked.failed:
        fields |= {kind: name, "why": checked.wrong or checked.failed}
    return Notice(f"{kind}_checked", model, fields)


def cannot_start(error: OSError) -> str:
    """Say why a replica or preparer cannot be started, with the mend."""
    mend = _MENDS.get(error.errno or 0)
    return f"it cannot be started: {error.strerror or error}" + (f"; {mend}" if mend else "")
