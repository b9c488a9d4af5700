"""Environment variables that fmicl sets for its own child processes."""

from __future__ import annotations

STARTED_BY_SWEEP = "FMICL_SWEEP"
"""Set for the runs of a sweep: all are started with ``--resume``, so that there is often no run to continue."""
