"""The fixtures of the integration tests: a job for workers to do."""

from __future__ import annotations

from tests.integration.job import job, make_job

__all__ = ["job", "make_job"]
