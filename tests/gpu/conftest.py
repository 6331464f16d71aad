"""Tests that need a CUDA device: all of this folder, skipped with the reason where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder, and skip it without a device."""
    import torch

    reason = None if torch.cuda.is_available() else f"needs a CUDA device; torch {torch.__version__} sees none"
    for found in items:
        if HERE in Path(found.path).parents:
            found.add_marker(pytest.mark.gpu)
            if reason is not None:
                found.add_marker(pytest.mark.skip(reason=reason))
