"""The models that `executors.py` compares executors with: each as a worker's model and, by the same class, alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from models import Busy, Perceptron

from examples.image_classifier.model import SIDE, ImageClassifier
from forebay import Model, TensorSpec


class Pixels(ImageClassifier):
    """The image classifier without its preparation: decoded photos come as numbers, so that JSON can carry them."""

    inputs = (TensorSpec("pixels", "UINT8", [-1, SIDE, SIDE, 3]),)
    prepared = ()
    prepare = None  # type: ignore[assignment]

    def example(self) -> Mapping[str, Any]:
        """Return a grey photo."""
        return {"pixels": torch.full((1, SIDE, SIDE, 3), 127, dtype=torch.uint8)}


MODELS: dict[str, type[Model]] = {"perceptron": Perceptron, "deep": Busy, "images": Pixels}


def load(name: str) -> Model:
    """Return a model that is loaded on the CPU."""
    model = MODELS[name]()
    model.load(torch.device("cpu"))
    return model


def inputs_of(model: Model, rows: int) -> dict[str, torch.Tensor]:
    """Return a batch."""
    (spec,) = model.inputs
    shape = [rows, *list(spec.shape)[1:]]
    random = torch.Generator().manual_seed(0)
    if spec.datatype == "UINT8":
        return {spec.name: torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)}
    return {spec.name: torch.rand(shape, generator=random)}
