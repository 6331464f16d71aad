"""The `forebay` command."""

from __future__ import annotations

from forebay.cli.app import app, main

__all__ = ["app", "main"]
