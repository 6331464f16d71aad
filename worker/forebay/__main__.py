"""`python -m forebay` is the same as the `forebay` command."""

from forebay.cli import main

main()
