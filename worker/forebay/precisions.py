"""What a replica says of its model's precision, as metrics and in the log. Runs on the loop's thread, at a start."""

from __future__ import annotations

from forebay.inference.messages import Ready
from forebay.logs import logger
from forebay.metrics import Metrics

_log = logger("worker")


def tell(metrics: Metrics, model: str, ready: Ready) -> None:
    """Publish what the model computes in, how far that is from fp32, and what else was tried."""
    if not ready.precision:  # a preparer
        return
    metrics.precision.labels(model).info({"precision": ready.precision, "compile": ready.compile})
    if ready.deviation is not None:
        metrics.deviation.labels(model).set(ready.deviation)
    if ready.precision == "fp32" and not ready.tried:
        return
    fields: dict[str, object] = {"precision": ready.precision, "compile": ready.compile}
    if ready.deviation is not None:
        fields["deviation"] = round(ready.deviation, 6)
    if ready.tried:
        fields["tried"] = [
            {
                "precision": one.precision,
                "ms": round(one.full_seconds * 1000, 3),
                "ms_of_one_row": round(one.one_seconds * 1000, 3),
                "deviation": round(one.deviation, 6),
                "verdict": one.verdict,
            }
            for one in ready.tried
        ]
    _log.info("precision", model=model, **fields)
