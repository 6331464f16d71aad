"""What a replica has said of its steps and nobody has counted yet. Pure; on the loop's thread."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.inference.messages import Stepped


@dataclass(slots=True)
class Progress:
    """Steps since the last `taken`; `rows` is how many run now. For the rest see `messages.Stepped`."""

    rows: int = 0
    steps: int = 0
    row_steps: int = 0
    seconds: float = 0.0
    restarted: int = 0
    told_at: float = float("-inf")

    def add(self, stepped: Stepped, now: float) -> None:
        """Add what was said."""
        self.told_at = now
        self.rows = stepped.rows
        self.steps += stepped.steps
        self.row_steps += stepped.row_steps
        self.seconds += stepped.seconds
        self.restarted += stepped.restarted

    def taken(self) -> Progress:
        """Return what is not counted yet, once."""
        found = Progress(self.rows, self.steps, self.row_steps, self.seconds, self.restarted)
        self.steps, self.row_steps, self.seconds, self.restarted = 0, 0, 0.0, 0
        return found
