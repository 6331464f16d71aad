"""What a worker says of itself over HTTP: its group, its topics, and its models with their tensors, as OIP names them.

The loop's thread brings models up; the server's threads read. Knows neither HTTP nor Kafka.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay import __version__
from forebay.records import Signature, TensorShape

NAME = "forebay"


@dataclass(slots=True)
class About:
    """A worker's own description. `signatures` are those of the models that are ready, the default one first."""

    group_id: str = ""
    input_topics: Sequence[str] = ()
    signatures: Mapping[str, Signature] = field(default_factory=dict)

    def server(self) -> dict[str, Any]:
        """Return the server's metadata: OIP's `GET /v2`, with what Kafka knows it by."""
        told = {"name": NAME, "version": __version__, "extensions": ["binary_tensor_data"]}
        return told | {
            "group_id": self.group_id,
            "input_topics": list(self.input_topics),
            "models": list(self.signatures),
        }

    def model(self, name: str) -> dict[str, Any] | None:
        """Return a model's metadata: OIP's `GET /v2/models/NAME`; None where there is no such model, or not yet."""
        found = self.signatures.get(name)
        if found is None:
            return None
        return {
            "name": found.model,
            "versions": [found.version],
            "platform": "pytorch",
            "inputs": [_tensor(spec) for spec in found.inputs],
            "outputs": [_tensor(spec) for spec in found.outputs],
            "parameters": {"prepares": found.prepares},
        }


def signature_of(told: Mapping[str, Any]) -> Signature:
    """Read a model's metadata back. Raises KeyError or TypeError for what is none."""
    inputs, outputs = (
        tuple(TensorShape(one["name"], one["datatype"], tuple(one["shape"])) for one in told[side])
        for side in ("inputs", "outputs")
    )
    return Signature(told["name"], told["versions"][0], inputs, outputs, bool(told["parameters"]["prepares"]))


def _tensor(spec: TensorShape) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}
