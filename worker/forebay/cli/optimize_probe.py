"""Measures one candidate of `forebay optimize` and prints the answer; the command runs it as a process each.

So torch stays out of the command, and a candidate that crashes its process is an answer like any other.
"""

from __future__ import annotations

import contextlib
import sys


def main() -> None:
    """Read the question from standard input, answer on standard output; the model's own prints go to standard error.

    Both are MessagePack: JSON has no infinity, by which outputs that overflow deviate.
    """
    import msgspec

    from forebay.inference.candidate import answer
    from forebay.inference.verdicts import Question

    question = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Question)
    with contextlib.redirect_stdout(sys.stderr):
        told = answer(question)
    sys.stdout.buffer.write(msgspec.msgpack.encode(told))


if __name__ == "__main__":
    main()
