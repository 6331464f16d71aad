"""How outcomes look, for people and for programs."""

from __future__ import annotations

import json

import numpy as np
from rich.text import Text

from forebay.cli.outcomes import (
    as_json,
    as_line,
    as_text,
    headers_as_json,
    matches,
    printable,
    read_outcome,
    record_as_json,
    shown_value,
    summary,
)
from forebay.records import Code, Record
from forebay.wire import build_error, build_result


def record(value: bytes, headers: list[tuple[str, bytes | None]], key: bytes = b"r") -> Record:
    return Record("results", 1, 7, key, value, headers, 1000)


def plain(markup: str) -> str:
    return Text.from_markup(markup).plain


def test_a_result_is_a_line_and_a_document() -> None:
    value, headers = build_result({"y": np.array([[0.5, 2]], np.float32), "t": [b"[red]", b"\xff"]}, id="r", model="m")
    one = record(value, [*headers, ("batch-size", b"3"), ("source", b"in/0/1")])
    assert plain(as_line(read_outcome(one))) == "ok y FP32[1, 2] 0.5 2  t '[red]', '\\\\xff' batch 3"
    told = json.loads(json.dumps(record_as_json(one)))
    assert told["outputs"] == {
        "y": {"datatype": "FP32", "shape": [1, 2], "data": [[0.5, 2.0]]},
        "t": {"datatype": "BYTES", "shape": [2], "data": ["[red]", {"base64": "/w=="}]},
    }
    assert (told["status"], told["id"], told["source"], told["batch_size"]) == ("ok", "r", "in/0/1", 3)
    assert (told["topic"], told["partition"], told["offset"]) == ("results", 1, 7)


def test_an_error_is_a_line_and_a_document() -> None:
    value, headers = build_error("r", Code.RESOURCE_EXHAUSTED, "out of [memory]")
    outcome = read_outcome(record(value, headers))
    assert plain(as_line(outcome)) == "error resource_exhausted out of [memory]"
    told = as_json(outcome)
    assert (told["status"], told["code"], told["retriable"]) == ("error", "resource_exhausted", True)


def test_a_foreign_record_is_told_and_ends_nothing() -> None:
    outcome = read_outcome(record(b"hello", []))
    assert as_json(outcome)["status"] == "unreadable"
    assert plain(as_line(outcome)).startswith("unreadable the value is not JSON")
    assert as_json(read_outcome(Record("t", 0, 0, None, None, [], 0)))["status"] == "unreadable"


def test_numbers_that_json_lacks_become_text() -> None:
    value, headers = build_result({"y": np.array([[np.nan, 1, -np.inf]], np.float32)}, id="r", model="m")
    assert as_json(read_outcome(record(value, headers)))["outputs"]["y"]["data"] == [["nan", 1.0, "-inf"]]


def test_a_long_row_shows_its_largest_with_their_places() -> None:
    row = np.zeros((1, 1000), np.float32)
    row[0, 281], row[0, 5] = 0.9, 0.1
    assert plain(summary(row)) == "FP32[1, 1000] largest #281: 0.9, #5: 0.1, #0: 0"
    assert plain(summary(np.zeros((2, 10), np.int8))).endswith("0 0 0 0 0 0 0 0 …")
    assert plain(summary([b"a"] * 5)) == "'a', 'a', 'a' … 5 elements"


def test_an_outcome_is_found_by_its_request_id() -> None:
    one = record(b"", [], key=b"mine")
    assert matches(one, [])
    assert matches(one, ["other", "mine"])
    assert not matches(one, ["other"])


def test_headers_show_text_integers_and_other_bytes_each_in_their_way() -> None:
    shown = headers_as_json(
        [
            ("a", b"text"),
            ("a", b"last"),
            ("none", None),
            ("opaque", b"\xff"),
            ("kafka_replyPartition", b"\x00\x00\x00\x02"),
            ("kafka_dlt-original-offset", (41).to_bytes(8, "big")),
            ("kafka_dlt-original-partition", b"7"),
        ]
    )
    assert shown == {
        "a": "last",
        "none": None,
        "opaque": {"base64": "/w=="},
        "kafka_replyPartition": 2,
        "kafka_dlt-original-offset": 41,
        "kafka_dlt-original-partition": 7,
    }


def test_what_a_stranger_sent_cannot_steer_the_terminal() -> None:
    value, headers = build_error("r", Code.MODEL_ERROR, "\x1b[2Jgone\x07")
    assert "\x1b" not in as_line(read_outcome(record(value, headers)))
    assert printable("a\x1b[31m\tb\n") == "a\\x1b[31m\tb\n"


def test_a_header_of_bytes_is_shown_as_the_command_line_takes_it() -> None:
    assert [shown_value(as_text(value)) for value in (b"text", b"\xff\x00", None)] == ["text", "0xff00", "(none)"]
    assert shown_value(7) == "7"
