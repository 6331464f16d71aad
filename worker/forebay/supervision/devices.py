"""The devices of `--devices`: which ones are meant, and how a worker's settings differ for its own.

Runs in the supervisor and, for the settings, in each worker. It never imports torch: who asks for all devices has them
counted by a process that ends at once.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence

from forebay.errors import ConfigError, UsageError
from forebay.inference.cores import share
from forebay.settings import Settings
from forebay.supervision.tether import label

_COUNT_SECONDS = 120.0


def devices_of(text: str, count: Callable[[], int] | None = None) -> list[str]:
    """Return the devices that `--devices` names: `all`, `0,2`, `cuda:0,cuda:1`, or fake ones.

    Raises UsageError for what is no device or is named twice, ConfigError where `all` finds none.
    """
    if text.strip() == "all":
        found = (count or count_cuda)()
        if not found:
            raise ConfigError("--devices all: torch sees no CUDA device here; name the devices, or leave --devices out")
        return [f"cuda:{index}" for index in range(found)]
    devices = [f"cuda:{part}" if part.isdecimal() else part for part in (part.strip() for part in text.split(","))]
    for device in devices:
        if not re.fullmatch(r"cpu|(cuda|fake):\d+(\?.*)?", device):
            raise UsageError(f"--devices takes all, 0,2 or cuda:0,cuda:1, not {text!r}")
    names = [label(device) for device in devices]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--devices names {name} twice: one worker has all of a device; see inference.replicas")
    return devices


def count_cuda() -> int:
    """Return how many CUDA devices torch sees, in a process of its own: torch and a CUDA context are not for us."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_COUNT_SECONDS, check=True)
        return int(ran.stdout.split()[-1])
    except subprocess.CalledProcessError as error:
        said = (error.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ConfigError(f"--devices all: torch cannot be asked for its devices: {said}") from error
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise ConfigError("--devices all: torch did not say how many devices there are; name them") from error


def settings_for(settings: Settings, device: str, workers: Sequence[str]) -> Settings:
    """Return the settings of the worker of one device: its own names towards Kafka, and a port that nobody else has.

    The names are the same after every restart and whatever other devices are named, so that a static member gets its
    partitions back and a transactional worker fences its own past.
    """
    kafka, delivery = settings.kafka, settings.delivery
    own = label(device).replace(":", "-")
    client = {**kafka.client, "client.id": f"{kafka.client.get('client.id', 'forebay')}-{own}"}
    if "group.instance.id" in client:
        client["group.instance.id"] = f"{client['group.instance.id']}-{own}"
    if delivery.transactional_id is not None:
        delivery = delivery.model_copy(update={"transactional_id": f"{delivery.transactional_id}-{own}"})
    return settings.model_copy(
        update={
            "kafka": kafka.model_copy(update={"client": client}),
            "delivery": delivery,
            "inference": settings.inference.model_copy(
                update={"device": device, **_threads(settings, device, workers)}
            ),
            "ops": settings.ops.model_copy(update={"host": "127.0.0.1", "port": 0}),
        }
    )


def _threads(settings: Settings, device: str, workers: Sequence[str]) -> dict[str, int]:
    """Divide the cores among the workers that compute on them; each would else take all for itself."""
    if settings.inference.threads is not None or device.startswith("cuda"):
        return {}
    replicas = 1 if settings.inference.executor == "inline" else settings.inference.replicas * len(settings.served)
    return {"threads": share(max(replicas, 1) * len(workers))}
