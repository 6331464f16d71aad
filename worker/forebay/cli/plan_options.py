"""The options of `forebay plan`, and how lists of numbers are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from forebay.errors import UsageError

OVERHEAD_MS = 0.2
"""Per batch beside the model: writing it into its slot and a round trip between the processes (0.1 ms)."""

MODES = ("eager", "linger", "static", "defer")
T = TypeVar("T", int, float)

FromTopic = Annotated[
    str | None,
    typer.Option(
        "--from-topic", help="Replay this topic's arrival times; default: the input topic.", show_default=False
    ),
]
Records = Annotated[int, typer.Option("--records", min=2, help="Of the topic: about so many, the newest.")]
Minutes = Annotated[
    float | None, typer.Option("--minutes", help="Of the topic: the last so many minutes.", show_default=False)
]
Speed = Annotated[float, typer.Option("--speed", help="Replay the topic so many times as fast.")]
Rate = Annotated[
    float | None, typer.Option("--rate", help="In place of a topic: random requests per second.", show_default=False)
]
Burst = Annotated[int, typer.Option("--burst", min=1, help="With --rate: so many come at once.")]
Requests = Annotated[int, typer.Option("--requests", min=100, help="With --rate: how many.")]
Seed = Annotated[int, typer.Option("--seed", help="With --rate: of the random numbers.")]
CurveFile = Annotated[
    Path | None, typer.Option("--curve", help="Service times from a file, in place of measuring.", show_default=False)
]
WorkerUrl = Annotated[
    str | None, typer.Option("--url", "-u", help="Service times of the worker at this address.", show_default=False)
]
SaveCurve = Annotated[
    Path | None, typer.Option("--save-curve", help="Write the service times there.", show_default=False)
]
WhichModel = Annotated[str | None, typer.Option("--model", "-m", help="Which of several models.", show_default=False)]
MaxBatchSize = Annotated[
    str | None,
    typer.Option(
        "--max-batch-size", metavar="8,32,128", help="Default: as set, a quarter, four times.", show_default=False
    ),
]
Dispatch = Annotated[
    str | None,
    typer.Option("--dispatch", metavar="eager,linger", help="Default: as set, eager and linger.", show_default=False),
]
MaxWaitMs = Annotated[
    str | None, typer.Option("--max-wait-ms", metavar="2,5", help="For linger. Default: as set.", show_default=False)
]
Replicas = Annotated[
    str | None, typer.Option("--replicas", metavar="1,2", help="Of one worker. Default: as set.", show_default=False)
]
Gpus = Annotated[str, typer.Option("--gpus", metavar="1,2", help="Workers of the group, one per GPU.")]
TargetLatencyMs = Annotated[
    float | None,
    typer.Option(
        "--target-latency-ms", help="Advise what reaches this p99 at the least busy share.", show_default=False
    ),
]
OverheadMs = Annotated[float, typer.Option("--overhead-ms", min=0, help="Per batch beside the model.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", help="Draw latency and busy share over the load.", show_default=False)
]


def numbers(option: str, text: str | None, kind: Callable[[str], T] = float) -> list[T]:  # type: ignore[assignment]
    """Read `8,32,128`; an empty list where the option was not given."""
    if text is None:
        return []
    try:
        found = sorted({kind(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or not all(0 < one < float("inf") for one in found):
        raise UsageError(f"{option} takes numbers above 0, separated by commas, not {text!r}")
    return found


def modes(text: str | None) -> list[str]:
    """Read `eager,linger`; an empty list where the option was not given."""
    found = text.split(",") if text is not None else []
    if unknown := [mode for mode in found if mode not in MODES]:
        raise UsageError(f"--dispatch takes {', '.join(MODES)}, separated by commas, not {unknown[0]!r}")
    return found
