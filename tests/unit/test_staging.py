"""Staging slots: a batch is written once, in place, and nothing of one slot or one batch is seen in another."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.inference.messages import Placed, Run
from forebay.inference.staging import SlotSize, Staging, create_memory, join_elements, split_elements
from forebay.records import Batch, Reason, Request, Signature, TensorShape
from tests.unit.builders import request, signature

SIZE = SlotSize(8_192, 4_096)
DTYPES = {"FP32": "<f4", "INT64": "<i8", "UINT8": "u1", "FP64": "<f8", "INT16": "<i2", "FP16": "<f2", "BOOL": "?"}


def batch_of(*requests: Request) -> Batch:
    return Batch(7, "model", list(requests), sum(one.rows for one in requests), Reason.IDLE, 0.0)


def tensor(array: Any) -> tuple[bytes, tuple[int, ...]]:
    return array.tobytes(), array.shape


def asking(*arrays: Any) -> Request:
    """A request with these inputs: arrays, or lists of bytes."""
    tensors = [one if isinstance(one, list) else one.tobytes() for one in arrays]
    shapes = [(len(one),) if isinstance(one, list) else one.shape for one in arrays]
    return request(rows=shapes[0][0], tensors=tensors, shapes=shapes)


def model(*inputs: tuple[str, tuple[int, ...], float | None], prepares: bool = False) -> Signature:
    specs = [TensorShape(f"i{n}", datatype, (-1, *dims), pad) for n, (datatype, dims, pad) in enumerate(inputs)]
    return signature(specs, prepares=prepares)


def staged(staging: Staging, job: Run, index: int, dtype: str) -> Any:
    """What the replica sees of an input."""
    place = job.inputs[index]
    start = job.slot * staging.size.total + place.offset
    assert place.offset + place.size <= staging.size.inputs
    return np.frombuffer(staging.map[start : start + place.size], dtype).reshape(place.dims)


@pytest.mark.parametrize("datatype", DTYPES)
def test_rows_of_one_shape_lie_one_behind_the_other(datatype: str) -> None:
    arrays = [(np.arange(6).reshape(n, -1, 1) % 2 + n).astype(DTYPES[datatype]) for n in (1, 1, 1)]
    staging = Staging(SIZE, 2)
    job = staging.write(batch_of(*map(asking, arrays)), model((datatype, (6, 1), None)))
    assert np.array_equal(staged(staging, job, 0, DTYPES[datatype]), np.concatenate(arrays))
    assert (job.number, job.requests, job.rows, job.shapes) == (7, 3, [], [])


def test_a_batch_that_is_larger_than_its_slot_is_found_before_anybody_reads_it() -> None:
    staging = Staging(SlotSize(128, 1_024), 2)
    spec = model(("FP32", (16,), None))
    rows = [asking(np.ones((1, 16), "<f4")) for _ in range(3)]
    staging.write(batch_of(*rows[:2]), spec)
    with pytest.raises(AssertionError, match="batch 7 does not fit into its slot"):
        staging.write(batch_of(*rows), spec)


def test_requests_of_several_rows_say_how_many() -> None:
    arrays = [np.full((rows, 2), rows, "<f4") for rows in (1, 3, 2)]
    staging = Staging(SIZE, 2)
    job = staging.write(batch_of(*map(asking, arrays)), model(("FP32", (2,), None)))
    assert job.rows == [1, 3, 2]
    assert np.array_equal(staged(staging, job, 0, "<f4"), np.concatenate(arrays))


def test_large_tensors_are_written_like_small_ones() -> None:
    size = SlotSize(1 << 20, 64)
    arrays = [np.random.default_rng(n).random((1, 5_000)).astype("<f4") for n in range(3)]
    staging = Staging(size, 1)
    job = staging.write(batch_of(*map(asking, arrays)), model(("FP32", (5_000,), None)))
    assert np.array_equal(staged(staging, job, 0, "<f4"), np.concatenate(arrays))


@pytest.mark.parametrize(("datatype", "pad"), [("INT64", 0), ("INT64", -7), ("FP32", 1.5), ("UINT8", 255)])
def test_rows_of_different_shapes_are_padded_with_the_declared_value(datatype: str, pad: float) -> None:
    dtype = DTYPES[datatype]
    arrays = [np.ones((2, 3, 1), dtype), np.full((1, 1, 4), 2, dtype), np.full((1, 2, 2), 3, dtype)]
    staging = Staging(SIZE, 2)
    job = staging.write(batch_of(*map(asking, arrays)), model((datatype, (-1, -1), pad)))
    expected = np.full((4, 3, 4), pad, dtype)
    expected[0:2, :3, :1], expected[2, :1, :4], expected[3, :2, :2] = 1, 2, 3
    assert np.array_equal(staged(staging, job, 0, dtype), expected)


@pytest.mark.parametrize(("pad", "bits"), [(0.0, 0), (1.0, 0x3F80), (-2.0, 0xC000), (0.1, 0x3DCD)])
def test_bfloat16_is_padded_with_its_own_bits(pad: float, bits: int) -> None:
    arrays = [np.array([[1, 2, 3]], "<u2"), np.array([[4]], "<u2")]
    staging = Staging(SIZE, 2)
    job = staging.write(batch_of(*map(asking, arrays)), model(("BF16", (-1,), pad)))
    assert staged(staging, job, 0, "<u2").tolist() == [[1, 2, 3], [4, bits, bits]]


def test_padding_shows_nothing_of_the_batch_before() -> None:
    staging = Staging(SIZE, 1)
    spec = model(("INT64", (-1,), 0))
    job = staging.write(batch_of(asking(np.full((1, 50), 9, "<i8"))), spec)
    staging.release(job.slot)
    job = staging.write(batch_of(asking(np.ones((1, 2), "<i8")), asking(np.ones((1, 5), "<i8"))), spec)
    assert staged(staging, job, 0, "<i8").tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]


def test_several_inputs_are_aligned_and_do_not_overlap() -> None:
    first, second, third = np.array([[1, 2, 3]], "u1"), [b"one"], np.array([[0.5]], "<f8")
    staging = Staging(SIZE, 2)
    job = staging.write(
        batch_of(asking(first, second, third), asking(first + 1, [b""], third + 1)),
        model(("UINT8", (3,), None), ("BYTES", (), None), ("FP64", (1,), None)),
    )
    assert staged(staging, job, 0, "u1").tolist() == [[1, 2, 3], [2, 3, 4]]
    assert staged(staging, job, 2, "<f8").tolist() == [[0.5], [1.5]]
    place = job.inputs[1]
    start = job.slot * SIZE.total + place.offset
    assert split_elements(staging.map[start : start + place.size]) == [b"one", b""]
    ends = [place.offset + place.size for place in job.inputs]
    for place, end in zip(job.inputs[1:], ends, strict=False):
        assert place.offset >= end
        assert place.offset % 64 == 0


def test_inputs_that_will_be_prepared_lie_side_by_side_with_their_own_shapes() -> None:
    arrays = [np.array([[1, 2]], "<i8"), np.array([[3], [4]], "<i8")]
    staging = Staging(SIZE, 2)
    job = staging.write(batch_of(*map(asking, arrays)), model(("INT64", (-1,), None), prepares=True))
    assert job.shapes == [[[1, 2]], [[2, 1]]]
    start = job.slot * SIZE.total + job.inputs[0].offset
    assert np.frombuffer(staging.map[start : start + 32], "<i8").tolist() == [1, 2, 3, 4]


def test_a_slot_is_taken_until_it_is_released() -> None:
    staging, spec = Staging(SIZE, 2), model(("FP32", (1,), None))
    one = batch_of(asking(np.array([[1]], "<f4")))
    first, second = staging.write(one, spec), staging.write(one, spec)
    assert (staging.free, first.slot != second.slot) == (0, True)
    staging.release(first.slot)
    assert staging.free == 1
    assert staging.write(one, spec).slot == first.slot
    staging.reset()
    assert staging.free == 2


def test_two_slots_share_no_byte() -> None:
    staging, spec = Staging(SIZE, 2), model(("UINT8", (8_192,), None))
    jobs = [staging.write(batch_of(asking(np.full((1, 8_192), fill, "u1"))), spec) for fill in (1, 2)]
    for job, fill in zip(jobs, (1, 2), strict=True):
        assert (staged(staging, job, 0, "u1") == fill).all()


def test_outputs_are_copied_out_of_the_slot() -> None:
    staging = Staging(SIZE, 2)
    start = SIZE.total + SIZE.inputs
    staging.map[start : start + 6] = b"abcdef"
    found = staging.read(1, Placed(SIZE.inputs + 2, 3, [3]), False)
    staging.map[start : start + 6] = b"------"
    assert found == b"cde"
    raw = join_elements([b"x", b"", b"yy"])
    staging.map[start : start + len(raw)] = raw
    assert staging.read(1, Placed(SIZE.inputs, len(raw), [3]), True) == [b"x", b"", b"yy"]


def test_the_memory_can_be_mapped_by_another_and_is_gone_after_closing() -> None:
    staging = Staging(SIZE, 1)
    other = mmap.mmap(staging.descriptor, SIZE.total)
    job = staging.write(batch_of(asking(np.full((1, 4), 65, "u1"))), model(("UINT8", (4,), None)))
    assert other[job.inputs[0].offset :][:4] == b"AAAA"
    other.close()
    descriptor = staging.descriptor
    staging.close()
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_memory_has_the_size_asked_for_and_passes_to_a_child() -> None:
    descriptor = create_memory(12_345)
    assert os.fstat(descriptor).st_size == 12_345
    assert os.get_inheritable(descriptor)
    os.close(descriptor)


@given(st.lists(st.binary(max_size=30), max_size=10))
def test_elements_survive_joining_and_splitting(parts: list[bytes]) -> None:
    assert split_elements(join_elements(parts)) == parts
    assert split_elements(memoryview(join_elements(parts))) == parts
