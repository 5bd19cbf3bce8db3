"""Errors as a client of OpenAI's API expects them."""

from __future__ import annotations

from typing import Any, Mapping

from fastapi.responses import JSONResponse

RETRY_SECONDS = 5
"""What `Retry-After` says where nothing better is known."""


class Refusal(Exception):
    """A request that gets an error for an answer. param: the field that it is about."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @property
    def headers(self) -> Mapping[str, str]:
        if self.status in (429, 503):
            return {"Retry-After": str(RETRY_SECONDS)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, headers=dict(self.headers))


def invalid(message: str, param: str | None = None, code: str | None = None) -> Refusal:
    """A request that is wrong by itself."""
    return Refusal(400, message, "invalid_request_error", param, code)


def busy(message: str) -> Refusal:
    return Refusal(429, message, "rate_limit_error", code="queue_full")


def closing(message: str = "the server is shutting down") -> Refusal:
    return Refusal(503, message, "service_unavailable", code="shutting_down")


def of_validation(errors: list[Any]) -> Refusal:
    """What a schema's check found: the first of it, by the field's name."""
    first = errors[0]
    where = [str(part) for part in first.get("loc", ()) if part != "body"]
    kind = first.get("type")
    if kind == "json_invalid":
        return invalid(f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if kind == "extra_forbidden":
        return invalid(f"unknown or unsupported field {'.'.join(where)!r}", ".".join(where), "unknown_parameter")
    if not where:
        return invalid(f"the body must be a JSON object, sent as application/json: {first['msg']}")
    if kind == "missing":
        return invalid(f"the field {'.'.join(where)!r} is missing", ".".join(where), "missing_parameter")
    same_field = [e for e in errors if e.get("loc", ())[1:2] == first["loc"][1:2]]
    reasons = list(dict.fromkeys(e["msg"] for e in same_field))
    return invalid(f"{where[0]}: {'; or: '.join(reasons[:4])}", where[0], "invalid_value")
