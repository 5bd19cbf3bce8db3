"""Logs as one JSON object a line. What users wrote, and what they were answered, is in them only where that was asked for."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

from ..files import to_json


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return to_json(line, default=str)


def configuration(level: str = "INFO") -> dict[str, Any]:
    """For `logging.config.dictConfig`: our logger and uvicorn's, on stderr."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": JsonLines}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "json", "stream": "ext://sys.stderr"}},
        "loggers": {
            name: {"handlers": ["stderr"], "level": level, "propagate": False} for name in ("outrider.server", "uvicorn")
        },
    }
