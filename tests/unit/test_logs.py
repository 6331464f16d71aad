"""What of the Kafka client's own lines reaches the log."""

from __future__ import annotations

import errno
import io
import logging
from typing import Any

from forebay.logs import Output, Seldom
from forebay.testing import ManualClock


def _line(text: str) -> logging.LogRecord:
    return logging.LogRecord("forebay.kafka", logging.ERROR, "", 0, text, None, None)


def test_a_dead_broker_is_told_once_in_ten_seconds() -> None:
    clock = ManualClock()
    seldom = Seldom(clock)
    told = []
    for _ in range(400):
        told.append(seldom.filter(_line("FAIL [forebay#consumer-1] Connection refused")))
        clock.advance(0.05)
    assert told.count(True) == 2


def test_another_kind_of_line_is_told_at_once() -> None:
    seldom = Seldom(ManualClock())
    assert seldom.filter(_line("FAIL [a] Connection refused"))
    assert seldom.filter(_line("SESSTMOUT [a] Consumer group session timed out"))


def test_what_the_client_tries_again_by_itself_is_not_told() -> None:
    assert not Seldom(ManualClock()).filter(_line("GETPID [a] Coordinator load in progress: retrying"))


class Disk(io.RawIOBase):
    """A file on a disk that may be full, as standard error is one below its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.full = False
        self.kept = b""

    def writable(self) -> bool:
        return True

    def write(self, text: Any) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.kept += bytes(text[:7])
        return min(len(text), 7)


def test_a_full_disk_costs_lines_and_nothing_else_and_their_number_is_told() -> None:
    """A log on a full disk, or whose reader was gone, used to end the worker."""
    disk = Disk()
    output = Output(io.TextIOWrapper(io.BufferedWriter(disk), write_through=True))
    print("before", file=output, flush=True)
    disk.full = True
    for _ in range(3):
        print("never seen", file=output, flush=True)
    disk.full = False
    print("after", file=output, flush=True)
    print("later", file=output, flush=True)
    told = disk.kept.decode().splitlines()
    assert told == ["before", "(3 log lines before this one could not be written)", "after", "later"]


def test_a_stream_without_anything_below_it_is_written_as_it_is() -> None:
    stream = io.StringIO()
    output = Output(stream)
    print("one", file=output)
    stream.close()
    print("two", file=output)
    assert output.lost == 1
