"""Print what pip installs into the image: `requirements.py wants TORCH` or `requirements.py pins TORCH`.

`wants` are pyproject.toml's dependencies, the `torch` extra with TORCH in the place of torch, and scikit-learn for the
digits example. `pins` are the versions of requirements.lock, without hashes; a TORCH other than plain `torch` (a CPU
wheel, another release) lifts the pins of torch and of the CUDA packages that belong to it. Runs while the image is
built, with the standard library alone.
"""

import re
import sys
import tomllib
from pathlib import Path

EXAMPLE = "scikit-learn"
CUDA = re.compile(r"(torch|torchao|torchvision|triton|nvidia-.*|cuda-.*)")
PIN = re.compile(r"^([A-Za-z0-9_.-]+)==[^\s\\;]+(?:\s*;[^\\]+)?")


def wants(torch: str) -> list[str]:
    """Return the requirements."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["torch"]
    if torch != "torch":
        extra = [torch if line.startswith("torch") else line for line in extra]
    return [*project["dependencies"], *extra, EXAMPLE]


def pins(torch: str, lock: Path = Path("requirements.lock")) -> list[str]:
    """Return the constraints; none where there is no lock file."""
    lines = lock.read_text().splitlines() if lock.exists() else []
    found = [match for match in map(PIN.match, lines) if match]
    return [match[0].strip() for match in found if torch == "torch" or not CUDA.fullmatch(match[1])]


if __name__ == "__main__":
    print("\n".join({"wants": wants, "pins": pins}[sys.argv[1]](sys.argv[2])))
