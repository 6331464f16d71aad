"""Dead letters as `forebay dlq` sees them: what each says, which ones are meant, and the request inside.

Pure: records in, values out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from forebay.cli.outcomes import integer
from forebay.errors import UsageError
from forebay.records import Headers, Record
from forebay.wire import text_header
from forebay_schemas import ErrorCode
from forebay_schemas import headers as names

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


@dataclass(frozen=True, slots=True)
class Selection:
    """Which letters are meant; what is empty selects all. Times are Unix milliseconds."""

    codes: Sequence[str] = ()
    models: Sequence[str] = ()
    ids: Sequence[str] = ()
    since_ms: int | None = None
    until_ms: int | None = None

    def __post_init__(self) -> None:
        known = {code.value for code in ErrorCode}
        wrong = sorted(set(self.codes) - known)
        if wrong:
            raise UsageError(f"unknown error code {wrong[0]}; one of {', '.join(sorted(known))}")

    def takes(self, letter: Letter) -> bool:
        """Whether the letter is meant."""
        written = letter.record.timestamp_ms
        return (
            (not self.codes or letter.code in self.codes)
            and (not self.models or letter.model in self.models)
            and (not self.ids or letter.id in self.ids)
            and (self.since_ms is None or written >= self.since_ms)
            and (self.until_ms is None or written < self.until_ms)
        )


@dataclass(frozen=True, slots=True)
class Letter:
    """One dead letter."""

    record: Record

    @property
    def id(self) -> str:
        """The request id as far as header and key tell it, else where the request was."""
        key = self.record.key.decode("utf-8", "backslashreplace") if self.record.key else None
        return text_header(self.record.headers, names.REQUEST_ID) or key or self.origin

    @property
    def code(self) -> str:
        """The error code."""
        return _last(self.record.headers, names.DLT_CODE) or "?"

    @property
    def message(self) -> str:
        """What went wrong, for a person."""
        return _last(self.record.headers, names.DLT_MESSAGE) or ""

    @property
    def model(self) -> str:
        """The model that the request named, empty if it named none."""
        headers = self.record.headers
        return text_header(headers, names.MODEL) or text_header(headers, names.MLSERVER_MODEL) or ""

    @property
    def topic(self) -> str | None:
        """The topic that the request came from."""
        return _last(self.record.headers, names.DLT_TOPIC)

    @property
    def origin(self) -> str:
        """Where the request was, as TOPIC/PARTITION/OFFSET."""
        headers = self.record.headers
        places = (integer(_bytes(headers, names.DLT_PARTITION), 4), integer(_bytes(headers, names.DLT_OFFSET), 8))
        return "/".join([self.topic or "?", *("?" if place is None else str(place) for place in places)])

    @property
    def attempts(self) -> int:
        """How often the request ran."""
        return integer(_bytes(self.record.headers, names.DLT_ATTEMPTS), None) or 0

    @property
    def replays(self) -> int:
        """How often the request was replayed before it came here again."""
        return integer(_bytes(self.record.headers, names.REPLAYS), None) or 0

    @property
    def place(self) -> str:
        """Where the letter itself is, as PARTITION/OFFSET."""
        return f"{self.record.partition}/{self.record.offset}"

    @property
    def age(self) -> tuple[int, int, int]:
        """What letters are ordered by: when they were written, then where they are."""
        return self.record.timestamp_ms, self.record.partition, self.record.offset

    def request_headers(self) -> Headers:
        """Give the request's own headers, byte for byte, with the replay counted."""
        kept = list(self.record.headers)
        for name in names.DEAD_LETTER_HEADERS:
            # The letter's own are the last of their name: a request may carry some from a dead letter topic before.
            index = next((i for i in range(len(kept) - 1, -1, -1) if kept[i][0] == name), None)
            if index is not None:
                del kept[index]
        kept = [(name, value) for name, value in kept if name != names.REPLAYS]
        return [*kept, (names.REPLAYS, str(self.replays + 1).encode())]

    def as_json(self) -> dict[str, Any]:
        """Give what a program wants to know, without the payload."""
        return {
            "place": self.place,
            "id": self.id,
            "code": self.code,
            "message": self.message,
            "model": self.model or None,
            "origin": self.origin,
            "attempts": self.attempts,
            "replays": self.replays,
            "timestamp_ms": self.record.timestamp_ms,
            "bytes": len(self.record.value or b""),
        }


def oldest(letters: Iterable[Letter], limit: int | None) -> tuple[list[dict[str, Any]], int]:
    """Give the oldest letters as plain values, without payload, in order, and how many there are in all."""
    # Payloads are let go while reading: a topic of dead letters may be larger than this machine's memory.
    found = [(letter.age, letter.as_json()) for letter in letters]
    found.sort(key=lambda pair: pair[0])
    return [told for _, told in found[:limit]], len(found)


def parse_time(text: str | None, now: datetime) -> int | None:
    """Read a time as Unix milliseconds: ISO 8601, or an age such as 90s, 30m, 2h, 7d. Without a zone it is local."""
    if text is None:
        return None
    age = re.fullmatch(r"(\d+)([smhdw])", text.strip())
    if age:
        return int((now.timestamp() - int(age[1]) * _UNITS[age[2]]) * 1000)
    try:
        return int(datetime.fromisoformat(text.strip()).timestamp() * 1000)
    except ValueError as error:
        raise UsageError(f"{text!r} is no time: give 2026-01-31T12:00, or an age such as 30m, 2h, 7d") from error


def show_time(timestamp_ms: int) -> str:
    """Show Unix milliseconds as UTC, in a form that `parse_time` reads."""
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC).isoformat(timespec="milliseconds")


def _bytes(headers: Headers, name: str) -> bytes | None:
    return next((value for key, value in reversed(headers) if key == name and value), None)


def _last(headers: Headers, name: str) -> str | None:
    value = _bytes(headers, name)
    return None if value is None else value.decode("utf-8", "replace")
