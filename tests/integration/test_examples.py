"""The examples' models alone, on the CPU: real inputs, right answers, and the same answer whoever shares the batch."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the examples need torch")

from forebay import Model  # noqa: E402
from forebay.cli.demo_examples import NEEDS, Example, open_example  # noqa: E402
from forebay.inference.completion import whole_call  # noqa: E402
from forebay.inference.model import MOST_STEPS  # noqa: E402
from forebay.settings import load  # noqa: E402

ROOT = Path(__file__).parents[2]


@cache
def _loaded(name: str) -> Model:
    factory = load(ROOT / "examples" / name / "worker.yaml").served[0].factory
    assert factory is not None
    module, _, attribute = factory.partition(":")
    model: Model = getattr(import_module(module), attribute)()
    model.load(torch.device("cpu"))
    return model


def _tensors(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value if isinstance(value, list) else torch.from_numpy(value) for name, value in inputs.items()}


def _prepared(model: Model, inputs: Mapping[str, Any]) -> dict[str, Any]:
    tensors = _tensors(inputs)
    if not model.prepared:
        return tensors
    made = model.prepare(**tensors)  # type: ignore[attr-defined]
    return dict(made) if isinstance(made, Mapping) else {model.prepared[0].name: made}


def _collated(model: Model, requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One batch of the requests, padded where a tensor says so, as the worker would make it."""
    prepared = [_prepared(model, request) for request in requests]
    batch = {}
    for spec in model.prepared or model.inputs:
        parts = [request[spec.name] for request in prepared]
        if spec.pad is not None:
            longest = max(part.shape[1] for part in parts)
            parts = [torch.nn.functional.pad(part, (0, longest - part.shape[1]), value=spec.pad) for part in parts]
        batch[spec.name] = torch.cat(parts)
    return batch


