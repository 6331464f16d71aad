"""Matches what a replica did to the requests of its batch. On the loop's thread; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay.inference.messages import Done
from forebay.inference.replicas import Replica
from forebay.records import Batch, Code, Failure, Output, Request, Signature, Timings


@dataclass(slots=True)
class Finished:
    """A batch that came back: outputs of requests that ran together, and the failures of the others.

    `seconds` and `costs` are a preparer's, by index of the batch's requests: see `messages.Done`. `unsound` is why the
    model fails its own example where every request failed. `signature` is that of the replica which ran it.
    `last_rows` are the rows of the last step, of a model that runs in steps.
    """

    batch: Batch
    results: list[tuple[list[Request], list[Output]]]
    failures: list[tuple[Request, Failure]]
    timings: Timings = field(default_factory=Timings)
    left: list[Request] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    unsound: str = ""
    signature: Signature | None = None
    last_rows: int = 0

    @property
    def rows(self) -> int:
        """Rows that ran together: of the batch, or of the last step."""
        return self.last_rows or self.batch.rows


def finished(replica: Replica, done: Done, now: float) -> Finished:
    """Match what a replica did to the requests of the batch, by index: a later part replaces an earlier one."""
    batch, parts = replica.take(done, now)
    requests = batch.requests
    timings = Timings(
        done.stage_seconds,
        done.forward_seconds,
        done.total_seconds,
        done.executions,
        done.pieces,
        done.cap or None,
        done.recompiles,
        done.refused,
    )
    failed = {mistake.request: Failure(Code(mistake.code), mistake.message) for mistake in done.mistakes}
    answered = {index for index, one in enumerate(requests) if id(one) in batch.answered} if batch.answered else set()
    failures = [(requests[index], failure) for index, failure in failed.items() if index not in answered]
    left = [requests[index] for index in done.left if index not in answered]
    if len(parts) == 1 and not failed and not done.left and not answered:
        whole = [(requests, parts[0][1])]
        return Finished(batch, whole, failures, timings, [], done.seconds, done.costs, "", replica.signature, done.rows)
    results: list[tuple[list[Request], list[Output]]] = []
    missing = set(range(len(requests))) - set(failed) - set(done.left) - answered
    for part, outputs in reversed(parts):
        begin = 0
        rows = sum(requests[index].rows for index in part.requests)
        for index in part.requests:
            end = begin + requests[index].rows
            if index in missing:
                missing.remove(index)
                results.append(([requests[index]], [_slice(output, begin, end, rows) for output in outputs]))
            begin = end
    lost = Failure(Code.INTERNAL, "the replica returned nothing for this request")
    failures += [(requests[index], lost) for index in sorted(missing)]
    told = (done.seconds, done.costs, done.unsound)
    return Finished(batch, results, failures, timings, left, *told, replica.signature, done.rows)


def _slice(output: Output, begin: int, end: int, rows: int) -> Output:
    width = len(output.content) // rows
    return Output(output.dims, output.content[begin * width : end * width])
