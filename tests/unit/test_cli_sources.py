"""Where `forebay send` takes requests from."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from forebay.cli.documents import Form, Prepared
from forebay.cli.request import only_request
from forebay.cli.send import identify, make_headers
from forebay.cli.sources import check_requests, inline_request, parse_header, parse_size, read_requests
from forebay.errors import UsageError
from forebay.wire import parse_request

DOCUMENT = '{"id":"d1","inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]}],  "extra":1}'


def read(path: Path | str, **form: object) -> list[Prepared]:
    return list(read_requests([str(path)], Form(**form)))


def test_a_json_line_that_is_a_request_is_sent_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(DOCUMENT + "\n\n" + '{"y": [[1, 2]]}' + "\n")
    first, second = read(file)
    assert (first.value, first.id) == (DOCUMENT.encode(), "d1")
    assert first.headers == [("content-type", b"application/json")]
    assert parse_request(second.value, second.headers).inputs["y"].tolist() == [[1, 2]]
    assert second.origin == f"{file}:3"


def test_standard_input_is_read_as_json_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(DOCUMENT.encode())))
    assert [request.id for request in read("-")] == ["d1"]


def test_text_becomes_one_request_per_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\nzwei é\n")
    inputs = [parse_request(one.value, one.headers).inputs for one in read(tmp_path / "a.txt", input="text")]
    assert inputs == [{"text": [b"one"]}, {"text": ["zwei é".encode()]}]


def test_arrays_are_inputs_by_name_and_the_file_gives_the_id(tmp_path: Path) -> None:
    np.savez(tmp_path / "many.npz", a=np.ones((1, 2), np.float32), b=np.zeros((1, 1), np.int8))
    np.save(tmp_path / "one.npy", np.ones((1, 3)))
    (many,), (one,) = read(tmp_path / "many.npz"), read(tmp_path / "one.npy", input="x")
    assert set(parse_request(many.value, many.headers).inputs) == {"a", "b"}
    assert list(parse_request(one.value, one.headers).inputs) == ["x"]
    assert (many.id, one.id) == ("many", "one")


def test_an_image_travels_as_its_file_or_as_its_pixels(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (4, 2), (10, 20, 30)).save(tmp_path / "cat.png")
    (whole,) = read(tmp_path / "cat.png")
    assert parse_request(whole.value, whole.headers).inputs["input"] == [(tmp_path / "cat.png").read_bytes()]
    (pixels,) = read(tmp_path / "cat.png", pixels=True, size=(3, 5), input="image")
    found = parse_request(pixels.value, pixels.headers).inputs["image"]
    assert (found.shape, found.dtype, found[0, 0, 0].tolist()) == ((1, 3, 5, 3), np.uint8, [10, 20, 30])


def test_a_folder_gives_the_files_that_it_knows_by_name(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.json").write_text('{"x": [2]}')
    (tmp_path / "deep" / "c.json").write_text('{"x": [3]}')
    (tmp_path / "a.json").write_text('{"x": [1]}')
    (tmp_path / "README.md").write_text("not a request")
    found = [parse_request(one.value, one.headers).inputs["x"].tolist() for one in read(tmp_path)]
    assert found == [[1], [2], [3]]


def test_raw_sends_bytes_unchecked(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_bytes(b'{"inputs":\n\n\xff\n')
    (whole,) = read(tmp_path / "bad.jsonl", raw=True)
    assert whole.value == b'{"inputs":\n\n\xff\n'
    assert whole.headers == []


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", b'{"x": [1]}\n{"x": \n', "a.jsonl:2: not JSON"),
        ("a.json", b"[1]", "a request is a JSON object, not a list"),
        ("a.json", DOCUMENT.replace("[1,2]}", "[1]}").encode(), "takes 2 elements, not 1"),
        ("a.json", DOCUMENT.replace("FP32", "FP99").encode(), "inputs.0.datatype"),
        ("a.json", b'{"x": [[1], [1, 2]]}', "x: the rows differ in length"),
        ("a.json", b"{}", "at least one input"),
        ("a.json", b'{"id": 7, "x": [1]}', "a request id is a string"),
        ("a.json", b'{"name": "m", "x": [1]}', "name is a string, no tensor; in the short form every key but id"),
        ("a.json", b'{"id": "p0", "inputs": {"x": [1]}}', "inputs is an object, no tensor"),
        ("a.npy", b"rubbish", "not an array file"),
        ("a.xyz", b"", "cannot tell what this is"),
        ("a.png", b"rubbish", "not an image"),
    ],
)
def test_what_cannot_become_a_request_is_told_with_its_file(
    tmp_path: Path, name: str, content: bytes, sentence: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=sentence):
        read(tmp_path / name, pixels=True)


def test_a_missing_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read(tmp_path / "gone.json")


def test_headers_of_the_command_line_reach_every_kind_of_request(tmp_path: Path) -> None:
    headers = make_headers("m:2", 50, 1, ["kafka_correlationId=0x00ff", "note=a=b"])
    expected = [
        ("model", b"m"),
        ("model-version", b"2"),
        ("timeout-ms", b"50"),
        ("priority", b"1"),
        ("kafka_correlationId", b"\x00\xff"),
        ("note", b"a=b"),
    ]
    assert headers == expected
    form = Form(options={"headers": headers})
    for text in (DOCUMENT, json.dumps({"x": [1]})):
        assert [header for header in inline_request(text, form).headers if header in expected] == expected
    (tmp_path / "raw.bin").write_bytes(b"x")
    assert read(tmp_path / "raw.bin", raw=True, options={"headers": headers})[0].headers == expected


@pytest.mark.parametrize(
    ("text", "sentence"), [("nothing", "NAME=VALUE"), ("=x", "NAME=VALUE"), ("a=0xzz", "not hexadecimal")]
)
def test_a_malformed_header_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        parse_header(text)


def test_a_size_is_height_by_width() -> None:
    assert parse_size("224x160") == (224, 160)
    for wrong in ("224", "0x5", "axb"):
        with pytest.raises(UsageError, match="HEIGHTxWIDTH"):
            parse_size(wrong)


def test_the_wanted_id_precedes_the_requests_own_by_its_header() -> None:
    request = Prepared(b"", [("a", b"b")], "own", "here")
    assert identify(request, None) == ("own", [("a", b"b")])
    assert identify(request, "p-1") == ("p-1", [("a", b"b"), ("x-request-id", b"p-1")])
    made, headers = identify(Prepared(b"", [], None, "here"), None)
    assert headers == [("x-request-id", made.encode())]


def test_the_short_form_takes_an_id_parameters_and_outputs_beside_its_tensors() -> None:
    text = '{"id": "p0", "parameters": {"a": 1}, "outputs": [{"name": "y"}], "x": [[1.0, 2.0]], "n": [3]}'
    made = inline_request(text, Form())
    parsed = parse_request(made.value, made.headers)
    assert (made.id, parsed.id, parsed.parameters, parsed.wanted) == ("p0", "p0", {"a": 1}, ["y"])
    assert {name: array.dtype for name, array in parsed.inputs.items()} == {"x": np.float32, "n": np.int64}
    assert identify(made, None) == ("p0", made.headers)


def test_tensors_may_be_named_like_the_other_keys() -> None:
    made = inline_request('{"id": ["a"], "outputs": ["b"], "parameters": [1.5]}', Form())
    assert set(parse_request(made.value, made.headers).inputs) == {"id", "outputs", "parameters"}


def test_files_are_checked_before_anything_is_sent_and_the_sentence_says_so(tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_text('{"x": [1]}\n{"x": [2]}\n')
    assert check_requests([str(tmp_path), "-"], Form()) == 2
    (tmp_path / "zbad.jsonl").write_text('{"x": [1]}\n{"x": \n')
    with pytest.raises(UsageError, match=r"zbad\.jsonl:2: not JSON.*; nothing was sent"):
        check_requests([str(tmp_path)], Form())
    with pytest.raises(UsageError, match=r"cannot be read.*; nothing was sent"):
        check_requests([str(tmp_path / "gone.json")], Form())


def test_one_request_is_refused_where_a_file_holds_several(tmp_path: Path) -> None:
    (tmp_path / "many.jsonl").write_text('{"x": [1]}\n' * 6)
    with pytest.raises(UsageError, match=r"many\.jsonl holds 6 requests .* forebay send takes many"):
        only_request(str(tmp_path / "many.jsonl"), Form())
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="holds no request"):
        only_request(str(tmp_path / "none.jsonl"), Form())


class Terminal(io.BytesIO):
    """Standard input as a person has it."""

    def isatty(self) -> bool:
        return True


def test_a_person_at_a_terminal_is_told_that_standard_input_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=Terminal(b'{"x": [1]}\n')))
    assert len(list(read_requests([], Form()))) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == "reading requests, one JSON object per line, from standard input; Ctrl-D ends it\n"


def test_an_id_that_is_a_number_is_told_to_be_written_as_text() -> None:
    """It was taken for a tensor without rows."""
    with pytest.raises(UsageError, match='a request id is a string: write "id": "5"'):
        inline_request('{"id": 5, "x": [1]}', Form())


@pytest.mark.parametrize("content", [{}, {"a.jsonl": "\n\n"}, {"a.py": "x = 1"}])
def test_files_without_a_request_are_no_success(content: dict[str, str], tmp_path: Path) -> None:
    """A folder of unknown files was sent with `0 sent` and code 0."""
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match="there is no request in it; known are"):
        check_requests([str(tmp_path)], Form())
    assert check_requests([], Form()) == check_requests(["-"], Form()) == 0
