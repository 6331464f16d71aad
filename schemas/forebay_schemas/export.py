"""Export the wire models as JSON Schema documents: `python -m forebay_schemas.export FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from forebay_schemas.failure import DeadLetterHeaders, ErrorResult
from forebay_schemas.headers import RequestHeaders, ResultHeaders
from forebay_schemas.request import InferenceRequest
from forebay_schemas.result import InferenceResult

EXPORTED: dict[str, type[BaseModel]] = {
    "inference-request": InferenceRequest,
    "inference-result": InferenceResult,
    "error-result": ErrorResult,
    "request-headers": RequestHeaders,
    "result-headers": ResultHeaders,
    "dead-letter-headers": DeadLetterHeaders,
}
"""The documents by file name, without `.json`."""


def documents() -> dict[str, dict[str, Any]]:
    """Give each exported model's JSON Schema, draft 2020-12, by file name."""
    return {
        name: {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema(by_alias=True)}
        for name, model in EXPORTED.items()
    }


def rendered() -> dict[str, str]:
    """Give the content of each file."""
    return {f"{name}.json": json.dumps(content, indent=2) + "\n" for name, content in documents().items()}


def write(folder: Path) -> list[Path]:
    """Write the documents into `folder`, which is made if it is missing; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, content in rendered().items():
        (folder / name).write_text(content)
        files.append(folder / name)
    return files


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m forebay_schemas.export FOLDER")
    for file in write(Path(sys.argv[1])):
        print(file)
