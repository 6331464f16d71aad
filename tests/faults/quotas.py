"""Quotas of a broker, set as an operator sets them: by Kafka's own tool, for clients that call themselves `forebay`."""

from __future__ import annotations

import os
import subprocess

from forebay.brokers.jars import class_path, java

CLIENT = "forebay"


def set_quota(servers: str, name: str, value: float | None) -> None:
    """Give the worker's clients a quota, or take it away (None). The client for Python cannot do it."""
    change = ["--delete-config", name] if value is None else ["--add-config", f"{name}={value}"]
    jars = os.pathsep.join(map(str, class_path(lambda line: None)))
    tool = [str(java()), "-Xmx128m", "-XX:TieredStopAtLevel=1", "-cp", jars]
    command = [*tool, "kafka.admin.ConfigCommand", "--bootstrap-server", servers, "--alter", *change]
    command += ["--entity-type", "clients", "--entity-name", CLIENT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
