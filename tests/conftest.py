"""Fixtures of the whole test suite."""

from tests.s3 import s3_env, s3_server

__all__ = ["s3_env", "s3_server"]
