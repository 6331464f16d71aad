"""The fenced blocks of the project's pages, and what the shell blocks among them run; pure text work."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SHELLS = ("bash", "sh", "shell", "console")
_SEPARATORS = re.compile(r"^(&&|\|\|?|;|&)$")
_ASSIGNMENT = re.compile(r"^[A-Z_][A-Z0-9_]*=")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block: its page, the number of its first line there, its language and its text."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Every page that tells a reader what to type."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(*languages: str) -> list[Block]:
    """The blocks of these languages on every page."""
    return [block for page in pages() for block in _blocks_of(page) if block.language in languages]


def shell_blocks() -> list[Block]:
    """The blocks that a reader pastes into a shell."""
    return blocks(*_SHELLS)


def commands(block: Block) -> Iterator[list[str]]:
    """Yield the words of each command of a shell block, without prompts, variables and redirections.

    In a console block only the lines behind a prompt are commands; the others are output.
    """
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line for line in lines if line.startswith("$ ")]
    for line in lines:
        words: list[str] = []
        for word in [*_words(line.removeprefix("$ ")), ";"]:
            if _SEPARATORS.match(word):
                if words:
                    yield words
                words = []
            elif words or not _ASSIGNMENT.match(word):
                words.append(word)


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:  # a quotation over several lines: no command of ours begins inside it
        return []


def _blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield Block(str(page.relative_to(ROOT)), line, match[1], match[2])
