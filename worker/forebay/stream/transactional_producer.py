"""A producer with a transactional id: begun anew, under the same id, wherever nobody knows how its transaction ended.

The new one fences the old one. The thread of the loop owns it; transactions borrow its client.
"""

from __future__ import annotations

import logging
from typing import Any

import confluent_kafka as ck

from forebay.errors import ConfigError, KafkaFatalError
from forebay.stream.credentials import give
from forebay.watchdog import leave_within

_FORBIDDEN = {ck.KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, ck.KafkaError.CLUSTER_AUTHORIZATION_FAILED}
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_MARGIN_SECONDS = 30.0


class Pause:
    """How long to wait before the next try: longer each time, until one succeeds."""

    def __init__(self) -> None:
        self._seconds = _FIRST_PAUSE

    def next(self) -> float:
        """Return the seconds; the one after it is longer."""
        pause, self._seconds = self._seconds, min(self._seconds * 1.5, _LONGEST_PAUSE)
        return pause

    def reset(self) -> None:
        """Take in that a try succeeded."""
        self._seconds = _FIRST_PAUSE


class TransactionalProducer:
    """One transactional id, and the client that has it now."""

    def __init__(self, config: dict[str, Any], pause: Pause) -> None:
        self.config = config
        self._pause = pause
        self._again_at = 0.0
        self._is_in_doubt = False
        self._logger: logging.Logger | None = None
        self.client: Any = None
        self.has_begun = self.is_forbidden = False
        self.trouble: str | None = None
        """Why it has not begun."""

    @property
    def id(self) -> str:
        """Its transactional id."""
        return str(self.config["transactional.id"])

    def make(self, logger: logging.Logger) -> None:
        """Make the client. Raises ConfigError where it refuses the settings."""
        self._logger = logger
        try:
            self.client = ck.Producer(self.config, logger=logger)
        except ck.KafkaException as error:
            raise ConfigError(f"the Kafka client refuses the settings: {error.args[0].str()}") from error

    def begin(self, seconds: float, now: float) -> bool:
        """Fence what came before; in an outage, or without the right to the id, each call tries again after a pause.

        The committed offsets are final only afterwards: before, a late commit of an earlier client may still come.
        Returns whether that was so in doubt: then the positions are to be read again. Raises KafkaFatalError.
        """
        if now < self._again_at:
            return False
        if self.client is None:
            self.client = ck.Producer(self.config, logger=self._logger)
        try:
            with leave_within(seconds * 3 + _MARGIN_SECONDS, KafkaFatalError.exit_code):
                self.client.init_transactions(seconds)
        except ck.KafkaException as error:
            self._not_begun(error, now)
            return False
        self.has_begun, self.is_forbidden, self.trouble = True, False, None
        was_in_doubt, self._is_in_doubt = self._is_in_doubt, False
        return was_in_doubt

    def replace(self, *, in_doubt: bool) -> None:
        """Drop the client: what it may still have under way is fenced when the next one begins."""
        self.client, self.has_begun = None, False
        self._is_in_doubt = self._is_in_doubt or in_doubt

    def take_credentials(self, username: str, password: str) -> None:
        """Let the client log in by these, whatever it is at, and the next one."""
        give(self.client, self.config, username, password)

    def _not_begun(self, error: ck.KafkaException, now: float) -> None:
        """Decide what it means that the client has not begun: it goes on by itself, is made anew, or ends the run."""
        cause = error.args[0]
        said = f"the transactional producer {self.id!r} cannot start: {cause.str()}"
        self.is_forbidden = cause.code() in _FORBIDDEN
        if self.is_forbidden:  # for the client an error for good; an operator may grant the right again
            self.trouble = f"{said.rstrip('.')}; grant Write on this transactional id, as forebay acls says"
            self.client, self._again_at = None, now + self._pause.next()
        elif cause.retriable() or cause.code() == ck.KafkaError._TIMED_OUT:
            self.trouble = said  # the next call goes on with the same request
        else:
            raise KafkaFatalError(said) from error
