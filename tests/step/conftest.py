"""Fixtures of this folder."""

from tests.buckets import make_buckets, recording, scripted

__all__ = ["make_buckets", "recording", "scripted"]
