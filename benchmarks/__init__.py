"""Benchmarks, one question each; a package, since others install one of this name."""
