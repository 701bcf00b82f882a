"""Draftsmith: from a target model to a released drafter for speculative decoding."""

__version__ = "0.1.0"
