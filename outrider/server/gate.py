"""What every request passes: who may come in, and one line in the log and one count when it is over."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import re
import time
import uuid
from typing import Any, Sequence

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import Refusal
from .metrics import Metrics

log = logging.getLogger("outrider.server")
OPEN = ("/health", "/", "/page/")
"""Paths that need no key: they tell nothing. One that ends with a slash stands for all below it."""
QUIET = ("/health", "/metrics")
HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:/@]*)(:[0-9]*)?")
"""What a Host header holds: a name or an address, and perhaps a port."""


def is_called(host: str, names: Sequence[str]) -> bool:
    """Whether a Host header is an address, localhost, or one of these names.

    A page of another site can let its own name point here (DNS rebinding): its requests then are of the same origin for a browser, but
    they still bear that name. No address can be made to point elsewhere.
    """
    found = HOST.fullmatch(host.lower())
    if not found:
        return False
    name = found[1].strip("[]").removesuffix(".")
    if not name or name == "localhost" or name.endswith(".localhost") or name in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Gate:
    """ASGI middleware. api_key: what requests must bring as a bearer token; None for no such thing. max_body: bytes. hosts: names
    that the server may be called by, besides localhost and addresses; None for any.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, api_key: str | None, max_body: int, hosts: Sequence[str] | None = None):
        self._app = app
        self._max_body = max_body
        self._too_large = f"the body has more than {max_body} bytes"
        self._metrics = metrics
        self._key = api_key.encode() if api_key else None
        self._hosts = None if hosts is None else [name.lower().removesuffix(".") for name in hosts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 499  # until something is sent the client has gone
        fields: dict[str, Any] = {"request": uuid.uuid4().hex[:12], "method": scope["method"], "path": scope["path"]}
        scope.setdefault("state", {})["fields"] = fields

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        left = self._max_body

        async def limited() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, self._too_large)
            return message

        try:
            refusal = self._refuse(scope)
            await (refusal.response() if refusal else self._app)(scope, limited, watch)
        finally:
            route = getattr(scope.get("route"), "path", None)
            self._metrics.answered(route or "other", status)
            level = logging.DEBUG if scope["path"] in QUIET and status < 400 else logging.INFO
            log.log(level, "request", extra={"fields": {**fields, "status": status, "seconds": time.monotonic() - began}})

    def _refuse(self, scope: Scope) -> Refusal | None:
        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        if self._hosts is not None and not is_called(host, self._hosts):
            why = f"this server is not called {host[:100]!r}; start it with --allow-host NAME if it should be"
            return Refusal(403, why, "permission_error", code="host_not_allowed")
        if self._key and not self._may_enter(scope):
            return Refusal(401, "the API key is missing or wrong", "authentication_error", code="invalid_api_key")
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body:  # a body without a length is cut off while it is read
            return Refusal(413, self._too_large, "invalid_request_error")
        return None

    def _may_enter(self, scope: Scope) -> bool:
        path = scope["path"]
        if any(path.startswith(free) if len(free) > 1 and free.endswith("/") else path == free for free in OPEN):
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        kind, _, key = given.partition(b" ")
        return kind.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key or b"")
