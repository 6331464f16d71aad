"""The tree of errors that Forebay raises; each class says what happens next.

An error that concerns one request is a value (`records.Failure`), never an exception that crosses the corridor.
"""

from __future__ import annotations

from forebay.records import Code, Failure

EXIT_USAGE = 2
EXIT_UNAVAILABLE = 69
EXIT_INTERNAL = 70
EXIT_DEVICE_LOST = 75
EXIT_CONFIG = 78


class ForebayError(Exception):
    """The root: every error that Forebay raises on purpose. `exit_code` is what the command returns for it."""

    exit_code = EXIT_INTERNAL


class UsageError(ForebayError):
    """The command line is wrong. Nothing was started."""

    exit_code = EXIT_USAGE


class ConfigError(ForebayError):
    """A setting is wrong or contradicts another, or what it names does not exist. Mend it and start again."""

    exit_code = EXIT_CONFIG


class ModelError(ConfigError):
    """The model cannot be loaded, warmed up or trusted. The worker stops before it joins the group."""


class NoStartError(ConfigError):
    """A partition has no offset to go on from, or requests behind it were deleted. What was read is finished first."""


class KafkaUnavailableError(ForebayError):
    """Kafka does not answer at start. Nothing was read; start again when it does."""

    exit_code = EXIT_UNAVAILABLE


class KafkaFatalError(ForebayError):
    """The Kafka client cannot go on (fenced, misconfigured). Nothing unfinished was committed."""


class DeviceLostError(ForebayError):
    """The replicas died too often. A supervisor should start the worker again; nothing unfinished was committed."""

    exit_code = EXIT_DEVICE_LOST


class ModelBrokenError(ForebayError):
    """A bounded run waits in vain for a model that broke while it served. What is answered is settled; start again."""

    exit_code = EXIT_DEVICE_LOST


class RequestError(ForebayError):
    """One request is at fault; becomes its error result and its dead letter. Raised and caught in one room."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code

    @property
    def failure(self) -> Failure:
        """The same as a value, to travel on."""
        return Failure(self.code, str(self))
