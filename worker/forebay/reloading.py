"""Reloading: on SIGHUP the settings are read again, and each served model that changed is replaced while it serves.

Its successors load, warm up and check themselves beside the old replicas and take over between two batches; whatever
goes wrong, the old ones go on. A new user name or password for Kafka goes to the clients that run. One model after
another, on the corridor's thread; only `ask` may be called from a signal handler. It knows the rooms as the corridor
does, and nothing of Kafka.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from forebay.breaker import Breakers
from forebay.changes import Stamp, differences, files_of, names_another, other_tensors
from forebay.dispatch import Dispatch
from forebay.errors import ForebayError
from forebay.logs import logger
from forebay.metrics import Metrics
from forebay.reception import Reception
from forebay.records import Request
from forebay.rooms import Rooms
from forebay.settings import Kafka, ModelSettings, Settings
from forebay.stream.results import Encoder

_log = logger("worker")

_BY_PASSWORD = {"PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"}
"""Mechanisms whose credentials a client takes while it runs."""


class Served(NamedTuple):
    """A model that serves: its settings, and its files as they were when it was loaded."""

    model: ModelSettings
    files: tuple[Stamp, ...]


class Reloading:
    """Replaces the models of one worker. `read` reads the settings again; without it nobody can ask for a reload."""

    def __init__(self, settings: Settings, rooms: Rooms, metrics: Metrics) -> None:
        self.read: Callable[[], Settings] | None = None
        self._settings = settings
        self._rooms = rooms
        self._metrics = metrics
        self._serving = {model.name: Served(model, files_of(model)) for model in settings.served}
        self._waiting: deque[Served] = deque()
        self._loading: Served | None = None
        self._since = 0.0
        self._generations = count(1)
        self._asked = False

    def ask(self) -> None:
        """Ask for a reload; only sets a flag."""
        self._asked = True

    def serve(self, encoder: Encoder, reception: Reception, dispatcher: Dispatch, breakers: Breakers) -> None:
        """Take over the parts of the corridor that have to know of a new version; before, nothing is reloaded."""
        self._encoder = encoder
        self._reception = reception
        self._dispatcher = dispatcher
        self._breakers = breakers
        for name, served in self._serving.items():
            self._metrics.version.labels(name, served.model.version).set(1)

    def turn(self, now: float, *, stopping: bool = False) -> None:
        """Go on with what was asked for, or give it up where the worker stops."""
        if stopping:
            self._give_up()
        elif self._loading is not None:
            self._look(self._loading, now)
        elif self._waiting:
            self._begin(self._waiting.popleft(), now)
        elif self._asked and self.read is not None:
            self._asked = False
            self._read_again(self.read)
        if self._rooms.pool.leftovers.held:
            self._reclaim(now)

    def _give_up(self) -> None:
        """End successors that have not taken over, at once."""
        self._asked = False
        self._waiting.clear()
        if self._loading is not None:
            self._end(self._loading, "abandoned", "the worker stops")

    def _read_again(self, read: Callable[[], Settings]) -> None:
        try:
            settings = read()
        except ForebayError as error:
            for name in self._serving:
                self._metrics.reloads.labels(name, "invalid_settings").inc()
            _log.error(
                "reload_failed", why=str(error), goes_on="every model, as it was; mend this and send SIGHUP again"
            )
            return
        self._take_credentials(settings.kafka)
        changed, fixed = self._compare(settings)
        self._waiting.extend(changed)
        names = [served.model.name for served in changed]
        _log.info("reload", models=names, unchanged=[name for name in self._serving if name not in names])
        if fixed:
            why = "only a model's own section, and the user name and password for Kafka, are read while it runs"
            _log.warning("reload_needs_restart", settings=fixed, why=why)

    def _take_credentials(self, fresh: Kafka) -> None:
        """Give what is connected to Kafka a new user name and password, where they alone say how to log in anew.

        With another mechanism, certificate or address beside them they may not fit what the clients go on with.
        """
        kafka, security = self._settings.kafka, fresh.security
        by_these = {"username": security.username, "password": security.password}
        renewed = kafka.security.model_copy(update=by_these)
        is_elsewhere = fresh.bootstrap_servers != kafka.bootstrap_servers
        if security == kafka.security or security != renewed or is_elsewhere or security.mechanism not in _BY_PASSWORD:
            return
        username, password = security.username or "", security.password.get_secret_value() if security.password else ""
        for login in self._rooms.logins:
            login.take_credentials(username, password)
        self._settings = self._settings.model_copy(update={"kafka": kafka.model_copy(update={"security": security})})
        _log.info("credentials_changed", username=username)

    def _compare(self, settings: Settings) -> tuple[list[Served], list[str]]:
        """Return the models to replace, and what else differs: it stays as it is until a restart."""
        changed: list[Served] = []
        fixed = list(differences(self._settings, settings, apart=("model", "models")))
        here = [model.name for model in self._settings.served]
        wanted = [model.name for model in settings.served]
        if here != wanted:
            fixed.append(f"models (served: {', '.join(here)}; in the settings: {', '.join(wanted)})")
        for model in settings.served:
            serving = self._serving.get(model.name)
            if serving is None:
                continue
            self._rooms.pool.shares[model.name] = model.share  # no replica needs to know
            fresh = Served(model, files_of(model))
            as_it_was = model.model_copy(update={"share": serving.model.share})
            if (as_it_was, fresh.files) != serving:
                changed.append(fresh)
        return changed, fixed

    def _begin(self, fresh: Served, now: float) -> None:
        self._loading, self._since = fresh, now
        name = fresh.model.name
        try:
            replicas, preparers = self._rooms.make_successors(fresh.model, next(self._generations))
        except OSError as error:
            self._end(fresh, "failed", f"no memory or descriptor for it: {error}")
            return
        self._rooms.pool.succession.begin(name, replicas, now)
        if preparers:
            self._rooms.preparers.pool.succession.begin(name, preparers, now)

    def _look(self, fresh: Served, now: float) -> None:
        name = fresh.model.name
        successions = (self._rooms.pool.succession, self._rooms.preparers.pool.succession)
        why = next((found for one in successions if (found := one.failure(name))), "")
        if why:
            self._end(fresh, "failed", why)
        elif all(one.ready(name) for one in successions):
            first = self._rooms.pool.succession.first(name)
            new, old = first.signature if first is not None else None, self._rooms.pool.signatures[name]
            why = other_tensors(old, new) if new is not None else ""
            if why:
                self._end(fresh, "refused", why)
            else:
                self._switch(fresh, now)

    def _switch(self, fresh: Served, now: float) -> None:
        """Let the new model have what comes now. What was made for the old one alone is decoded once more."""
        name, old = fresh.model.name, self._serving[fresh.model.name]
        pool, preparers = self._rooms.pool, self._rooms.preparers
        preparers.switch(name, now)
        pool.switch(name, now)
        signature = pool.signatures[name]
        self._encoder.renew(signature)
        self._reception.renew([pool.signatures[model.name] for model in self._settings.served])
        self._breakers.retry(name)
        self._dispatcher.renew(name)

        def asks_for_another(request: Request) -> bool:
            return request.model == name and names_another(request, signature.version)

        def is_stale(request: Request) -> bool:
            return request.model == name and (bool(signature.prepared) or names_another(request, signature.version))

        pool.leftovers.held[name] = is_stale
        stale = preparers.drop(asks_for_another) + self._dispatcher.take_back(name, is_stale) + pool.drop(is_stale)
        self._reception.again(stale, now)
        self._serving[name], self._loading = fresh, None
        self._metrics.reloads.labels(name, "reloaded").inc()
        self._metrics.version.remove(name, old.model.version)
        self._metrics.version.labels(name, fresh.model.version).set(1)
        seconds = round(now - self._since, 3)
        _log.info("model_reloaded", model=name, version=fresh.model.version, before=old.model.version, seconds=seconds)

    def _end(self, fresh: Served, outcome: str, why: str) -> None:
        """Give a new model up; the old one has never stopped."""
        name = fresh.model.name
        self._rooms.pool.succession.abandon(name)
        self._rooms.preparers.pool.succession.abandon(name)
        self._loading = None
        self._metrics.reloads.labels(name, outcome).inc()
        told = _log.info if outcome == "abandoned" else _log.error
        goes_on = f"version {self._serving[name].model.version}"
        told(f"reload_{outcome}", model=name, version=fresh.model.version, why=why, goes_on=goes_on)

    def _reclaim(self, now: float) -> None:
        """Decode again what retired replicas left behind and no other version may run."""
        pool = self._rooms.pool
        for name, is_stale in list(pool.leftovers.held.items()):
            self._reception.again(pool.drop(is_stale), now)
            if not any(replica.model == name for replica in pool.succession.retiring):
                del pool.leftovers.held[name]
