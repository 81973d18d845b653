"""When the tests of this folder run: `MEGARL_CLUSTER_TESTS` says it, because they need root and daemons of their own.

unset         skipped: `make test` on any machine
1             asked for by name (`make test-slurm`): a machine that cannot run them makes them fail
if-possible   the build machine (`.ci/run`): a machine that cannot run them makes them skip, with the reason
"""

from __future__ import annotations

import os

import pytest

ASKED = os.environ.get("MEGARL_CLUSTER_TESTS", "")
assert ASKED in ("", "1", "if-possible"), f"MEGARL_CLUSTER_TESTS={ASKED} must be unset, 1 or if-possible"

only_when_asked = pytest.mark.skipif(not ASKED, reason="needs root: run by `make test-slurm`")


def need(why_impossible: str) -> None:
    """Ends the test when there is a reason: skipped where that was allowed, failed where it was asked for by name."""
    if why_impossible and ASKED == "if-possible":
        pytest.skip(why_impossible)
    if why_impossible:
        pytest.fail(why_impossible)
