"""A new user name and password for clients that run: what connects from now on logs in by them.

Connections that are open stay as they are until the broker asks for the password again or closes them. For PLAIN and
SCRAM alone. The loop's thread calls it; the client takes it in under a lock of its own, whatever else it is doing.
"""

from __future__ import annotations

from typing import Any, Protocol


class TakesCredentials(Protocol):
    """Something with clients of Kafka, those of now and those that it may make later."""

    def take_credentials(self, username: str, password: str) -> None: ...


class OneClient:
    """What has one client, made of its configuration, and perhaps made anew."""

    _config: dict[str, Any]
    _client: Any = None

    def take_credentials(self, username: str, password: str) -> None:
        """Let the client, and the next one, log in by these."""
        give(self._client, self._config, username, password)


def give(client: Any, config: dict[str, Any], username: str, password: str) -> None:
    """Put credentials into a configuration, and into the client that was made of it, if there is one."""
    config.update({"sasl.username": username, "sasl.password": password})
    if client is not None:
        client.set_sasl_credentials(username, password)
