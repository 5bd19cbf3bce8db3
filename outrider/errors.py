"""Errors that a user can act on. Each message says what is wrong and what to do about it, in one line."""


class OutriderError(Exception):
    """Base of every error that Outrider raises on purpose; the command line prints its message and exits with 2."""


class ParameterError(OutriderError, ValueError):
    """A parameter is out of range, unknown or not supported here; the message names it."""


class PromptError(OutriderError, ValueError):
    """The prompt cannot be decoded: empty, too long, or with ids outside the vocabulary."""


class LoadError(OutriderError):
    """A model, drafter or file cannot be loaded."""


class CacheError(OutriderError):
    """The target's KV cache has no room for what is to be computed; everything that it holds is as it was."""


class LogitsError(OutriderError):
    """The target returned logits that are not a distribution (NaN, +inf, or everything masked)."""


class DraftError(OutriderError):
    """A drafter broke its contract in a way that could bias the output."""


class OutriderWarning(UserWarning):
    """Something that works, but that the user should know about."""
