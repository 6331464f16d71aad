"""Java that starts quickly: every broker of a session begins from a cache of what an earlier one had loaded.

A Kafka takes 6 s of a core to start, most of it loading and linking classes, and compiles what it runs often: dear for
one that lives for a few seconds. The cache (Java 25's ahead-of-time cache, 70 MB in `.pytest_cache`) is made once, by
the first session that needs a broker, and a start costs a third. Where it cannot be made, all goes on without it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forebay.broker import to_stderr
from forebay.brokers.jars import class_path, java
from forebay.brokers.leash import die_with_the_leash
from forebay.brokers.node import JVM_OPTIONS, TOOL_OPTIONS
from forebay.brokers.ports import addresses
from forebay.brokers.properties import LOGGING, as_text, server_properties
from forebay.errors import ForebayError, KafkaUnavailableError
from forebay.stream import admin
from tests.kafka_probe import KafkaProbe

VARIABLE = "JDK_JAVA_OPTIONS"
"""The `java` command takes these options before its own, also for a Kafka that a command under test starts."""

LITTLE_COMPILING = "-XX:TieredStopAtLevel=1"
QUIET = "-Xlog:aot*=error"
PATIENCE_SECONDS = 120.0


@contextmanager
def quick_java(folder: Path | None) -> Iterator[None]:
    """Let every Java that is started meanwhile start quickly; `folder` keeps the cache, None goes without one."""
    before = os.environ.get(VARIABLE)
    cache = None if folder is None else _cache(folder)
    options = [before or "", LITTLE_COMPILING, f"-XX:AOTCache={cache} {QUIET}" if cache is not None else ""]
    os.environ[VARIABLE] = " ".join(filter(None, options))
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def _cache(folder: Path) -> Path | None:
    """Return the cache, made now if it is missing; None where it cannot be had, or while another process makes it."""
    try:
        jars = os.pathsep.join(map(str, class_path(to_stderr)))
        release = (java().parents[1] / "release").read_text()
    except (ForebayError, OSError):  # no embedded Kafka here
        return None
    cache = folder / f"kafka-{hashlib.sha256(f'{release}{jars}'.encode()).hexdigest()[:16]}.aot"
    if " " in str(cache):  # it would be two options
        return None
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return cache if cache.exists() else None
        if not cache.exists():
            _make(cache, jars)
    return cache if cache.exists() else None


def _make(cache: Path, jars: str) -> None:
    """Run a Kafka that does a little of everything, and let it write down what it has loaded."""
    fresh = cache.with_name(f"{cache.name}.new")
    with tempfile.TemporaryDirectory(prefix="forebay-kafka-") as name:
        folder = Path(name)
        [node] = addresses(1, 0)
        settings = folder / "server.properties"
        settings.write_text(as_text(server_properties(node, [node], folder, {})))
        (folder / "log4j2.properties").write_text(LOGGING)
        command = [str(java()), "-cp", jars, f"-Dlog4j2.configurationFile={folder / 'log4j2.properties'}"]
        form = ["kafka.tools.StorageTool", "format", "-t", "AAAAAAAAAAAAAAAAAAAAAA", "-c", str(settings)]
        options = [*JVM_OPTIONS, LITTLE_COMPILING, f"-XX:AOTCacheOutput={fresh}"]
        with (folder / "log").open("wb") as log:
            if subprocess.run([*command, *TOOL_OPTIONS, *form], stdout=log, stderr=log, check=False).returncode:
                return
            server = subprocess.Popen(
                [*command, *options, "kafka.Kafka", str(settings)],
                stdout=log,
                stderr=log,
                preexec_fn=die_with_the_leash,
            )
        _use_and_stop(server, node.server)
    for left in cache.parent.glob(f"{fresh.name}.*"):  # Java's own notes
        left.unlink()
    if fresh.exists():
        fresh.rename(cache)


def _use_and_stop(server: subprocess.Popen[bytes], address: str) -> None:
    """Let the broker work, then end in order; it writes the cache on its way out, in a Java of its own."""

    def insist_alive() -> None:
        if server.poll() is not None:  # a Java that knows no such cache
            raise KafkaUnavailableError("it ended while it started")

    probe = KafkaProbe(address)
    try:
        admin.wait_until_ready(probe.config, 1, PATIENCE_SECONDS, insist_alive)
        probe.create_topics({"requests": 3})
        probe.produce("requests", [b"%d" % number for number in range(500)])
        probe.read_all("requests", committed_only=True)
        probe.committed_offsets("group", "requests")
        probe.delete_topics("requests")
        server.terminate()
        server.wait(PATIENCE_SECONDS)
    except (ForebayError, subprocess.TimeoutExpired):
        server.kill()
        server.wait()
