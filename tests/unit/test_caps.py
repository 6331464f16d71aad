"""Caps: what did not fit is not tried again at once, and a cap is no cap for ever."""

from __future__ import annotations

from forebay.inference.caps import CLEAN, Caps


def ran_clean(caps: Caps, times: int, bucket: int = 0) -> None:
    for _ in range(times):
        caps.ran(bucket, caps.rows(bucket))


def test_nothing_is_known_until_something_did_not_fit() -> None:
    caps = Caps(32)
    assert (caps.rows(0), caps.known(0)) == (32, 0)
    caps.ran(0, 32)
    assert caps.known(0) == 0


def test_half_of_what_did_not_fit_is_the_cap_and_never_less_than_a_row() -> None:
    caps = Caps(32)
    for failed, expected in ((32, 16), (16, 8), (8, 4), (4, 2), (2, 1)):
        caps.refused(0, failed)
        assert caps.known(0) == expected


def test_a_cap_is_for_its_bucket_and_larger_ones() -> None:
    caps = Caps(32)
    caps.refused(128, 32)
    assert [caps.rows(bucket) for bucket in (0, 64, 128, 256)] == [32, 32, 16, 16]
    caps.refused(256, 16)
    assert [caps.rows(bucket) for bucket in (128, 256, 512)] == [16, 8, 8]


def test_after_200_clean_batches_an_eighth_more_is_probed() -> None:
    caps = Caps(32)
    caps.refused(0, 32)
    ran_clean(caps, CLEAN - 1)
    assert caps.rows(0) == 16
    ran_clean(caps, 1)
    assert caps.rows(0) == 18
    ran_clean(caps, 1)
    assert (caps.rows(0), caps.known(0)) == (18, 18)
    ran_clean(caps, CLEAN)
    assert caps.rows(0) == 20


def test_a_probe_that_fails_leaves_the_cap_and_waits_as_long_again() -> None:
    caps = Caps(32)
    caps.refused(0, 32)
    ran_clean(caps, CLEAN)
    caps.refused(0, 18)
    assert caps.rows(0) == 16
    ran_clean(caps, CLEAN - 1)
    assert caps.rows(0) == 16
    ran_clean(caps, 1)
    assert caps.rows(0) == 18


def test_small_batches_neither_pass_nor_fail_a_probe() -> None:
    caps = Caps(32)
    caps.refused(0, 32)
    for _ in range(3 * CLEAN):
        caps.ran(0, 4)
    assert caps.rows(0) == 18
    caps.ran(0, 17)
    assert caps.rows(0) == 17


def test_a_cap_that_has_risen_to_the_largest_batch_is_forgotten() -> None:
    caps = Caps(8)
    caps.refused(0, 8)
    ran_clean(caps, 10 * CLEAN)
    assert caps.known(0) == 0


def test_going_back_forgets_what_was_learnt_since_and_nothing_else() -> None:
    caps = Caps(32)
    caps.refused(0, 32)
    saved = caps.saved()
    caps.refused(0, 16)
    caps.refused(9, 8)
    caps.restore(saved)
    assert [caps.known(bucket) for bucket in (0, 9)] == [16, 16]
    caps.refused(0, 16)
    caps.restore(saved)
    assert caps.known(0) == 16
