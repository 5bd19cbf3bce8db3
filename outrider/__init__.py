"""Outrider: lossless speculative decoding for any target and any drafter."""

__version__ = "0.1.0"
