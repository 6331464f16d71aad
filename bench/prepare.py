"""What `inference.prepare_workers` gains: `python bench/prepare.py`.

Two questions, each answered by contestants that do the same work in turn: how many more photos per second one
preparer gives (on the CPU, where it competes with the model for cores, and with a device that the CPU only waits for),
and how much less is padded when the batcher sees the lengths in tokens. Prints ratios; `--json` prints the figures.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table
from rig import HERE, Message, broker, fill, make_topics, median, rate, run, worker_command

from forebay.wire import build_request

PHOTOS = ("chelsea.png", "coffee.png", "rocket.jpg", "motorcycle_left.png", "china.jpg")
WIDTH = 1280
WORDS = ("water", "river", "stone", "light", "house", "green", "paper", "music", "table", "horse")
MEDIAN_TOKENS, SPREAD, MOST_TOKENS = 27, 0.8, 128


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: the same without a preparer and with one."""

    what: str
    without: float
    with_one: float
    ratio: float


def jpegs() -> list[bytes]:
    """Return photos as a camera makes them: JPEG, 1,280 pixels wide."""
    sys.path.insert(0, str(HERE.parent))
    from examples.image_classifier.samples import photo

    files = []
    for name in PHOTOS:
        picture = Image.open(io.BytesIO(photo(name))).convert("RGB")
        file = io.BytesIO()
        picture.resize((WIDTH, WIDTH * picture.height // picture.width)).save(file, "JPEG", quality=88)
        files.append(file.getvalue())
    return files


def photos(count: int) -> Iterator[Message]:
    """Yield requests of one photo each."""
    requests = [build_request({"image": [file]}) for file in jpegs()]
    for number in range(count):
        value, headers = requests[number % len(requests)]
        yield value, [(name, content or b"") for name, content in headers]


def texts(count: int) -> Iterator[Message]:
    """Yield texts whose lengths in tokens are log-normal, as those of queries and passages are; equal in each run."""
    random = np.random.default_rng(7)
    for length in np.exp(random.normal(np.log(MEDIAN_TOKENS), SPREAD, count)):
        words = random.choice(WORDS, size=int(np.clip(length, 3, MOST_TOKENS)) - 2)  # two tokens begin and end a text
        value, headers = build_request({"text": [" ".join(words).encode()]})
        yield value, [(name, content or b"") for name, content in headers]


def decoding_ms() -> float:
    """Return what a photo takes to decode, alone on one core, in milliseconds."""
    sys.path.insert(0, str(HERE.parent))
    from examples.image_classifier.model import decode

    files = jpegs()
    took = []
    for number in range(20):
        began = time.perf_counter()
        decode(files[number % len(files)])
        took.append((time.perf_counter() - began) * 1000)
    return median(took)


def measure_photos(address: str, model: dict[str, object], count: int, preparers: int) -> float:
    """Return photos per second."""
    topics = make_topics(address)
    fill(address, topics.requests, photos(count))
    settings: dict[str, object] = {
        **model,
        "batch.max_batch_size": 16,
        "inference.device": "cpu",
        "inference.threads": 1,
        "inference.prepare_workers": preparers,
    }
    run(worker_command(address, topics, settings, "--until-end"), folder=HERE.parent)
    return rate(address, topics.results, count)


def measure_texts(address: str, count: int, preparers: int) -> tuple[float, float]:
    """Return the share of tokens in what was computed, and texts per second of the model's time."""
    topics = make_topics(address)
    fill(address, topics.requests, texts(count))
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        settings: dict[str, object] = {
            "model.factory": "prepare_models:Counted",
            "model.options": {"notes": str(notes)},
            "batch.max_batch_size": 32,
            "inference.device": "cpu",
            "inference.threads": 1,
            "inference.prepare_workers": preparers,
        }
        run(worker_command(address, topics, settings, "--until-end"), folder=HERE.parent)
        noted = np.loadtxt(notes, ndmin=2)
    tokens, padded, seconds = noted.sum(0)
    return float(tokens / padded), float(count / seconds)


def main() -> None:
    """Measure everything, in turn, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=int, default=400)
    parser.add_argument("--texts", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found: dict[str, tuple[list[float], list[float]]] = {}
    decoding = decoding_ms()
    on_the_cpu: dict[str, object] = {"model.factory": "examples.image_classifier.model:ImageClassifier"}
    on_a_device = {"model.factory": "prepare_models:Remote", "model.options": {"ms_per_photo": decoding}}
    with broker() as address:
        for _ in range(arguments.rounds):
            for preparers in (0, 1):
                cpu = measure_photos(address, on_the_cpu, arguments.photos, preparers)
                device = measure_photos(address, on_a_device, 2 * arguments.photos, preparers)
                share, quick = measure_texts(address, arguments.texts, preparers)
                for what, value in (
                    ("photos/s, network on the CPU", cpu),
                    (f"photos/s, a device as fast as decoding, {decoding:.1f} ms", device),
                    ("tokens per padded token", share),
                    ("texts/s of the model's own time", quick),
                ):
                    found.setdefault(what, ([], []))[preparers].append(value)
    rows = []
    for what, (without, with_one) in found.items():
        before, after = median(without), median(with_one)
        rows.append(Row(what, before, after, after / before))
    show(rows, as_json=arguments.json)


def show(rows: list[Row], *, as_json: bool) -> None:
    """Print the rows."""
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    table = Table("what", "in the replica", "one preparer", "ratio")
    for row in rows:
        table.add_row(row.what, f"{row.without:,.2f}", f"{row.with_one:,.2f}", f"{row.ratio:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