def _run(model: Model, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The outputs of each request of one row."""
    with torch.inference_mode():
        made = whole_call(model, MOST_STEPS)(**_collated(model, requests))
    outputs = dict(made) if isinstance(made, Mapping) else {model.outputs[0].name: made}
    return [
        {
            name: value[row : row + 1] if isinstance(value, list) else value[row : row + 1].numpy()
            for name, value in outputs.items()
        }
        for row in range(len(requests))
    ]


@pytest.fixture(scope="module", params=sorted(NEEDS))
def example(request: pytest.FixtureRequest) -> tuple[Example, Model]:
    return open_example(request.param), _loaded(request.param)


@pytest.fixture(scope="module")
def classifier() -> Model:
    return _loaded("image_classifier")


@pytest.fixture(scope="module")
def embedder() -> Model:
    return _loaded("text_embedder")


@pytest.fixture(scope="module")
def reader() -> Model:
    return _loaded("digits")


def test_an_example_answers_its_unmodified_inputs_rightly(example: tuple[Example, Model]) -> None:
    offered, model = example
    samples = [sample for sample in offered.samples(None) if sample.original]
    read = offered.reader()
    outputs = _run(model, [sample.inputs for sample in samples])
    answers = {sample.name: read(sample, output).label for sample, output in zip(samples, outputs, strict=True)}
    assert all(answers[sample.name] in sample.right for sample in samples), answers


def test_an_example_answers_nearly_all_of_its_inputs_rightly_whatever_batch_they_are_in(
    example: tuple[Example, Model],
) -> None:
    offered, model = example
    samples = offered.samples(None)
    read = offered.reader()
    for sample, outputs in zip(
        samples, _run(model, [sample.inputs for sample in samples if sample.original]), strict=False
    ):
        read(sample, outputs)
    shuffled = random.Random(5).sample(samples, len(samples))
    wrong = []
    for start in range(0, len(shuffled), 16):
        batch = shuffled[start : start + 16]
        for sample, outputs in zip(batch, _run(model, [sample.inputs for sample in batch]), strict=True):
            if read(sample, outputs).label not in sample.right:
                wrong.append(sample.name)
    assert len(wrong) <= len(samples) // 20, wrong


def test_an_example_returns_the_outputs_that_it_declares(example: tuple[Example, Model]) -> None:
    offered, model = example
    [outputs] = _run(model, [offered.samples(1)[0].inputs])
    assert set(outputs) == {spec.name for spec in model.outputs}
    for spec in model.outputs:
        assert np.shape(outputs[spec.name]) == (1, *spec.shape[1:])


def test_the_warm_up_input_of_an_example_is_one_that_it_can_prepare(example: tuple[Example, Model]) -> None:
    _, model = example
    given = model.example()
    if given is not None:
        assert all(len(value) == 1 for value in _prepared(model, given).values())


def test_the_classifier_names_a_photo_in_sixteen_bits_as_well(classifier: Model) -> None:
    """It used to fail: what it makes of bytes was not cast as its weights were."""
    photo = open_example("image_classifier").samples(1)
    [exact] = _run(classifier, [photo[0].inputs])
    precise = copy.copy(classifier)
    precise.net = copy.deepcopy(classifier.net).bfloat16()  # type: ignore[attr-defined]
    [rough] = _run(precise, [photo[0].inputs])
    assert rough["label"] == exact["label"]


def test_a_photo_gets_the_same_probabilities_alone_and_in_a_batch(classifier: Model) -> None:
    photos = [sample.inputs for sample in open_example("image_classifier").samples(7)]
    together = _run(classifier, photos)
    for photo, among in zip(photos, together, strict=True):
        [alone] = _run(classifier, [photo])
        np.testing.assert_allclose(among["probabilities"], alone["probabilities"], atol=1e-3)


def test_a_request_of_several_photos_is_prepared_row_by_row(classifier: Model) -> None:
    photos = [sample.inputs["image"][0] for sample in open_example("image_classifier").samples(3)]
    rows = _prepared(classifier, {"image": photos})["pixels"]
    assert rows.shape == (3, 224, 224, 3)
    assert rows.dtype == torch.uint8
    for photo, row in zip(photos, rows, strict=True):
        assert torch.equal(_prepared(classifier, {"image": [photo]})["pixels"][0], row)


@pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n cut short"])
def test_bytes_that_are_no_image_are_refused_in_words(classifier: Model, content: bytes) -> None:
    with pytest.raises(ValueError, match=r"image holds \d+ bytes that are no JPEG"):
        _prepared(classifier, {"image": [content]})


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(classifier: Model) -> None:
    header = b"BM" + bytes(8) + (54).to_bytes(4, "little") + (40).to_bytes(4, "little")
    bitmap = header + (8_000).to_bytes(4, "little") * 2 + b"\x01\x00\x18\x00" + bytes(24)
    with pytest.raises(ValueError, match="8000 x 8000 pixels"):
        _prepared(classifier, {"image": [bitmap]})


def test_similar_sentences_are_closer_than_unlike_ones(embedder: Model) -> None:
    texts = [b"The cat sat on the mat.", b"A kitten was sitting on a rug.", b"The central bank raised interest rates."]
    cat, kitten, bank = (output["embedding"][0] for output in _run(embedder, [{"text": [text]} for text in texts]))
    assert float(cat @ kitten) > 0.5 > 0.2 > float(cat @ bank)


def test_padding_does_not_change_an_embedding(embedder: Model) -> None:
    short, long = {"text": [b"Short."]}, {"text": [b"This one goes on and on. " * 40]}
    [alone] = _run(embedder, [short])
    padded, _ = _run(embedder, [short, long])
    np.testing.assert_allclose(padded["embedding"], alone["embedding"], atol=1e-5)
    assert np.linalg.norm(padded["embedding"]) == pytest.approx(1.0, abs=1e-5)


def test_a_text_longer_than_the_model_reads_is_cut(embedder: Model) -> None:
    rows = _prepared(embedder, {"text": [b"word " * 5_000]})
    assert rows["ids"].shape == rows["mask"].shape == (1, 256)


def test_text_that_is_not_utf8_is_refused_in_words(embedder: Model) -> None:
    with pytest.raises(ValueError, match="text must be UTF-8"):
        _prepared(embedder, {"text": [b"\xff\xfe"]})


def test_the_digit_reader_makes_no_mistake_on_what_it_learned_and_few_beyond(reader: Model) -> None:
    offered = import_module("examples.digits.samples")
    shares = []
    for pixels, digits in (offered.learned(), offered.held_out()):
        with torch.inference_mode():
            read = reader.forward(pixels=torch.from_numpy(pixels))["digit"]  # type: ignore[index, call-overload]
        shares.append(float((read == torch.from_numpy(digits)).float().mean()))
    assert shares[0] == 1.0
    assert shares[1] >= 0.97


def test_every_worker_trains_the_same_digit_reader_and_leaves_the_random_state_alone(reader: Model) -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    again = _loaded.__wrapped__("digits")
    assert torch.equal(torch.rand(1), expected)
    for ours, theirs in zip(reader.net.parameters(), again.net.parameters(), strict=True):  # type: ignore[attr-defined]
        assert torch.equal(ours, theirs)


def test_a_scan_is_named_by_its_number_and_by_what_it_shows() -> None:
    """`digit 0` was the first scan, of a 1: the answer 1 beside it looked wrong, and the line was marked as right."""
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    from examples.digits.samples import samples

    for sample in samples(10):
        assert re.fullmatch(rf"scan \d+ of {sample.about}", sample.name), sample.name
