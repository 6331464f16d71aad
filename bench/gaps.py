"""How long a replica has nothing to do between two batches: `python bench/gaps.py`.

A model of known service time (5 ms for a batch of 32) writes when each forward began and ended. Printed is the mean
gap between forwards under a full backlog, as a share of the service time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from rig import broker, fill, make_topics, run, worker_command
from throughput import Row, json_requests, show

WANTED = 0.03


def measure(address: str, count: int, layers: int, rows: int = 32) -> Row:
    """Run a backlog through the model that logs; compare the gaps with the service time."""
    topics = make_topics(address)
    fill(address, topics.requests, json_requests(count))
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "forwards"
        settings = {
            "model.factory": "models:Logged",
            "model.options": {"path": str(log), "layers": layers},
            "batch.max_batch_size": rows,
            "inference.threads": 1,
        }
        run(worker_command(address, topics, settings, "--until-end"))
        forwards = [tuple(map(float, line.split())) for line in log.read_text().splitlines()]
    full = [one for one in forwards if one[2] == rows]
    busy = full[len(full) // 10 : -len(full) // 10]  # neither the warm-up nor the end
    gaps = [after[0] - before[1] for before, after in pairwise(busy)]
    service = [end - begin for begin, end, _ in busy]
    gap, length = statistics.median(gaps), statistics.median(service)
    name = f"ms between forwards, backlog, {length * 1000:.0f} ms per batch of {rows}: service time"
    return Row(name, gap * 1000, length * 1000, gap / length, f"≤ {WANTED}", gap / length <= WANTED)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with broker() as address:
        rows = [measure(address, arguments.count, 1), measure(address, arguments.count // 2, 4)]
    show(rows, as_json=arguments.json)
    sys.exit(0 if all(row.holds for row in rows) else 1)


if __name__ == "__main__":
    main()
