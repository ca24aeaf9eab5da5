"""Run a function on several ranks, as real processes over loopback: for the tests of this library and of its users."""

from shardopt.testing.ranks import RankError, RankPool, run_ranks

__all__ = ["RankError", "RankPool", "run_ranks"]
