"""Mistakes in the settings as sentences for a person: what is wrong, where it comes from, what to write instead.

Pure; any thread. Knows keys by name alone, and no section.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pydantic import ValidationError

from forebay.errors import ConfigError
from forebay.wording import counted

_WORDS = (
    ("Value error, ", ""),
    ("Input should be", "it must be"),
    (", unable to parse string as a number", ""),
    (", unable to parse string as an integer", ""),
    (", unable to interpret input", ""),
    ("greater than or equal to", "at least"),
    ("less than or equal to", "at most"),
    ("greater than", "more than"),
    ("a valid tuple", "a list"),
    ("a valid string", "text"),
    ("a valid boolean", "true or false"),
    ("a valid integer", "a whole number"),
    ("a valid number", "a number"),
    ("a valid mapping", "a mapping, such as {key: value}"),
)


class SettingsError(ConfigError):
    """Settings are wrong. `mistakes` has a sentence for each; the message has them on lines of their own."""

    def __init__(self, mistakes: Sequence[str]) -> None:
        self.mistakes = list(mistakes)
        several = f"{counted(len(self.mistakes), 'setting')} are wrong:"
        super().__init__(self.mistakes[0] if len(self.mistakes) == 1 else "\n  ".join([several, *self.mistakes]))


def sentences(error: ValidationError, known: Sequence[str], origin: Callable[[str], str]) -> list[str]:
    """Return a sentence per mistake; `known` are all keys, `origin` tells where a key's value comes from, or ""."""
    found = []
    for detail in error.errors():
        key = ".".join(str(part) for part in detail["loc"])
        if detail["type"] == "extra_forbidden":
            found.append(f"unknown key {key}{origin(key)}{nearest_key(key, known)}")
        else:
            found.append(_wrong(key, origin(key), detail))
    return found


def _wrong(key: str, origin: str, detail: Any) -> str:
    message = str(detail["msg"])
    for theirs, ours in _WORDS:
        message = message.replace(theirs, ours)
    if re.search(r"a valid dictionary or instance of \w+", message):
        message = f"it must be a section with settings below it, such as {key}.NAME"
    given = detail["input"]
    shown = f", not {given!r}" if isinstance(given, str | int | float | bool) and "must be" in message else ""
    if "password" in key:
        shown = ""
    return f"{key}{origin}: {message}{shown}" if key else message


def nearest_variable(name: str, known: Iterable[str], prefix: str) -> str:
    """Propose a known variable in place of one; what all of them begin with makes none alike."""
    keys = {one.removeprefix(prefix): one for one in known}
    asked = name.upper().removeprefix(prefix)
    last = [key for key in keys if key.rpartition("__")[2] == asked]
    close = last or difflib.get_close_matches(asked, list(keys), n=1, cutoff=0.6)
    if close:
        return f"; did you mean {keys[close[0]]}?"
    return f"; a setting is {prefix}SECTION__NAME, such as {prefix}KAFKA__GROUP_ID"


def nearest_key(key: str, known: Sequence[str]) -> str:
    """Propose the key of that name in another section, else one like it in its own, or tell what the section has."""
    section, _, name = ".".join(part for part in key.split(".") if not part.isdigit()).rpartition(".")
    elsewhere = [one for one in known if one.rpartition(".")[2] == name]
    if len(elsewhere) == 1:
        return f"; did you mean {elsewhere[0]}?"
    prefix = f"{section}." if section else ""
    siblings = [one.removeprefix(prefix) for one in known if prefix and one.startswith(prefix)]
    siblings = siblings or list(dict.fromkeys(one.partition(".")[0] for one in known))
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.5 if section else 0.7)
    if close:
        return f"; did you mean {prefix}{close[0]}?"
    return f"; {section} has {', '.join(siblings)}" if section else f"; the sections are {', '.join(siblings)}"
