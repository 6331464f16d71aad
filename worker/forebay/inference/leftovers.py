"""What lost replicas left behind: it runs again before anything new. Pure; the pool drives it on the loop's thread.

The batch that was running is suspect: its requests run again one by one, so that a killer takes nobody along twice,
and one that has brought a replica down `max_attempts` times is poisoned. A batch that only waited in a slot runs again
as it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from forebay.inference.replicas import Finished
from forebay.records import Batch, Code, Failure, Reason, Request


class Leftovers:
    """Suspects, returned batches and poisoned requests. `kind` is what replicas are called in messages."""

    def __init__(self, kind: str, max_attempts: int, numbers: Iterator[int]) -> None:
        self._kind = kind
        self._max_attempts = max_attempts
        self._numbers = numbers
        self._suspects: deque[Request] = deque()
        self._returned: deque[Batch] = deque()
        self._poisoned: list[Finished] = []

    def __bool__(self) -> bool:
        return bool(self._suspects or self._returned)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests that are still to run."""
        for batch in self._returned:
            yield from (one for one in batch.requests if id(one) not in batch.answered)
        yield from self._suspects

    @property
    def requests(self) -> int:
        """Requests that are still to run or whose answer was not fetched."""
        waiting = [*self._returned, *(finished.batch for finished in self._poisoned)]
        return len(self._suspects) + sum(len(batch.requests) for batch in waiting)

    def concern(self, model: str) -> bool:
        """Whether something of a model is still to run."""
        return any(one.model == model for one in self._suspects) or any(one.model == model for one in self._returned)

    def lost(self, batches: list[Batch], why: str) -> None:
        """Take over what a lost replica had: the first batch was running, the others waited."""
        if batches:
            self._returned.extend(batches[1:])
            self._suspect(batches[0], why)

    def put_back(self, batch: Batch) -> None:
        """Take a batch that is to run again and is not to blame."""
        self._returned.append(batch)

    def run_alone(self, requests: list[Request], now: float) -> None:
        """Let requests run again as a batch of their own."""
        if requests:
            self._returned.append(self._isolated(requests, now))

    def next(self, model: str, now: float) -> Batch | None:
        """Remove and return what a replica of the model should run next: a suspect alone, else a returned batch."""
        suspect = next((one for one in self._suspects if one.model == model), None)
        if suspect is not None:
            self._suspects = deque(one for one in self._suspects if one is not suspect)
            return self._isolated([suspect], now)
        returned = next((one for one in self._returned if one.model == model), None)
        if returned is not None:
            self._returned = deque(one for one in self._returned if one is not returned)
        return returned

    def drop(self, unwanted: Callable[[Request], bool]) -> list[Request]:
        """Forget and return the requests that `unwanted` picks."""
        gone = [one for one in self._suspects if unwanted(one)]
        self._suspects = deque(one for one in self._suspects if not unwanted(one))
        for batch in self._returned:
            wanted = [one for one in batch.requests if id(one) not in batch.answered]
            gone += [one for one in wanted if unwanted(one)]
            batch.requests = [one for one in wanted if not unwanted(one)]
            batch.rows = sum(one.rows for one in batch.requests)
        self._returned = deque(batch for batch in self._returned if batch.requests)
        return gone

    def poisoned(self) -> list[Finished]:
        """Return the answers for requests that ran out of attempts, once."""
        found, self._poisoned = self._poisoned, []
        return found

    @property
    def has_poisoned(self) -> bool:
        """Whether such an answer waits."""
        return bool(self._poisoned)

    def _suspect(self, batch: Batch, why: str) -> None:
        """Count an attempt against every request of a batch that was running when its replica died.

        Only a request that ran alone is poisoned: among several, the others may be innocent.
        """
        requests = [one for one in batch.requests if id(one) not in batch.answered]
        for request in requests:
            request.attempts += 1
        if len(batch.requests) > 1 or not requests or requests[0].attempts < self._max_attempts:
            self._suspects.extend(requests)
            return
        first = requests[0]
        failure = Failure(Code.POISONED, f"it brought its {self._kind} down {first.attempts} times; the last: {why}")
        self._poisoned.append(Finished(batch, [], [(first, failure)]))

    def _isolated(self, requests: list[Request], now: float) -> Batch:
        rows = sum(one.rows for one in requests)
        return Batch(next(self._numbers), requests[0].model, requests, rows, Reason.ISOLATION, now)
