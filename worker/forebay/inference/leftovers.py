"""What lost replicas left behind: it runs again before anything new. Pure; the pool drives it on the loop's thread.

The batch that was running is suspect: its requests run again one by one, so that a killer takes nobody along twice,
and one that has brought a replica down `max_attempts` times is poisoned. A batch that only waited in a slot runs again
as it was. Who was suspect once stays so until the corridor says that it has its outcome: `charges` is what the next
owner of its partition has to know.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from forebay.inference.matching import Finished
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
        self._convicted: set[int] = set()
        self._accused: dict[int, Request] = {}

        self.held: dict[str, Callable[[Request], bool]] = {}  # by model: whom its replicas must not run, but `drop`

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

    def lost(self, begun: list[Batch], batches: list[Batch], why: str) -> None:
        """Take over what a lost replica had: those that were `begun` are suspect together, the others waited."""
        self._returned.extend(batches[len(begun) :])
        if len(begun) == 1:
            self._suspect(begun[0], why)
        elif begun:
            requests = [one for batch in begun for one in batch.requests if id(one) not in batch.answered]
            self._suspect(Batch(0, begun[0].model, requests, 0, Reason.ISOLATION, 0.0), why)

    def accuse(self, request: Request, now: float) -> None:
        """Take a request that an earlier worker held under suspicion: it runs alone, unless it has no attempt left."""
        if request.attempts >= self._max_attempts:
            why = f"it was tried {request.attempts} times before this worker had it, and never answered"
            self._poison(self._isolated([request], now), request, why)
        else:
            self._accused[id(request)] = request
            self._suspects.append(request)

    @property
    def has_accused(self) -> bool:
        """Whether somebody was suspect whose outcome was not reported yet."""
        return bool(self._accused)

    def charges(self, is_open: Callable[[Request], bool]) -> Iterator[tuple[Request, int]]:
        """Yield who is suspect, with attempts; forgets those that are not `is_open` any more.

        The attempts of those that never ran alone, or survived it, stay below what is poison: they may be innocent.
        """
        self._accused = {key: one for key, one in self._accused.items() if is_open(one)}
        self._convicted &= self._accused.keys()
        for key, one in self._accused.items():
            yield one, one.attempts if key in self._convicted else min(one.attempts, self._max_attempts - 1)

    def put_back(self, batch: Batch) -> None:
        """Take a batch that is to run again and is not to blame; a canary is nobody's and needs no second run."""
        if batch.requests:
            self._returned.append(batch)

    def run_alone(self, requests: list[Request], now: float) -> None:
        """Let requests run again as a batch of their own."""
        if requests:
            self._returned.append(self._isolated(requests, now))

    def next(self, model: str, now: float) -> Batch | None:
        """Remove and return what a replica of the model should run next: a suspect alone, else a returned batch."""
        is_held = self.held.get(model, _nobody)
        suspect = next((one for one in self._suspects if one.model == model and not is_held(one)), None)
        if suspect is not None:
            self._suspects = deque(one for one in self._suspects if one is not suspect)
            return self._isolated([suspect], now)
        mine = (one for one in self._returned if one.model == model)
        returned = next((one for one in mine if not any(map(is_held, one.requests))), None)
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
            self._accused[id(request)] = request
        if len(batch.requests) > 1 or not requests or requests[0].attempts < self._max_attempts:
            self._suspects.extend(requests)
            return
        often = requests[0].attempts
        self._poison(batch, requests[0], f"it brought its {self._kind} down {often} times; the last: {why}")

    def _poison(self, batch: Batch, request: Request, why: str) -> None:
        self._accused[id(request)] = request
        self._convicted.add(id(request))
        failure = Failure(Code.POISONED, why)
        self._poisoned.append(Finished(batch, [], [(request, failure)]))

    def _isolated(self, requests: list[Request], now: float) -> Batch:
        rows = sum(one.rows for one in requests)
        return Batch(next(self._numbers), requests[0].model, requests, rows, Reason.ISOLATION, now)


def _nobody(_: Request) -> bool:
    return False
