"""Tests with real processes. The harness lives in `tests.rank_processes`; ``from tests.ranks import run_ranks``."""

from tests.rank_processes import Outcome, RanksFailedError, run_ranks, run_ranks_raw

__all__ = ["Outcome", "RanksFailedError", "run_ranks", "run_ranks_raw"]
