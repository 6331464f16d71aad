"""The wire models: what they accept, what they refuse, and that the exported JSON Schemas are theirs."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from pydantic import ValidationError

from forebay import records
from forebay.inference.model import DATATYPE_BYTES
from forebay_schemas import DATATYPE_BYTES as SCHEMA_BYTES
from forebay_schemas import RETRIABLE_CODES, DeadLetterHeaders, ErrorCode, InferenceRequest, headers
from forebay_schemas.export import EXPORTED, documents, rendered

FOLDER = Path(__file__).parents[2] / "schemas" / "json"


def document(**tensor: object) -> str:
    return json.dumps({"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2], **tensor}]})


def test_the_exported_documents_are_up_to_date() -> None:
    found = {file.name: file.read_text() for file in FOLDER.glob("*.json") if file.name != "asyncapi.json"}
    assert found == rendered(), "run: python -m forebay_schemas.export schemas/json"


@pytest.mark.parametrize("name", EXPORTED)
def test_every_document_is_a_valid_json_schema(name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(documents()[name])


def test_the_worker_and_the_schemas_name_the_same_codes_and_datatypes() -> None:
    assert {code.value for code in ErrorCode} == {code.value for code in records.Code}
    assert {code.value for code in RETRIABLE_CODES} == {code.value for code in records.RETRIABLE}
    assert SCHEMA_BYTES == DATATYPE_BYTES


@pytest.mark.parametrize(
    "tensor",
    [
        {},
        {"data": [[1, 2.5]]},
        {"datatype": "BOOL", "data": [True, False]},
        {"datatype": "BYTES", "data": ["a", "b"]},
        {"datatype": "FP16", "data": None, "parameters": {"binary_data_size": 4}},
        {"datatype": "BYTES", "data": None, "parameters": {"binary_data_size": 11}},
    ],
)
def test_the_model_and_its_json_schema_accept_a_request(tensor: dict[str, object]) -> None:
    text = document(**tensor)
    assert InferenceRequest.model_validate_json(text).rows == 1
    jsonschema.validate(json.loads(text), documents()["inference-request"])


@pytest.mark.parametrize(
    ("tensor", "sentence"),
    [
        ({"data": [1]}, "takes 2 elements, not 1"),
        ({"data": None}, "needs either data or"),
        ({"parameters": {"binary_data_size": 8}}, "needs either data or"),
        ({"data": None, "parameters": {"binary_data_size": 7}}, "takes 8 bytes, not 7"),
        ({"datatype": "FP16"}, "binary encoding only"),
        ({"datatype": "FP8"}, "datatype"),
        ({"name": ""}, "name"),
        ({"shape": []}, "shape"),
        ({"shape": [1, -2]}, "shape"),
        ({"data": [1, None]}, "data"),
        ({"data": [1, float("nan")]}, "data"),
    ],
)
def test_the_model_refuses_what_the_worker_would(tensor: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        InferenceRequest.model_validate_json(document(**tensor))


def test_inputs_that_disagree_are_refused() -> None:
    two = json.loads(document())["inputs"] * 2
    with pytest.raises(ValidationError, match="same name"):
        InferenceRequest.model_validate({"inputs": two})
    two[1] = two[1] | {"name": "y", "shape": [2, 1]}
    with pytest.raises(ValidationError, match="differ in rows"):
        InferenceRequest.model_validate({"inputs": two})
    with pytest.raises(ValidationError, match="256 bytes"):
        InferenceRequest.model_validate({"inputs": two[:1], "id": "é" * 129})


def test_deep_nesting_is_counted_without_a_crash() -> None:
    nested: object = [1, 2]
    for _ in range(100):
        nested = [nested]
    assert InferenceRequest.model_validate_json(document(data=nested)).inputs[0].elements == 2
    with pytest.raises(ValidationError):
        InferenceRequest.model_validate_json(document(data="X").replace('"X"', "[" * 100_000 + "]" * 100_000))


def test_the_constants_name_every_dead_letter_header() -> None:
    named = {field.alias for field in DeadLetterHeaders.model_fields.values()}
    assert named == {*headers.DEAD_LETTER_HEADERS, headers.REPLAYS}
