"""Where a consumer begins in its partitions, and where it goes on when its position is not in the log any more.

The client does not choose: it would jump over deleted requests without a word. It runs with `auto.offset.reset=error`,
so it reports a partition that has no position in its log, and fetches it no more until it is told one. It takes no seek
then: the partition has to be taken out of the assignment and put in again, which a rebalance under way may mistake for
its own answer. So what can be known before is known before: offsets are asked while a partition is being assigned.

On the loop's thread, which waits a few seconds at most for brokers that are slow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import confluent_kafka as ck

from forebay.errors import NoStartError
from forebay.records import Partition
from forebay.stream.member import Event
from forebay.stream.troubles import reset_offsets
from forebay.wording import counted

_FIRST, _END = -2, -1
"""The times that stand for the first record that a partition has, and for its end."""

_ANSWER_SECONDS = 3.0
_PAUSE_SECONDS = 1.0
"""Between two looks at partitions without a position: brokers may not answer, or say for a while what is over."""

_NAMED = 3
"""Partitions that one sentence names."""

_CUT_AT = re.compile(r"broker end offset is (\d+)")


@dataclass(frozen=True, slots=True)
class StartRule:
    """What the settings say: where a group without an offset starts, and what is done where requests were deleted."""

    no_offset: Literal["earliest", "latest", "error"] = "earliest"
    out_of_range: Literal["stop", "skip"] = "stop"


DEFAULT_RULE = StartRule()


@dataclass(frozen=True, slots=True)
class _Log:
    """A partition's log and the group in it. `position` is behind what was read, below 0 where only the client knows.

    None stands for a group without an offset.
    """

    first: int
    end: int
    position: int | None
    committed: int | None

    @property
    def deleted(self) -> int:
        """Offsets that were deleted and that the group had not finished: what is below its commit was answered."""
        if self.position is None or self.position < 0:
            return 0
        return max(self.first - max(self.position, self.committed or 0), 0)


class Starts:
    """The starts of one consumer's partitions; `client` is set once it is made, `note` takes what is to be told."""

    def __init__(self, rule: StartRule, config: Mapping[str, Any], note: Callable[[Event], None]) -> None:
        self._rule = rule
        self._group = str(config.get("group.id"))
        self._servers = str(config.get("bootstrap.servers"))
        self._note = note
        self._from: dict[Partition, int] = {}
        self._look_at = 0.0
        self._stopped = False
        self.client: Any = None
        self.astray: dict[Partition, str] = {}
        """Partitions that the client does not fetch, with what it said of them; empty as long as all is well."""

    def begin(self, known: Mapping[Partition, Any]) -> list[Any]:
        """Return newly assigned partitions with their starts; `known` is what the broker says is committed of each.

        Where that is None the client has to ask by itself. Raises NoStartError where the rule has no start.
        """
        self.forget(known)
        found = [place for place in known.values() if place is not None and place.offset >= 0]
        unknown = [ck.TopicPartition(*partition) for partition, place in known.items() if place is None]
        begun = self._by_rule([p for p, place in known.items() if place is not None and place.offset < 0])
        self._from |= {Partition(place.topic, place.partition): place.offset for place in found} | begun
        return [*found, *unknown, *(ck.TopicPartition(*partition, start) for partition, start in begun.items())]

    def forget(self, partitions: Iterable[Partition]) -> None:
        """Drop what is known of partitions that are not assigned any more, or anew."""
        for partition in partitions:
            self._from.pop(partition, None)
            self.astray.pop(partition, None)

    def without_commit(self, partition: Partition) -> int:
        """Return where an assigned partition began of which nothing is committed."""
        return self._from.get(partition, ck.OFFSET_END if self._rule.no_offset == "latest" else ck.OFFSET_BEGINNING)

    def sought(self, partition: Partition, offset: int) -> None:
        """Note that the position was moved."""
        self._from[partition] = offset

    def go(self, starts: Mapping[Partition, int]) -> None:
        """Fetch assigned partitions from these offsets, those too that the client does not fetch."""
        self.client.incremental_unassign([ck.TopicPartition(*partition) for partition in starts])
        self.client.incremental_assign([ck.TopicPartition(*partition, start) for partition, start in starts.items()])
        self._from |= starts
        for partition in starts:
            self.astray.pop(partition, None)

    def find(self, now: float) -> None:
        """Give the partitions that are astray a position again.

        Raises NoStartError, once, where requests were deleted and the rule is to stop, and where it has no start. What
        the brokers do not answer for is looked at again after a pause.
        """
        if self._stopped or now < self._look_at:
            return
        self._look_at = now + _PAUSE_SECONDS
        try:
            assigned = [Partition(place.topic, place.partition) for place in self.client.assignment()]
            self.astray = {partition: said for partition, said in self.astray.items() if partition in assigned}
            logs = self._logs(assigned) if self.astray else {}
            strays = {partition: log for partition, log in logs.items() if partition in self.astray}
            if self._rule.out_of_range == "stop" and any(log.deleted for log in strays.values()):
                self._stopped = True
                raise NoStartError(self._told({partition: log for partition, log in logs.items() if log.deleted}))
            starts = {partition: self._start(partition, log) for partition, log in strays.items()}
            found = {partition: start for partition, start in starts.items() if start is not None}
            found |= self._by_rule([partition for partition, start in starts.items() if start is None])
            if found:
                self.go(found)
        except ck.KafkaException as error:
            self._note(Event(error.args[0].name(), error.args[0].str()))

    def _by_rule(self, partitions: list[Partition]) -> dict[Partition, int]:
        """Return where partitions begin in which the group has no offset, or none that means anything."""
        if not partitions:
            return {}
        if self._rule.no_offset == "error":
            self._stopped = True
            topic, number = min(partitions)
            raise NoStartError(
                f"{topic} [{number}] has no offset to start from; set kafka.auto_offset_reset to earliest or latest, "
                "or reset the group's offsets"
            )
        if self._rule.no_offset == "earliest":
            return dict.fromkeys(partitions, ck.OFFSET_BEGINNING)
        ends = self._offsets(partitions, _END)  # in numbers: a start that has to be found again is the same then
        return {partition: ends.get(partition, ck.OFFSET_END) for partition in partitions}

    def _start(self, partition: Partition, log: _Log) -> int | None:
        """Return where to go on in a partition; None where the group has no offset, or none that this log knows."""
        position, where = log.position, f"{partition.topic} [{partition.partition}]"
        if position is None or position < 0:
            return position
        if (cut := _CUT_AT.search(self.astray[partition])) is not None:
            told = f"{where} was read to {position} and has been cut at {cut[1]} since: its brokers lost the rest"
            self._note(Event("FOREBAY_LOG_CUT", told, partition))
            return min(int(cut[1]), position)
        if position > log.end:
            told = f"{where} ends at {log.end}, before offset {position} of the group: it was made again, or cut"
            self._note(Event("FOREBAY_BEHIND_THE_END", told, partition))
            return None
        if log.deleted:
            self._note(Event("FOREBAY_SKIPPED", _sentence(partition, log), partition, log.first, log.deleted))
        return max(position, log.first)

    def _logs(self, partitions: list[Partition]) -> dict[Partition, _Log]:
        """Ask for the logs; those are left out of which the brokers do not say everything."""
        asked = [ck.TopicPartition(*partition) for partition in partitions]
        committed = _answered(lambda: self.client.committed(asked, timeout=_ANSWER_SECONDS))
        firsts, ends = self._offsets(partitions, _FIRST), self._offsets(partitions, _END)
        logs = {}
        for place in self.client.position(asked):
            partition = Partition(place.topic, place.partition)
            if partition in committed and partition in firsts and partition in ends:
                mark = committed[partition] if committed[partition] >= 0 else None
                position = place.offset if place.offset >= 0 else self._from.get(partition, mark)
                logs[partition] = _Log(firsts[partition], ends[partition], position, mark)
        return logs

    def _offsets(self, partitions: Iterable[Partition], time: int) -> dict[Partition, int]:
        asked = [ck.TopicPartition(*partition, time) for partition in partitions]
        return _answered(lambda: self.client.offsets_for_times(asked, timeout=_ANSWER_SECONDS))

    def _told(self, logs: Mapping[Partition, _Log]) -> str:
        """Say what was deleted, and how to go on."""
        told = [_sentence(partition, log) for partition, log in sorted(logs.items())[:_NAMED]]
        if len(logs) > _NAMED:
            total = counted(sum(log.deleted for log in logs.values()), "request")
            told.append(f"and so on in {len(logs)} partitions, up to {total} in all")
        return (
            f"{'; '.join(told)}. To go on without them set kafka.offset_out_of_range to skip, or, while no worker of "
            f"the group runs: {reset_offsets(self._group, self._servers, logs)}"
        )


def _sentence(partition: Partition, log: _Log) -> str:
    topic, number = partition
    return (
        f"{topic} [{number}]: the group stands at offset {log.first - log.deleted}, the first that is still there is "
        f"{log.first}: up to {counted(log.deleted, 'request')} deleted before an answer"
    )


def _answered(ask: Callable[[], list[Any]]) -> dict[Partition, int]:
    """Return the offsets that brokers tell, of the partitions for which they do."""
    try:
        return {Partition(place.topic, place.partition): place.offset for place in ask() if place.error is None}
    except ck.KafkaException:
        return {}
