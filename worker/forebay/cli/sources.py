"""Where `forebay send` and `forebay request` take requests from: JSON lines, documents, arrays, text, images.

Each becomes a record value with headers. Knows files and the wire, and nothing of Kafka.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from forebay.cli.documents import Form, Prepared, build, document
from forebay.errors import UsageError
from forebay.wire import WireError

IMAGES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp"})
KNOWN = ".jsonl .ndjson .json .txt .npy .npz and images"
STDIN = "-"


Verdict = Callable[[Prepared], None]
"""Raises UsageError for a request that is not to be sent."""


def read_requests(paths: Sequence[str], form: Form, verdict: Verdict | None = None) -> Iterator[Prepared]:
    """Give the requests of files, folders and `-`, which is standard input; folders by name, deeply.

    Raises UsageError with file and line for what cannot become a request, and what `verdict` raises.
    """
    for request in _read(paths, form):
        if verdict is not None:
            verdict(request)
        yield request


def _read(paths: Sequence[str], form: Form) -> Iterator[Prepared]:
    for path in paths or [STDIN]:
        if path == STDIN:
            _say_that_it_waits(form)
            yield from _lines("standard input", sys.stdin.buffer, form)
            continue
        files = [Path(path)]
        if files[0].is_dir():
            files = sorted(file for file in files[0].rglob("*") if file.is_file() and _kind(file, form) is not None)
        for file in files:
            yield from _file(file, form)


def can_be_read_twice(path: str) -> bool:
    """Whether reading a path takes nothing away: a file or a folder, but no pipe and not standard input."""
    return path != STDIN and (Path(path).is_file() or Path(path).is_dir())


def check_requests(paths: Sequence[str], form: Form, verdict: Verdict | None = None) -> int:
    """Read every request that can be read again, so that a bad one is met before any is sent; give how many.

    Raises what `read_requests` raises. A pipe and standard input are left alone.
    """
    again = [path for path in paths if can_be_read_twice(path) or not (path == STDIN or Path(path).exists())]
    try:
        found = sum(1 for _ in read_requests(again, form, verdict)) if again else 0
    except UsageError as error:
        raise UsageError(f"{error}; nothing was sent") from error
    if paths and not found and len(again) == len(paths):
        raise UsageError(f"{', '.join(paths)}: there is no request in it; known are {KNOWN}")
    return found


def _say_that_it_waits(form: Form) -> None:
    if sys.stdin.buffer.isatty():
        what = "lines to send as they are" if form.raw else "requests, one JSON object per line"
        typer.echo(f"reading {what}, from standard input; Ctrl-D ends it", err=True)


def inline_request(text: str, form: Form) -> Prepared:
    """Give the request that a JSON text of the command line says."""
    return document("--inputs", text.encode(), form)


def parse_header(text: str) -> tuple[str, bytes]:
    """Read `NAME=VALUE`; a value that starts with `0x` is bytes in hexadecimal."""
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise UsageError(f"--header takes NAME=VALUE, not {text!r}")
    if value.startswith("0x"):
        try:
            return name, bytes.fromhex(value[2:])
        except ValueError as error:
            raise UsageError(f"--header {name}: {value!r} is not hexadecimal") from error
    return name, value.encode()


def parse_size(text: str | None) -> tuple[int, int] | None:
    """Read `HEIGHTxWIDTH`."""
    if text is None:
        return None
    height, _, width = text.lower().partition("x")
    if not (height.isdigit() and width.isdigit() and int(height) and int(width)):
        raise UsageError(f"--size takes HEIGHTxWIDTH such as 224x224, not {text!r}")
    return int(height), int(width)


def _kind(file: Path, form: Form) -> Callable[[Path, Form], Iterable[Prepared]] | None:
    suffix = file.suffix.lower()
    if form.raw:
        return _raw
    if suffix in IMAGES:
        return _image
    return {
        ".jsonl": _json_lines,
        ".ndjson": _json_lines,
        ".json": _json,
        ".txt": _text,
        ".npy": _arrays,
        ".npz": _arrays,
    }.get(suffix)


def _file(file: Path, form: Form) -> Iterator[Prepared]:
    kind = _kind(file, form)
    if kind is None:
        raise UsageError(f"{file}: cannot tell what this is; known are {KNOWN}, or --raw for the bytes as they are")
    try:
        yield from kind(file, form)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error
    except WireError as error:
        raise UsageError(f"{file}: {error}") from error


def _raw(file: Path, form: Form) -> Iterator[Prepared]:
    yield Prepared(file.read_bytes(), list(form.options.get("headers") or ()), None, str(file))


def _json_lines(file: Path, form: Form) -> Iterator[Prepared]:
    with file.open("rb") as lines:
        yield from _lines(str(file), lines, form)


def _lines(origin: str, lines: Iterable[bytes], form: Form) -> Iterator[Prepared]:
    for number, line in enumerate(lines, start=1):
        text = line.rstrip(b"\r\n")
        if form.raw:
            yield Prepared(text, list(form.options.get("headers") or ()), None, f"{origin}:{number}")
        elif text.strip():
            yield document(f"{origin}:{number}", text, form)


def _json(file: Path, form: Form) -> Iterator[Prepared]:
    yield document(str(file), file.read_bytes(), form)


def _text(file: Path, form: Form) -> Iterator[Prepared]:
    """One request per line that is not empty."""
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if line.strip():
            yield build(f"{file}:{number}", {form.input: [line]}, form, None)


def _arrays(file: Path, form: Form) -> Iterator[Prepared]:
    import numpy as np

    try:
        loaded = np.load(file, allow_pickle=False)
    except ValueError as error:
        raise UsageError(f"{file}: not an array file without pickled objects: {error}") from error
    inputs = {form.input: loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    yield build(str(file), inputs, form, file.stem)


def _image(file: Path, form: Form) -> Iterator[Prepared]:
    """The encoded file as one BYTES element, or its pixels as UINT8 [1, height, width, 3]."""
    content = [file.read_bytes()] if not form.pixels else _pixels(file, form.size)
    yield build(str(file), {form.input: content}, form, file.stem)


def _pixels(file: Path, size: tuple[int, int] | None) -> Any:
    import numpy as np

    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise UsageError("--pixels needs Pillow: pip install pillow; or send the files undecoded") from error
    try:
        with Image.open(file) as image:
            decoded = image.convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise UsageError(f"{file}: not an image that can be decoded") from error
    if size is not None:
        decoded = decoded.resize((size[1], size[0]))
    return np.asarray(decoded, dtype=np.uint8)[np.newaxis]
