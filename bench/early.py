"""A worker that binds each batch as soon as there is room for it: what late binding is compared with.

`python early.py run …` takes the same arguments as `forebay run …`.
"""

from __future__ import annotations

from dataclasses import replace

from forebay import assembly
from forebay.batching.policy import Policy
from forebay.cli import main
from forebay.settings import Batch

FOREVER = 3600.0
_as_set = assembly.policy_of


def _bound_early(batch: Batch) -> Policy:
    return replace(_as_set(batch), lead=FOREVER, lead_share=FOREVER)


if __name__ == "__main__":
    assembly.policy_of = _bound_early
    main()
