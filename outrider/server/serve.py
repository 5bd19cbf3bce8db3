"""Running the application under uvicorn, with an end that lets requests finish."""

from __future__ import annotations

import ipaddress
import logging
import logging.config
from types import FrameType

import uvicorn
from fastapi import FastAPI

from .logs import configuration

log = logging.getLogger("outrider.server")
AFTER = 5
"""Seconds for saying so to those that were ended."""


class Server(uvicorn.Server):
    """On a signal it takes no more requests, lets those that run finish for `grace` seconds, and ends what is left with an error."""

    def __init__(self, app: FastAPI, host: str, port: int, grace: float = 30.0):
        config = uvicorn.Config(
            app,
            host,
            port,
            log_config=configuration(),
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(grace) + AFTER,
        )
        super().__init__(config)
        self._scheduler = app.state.service.scheduler
        self._grace = grace

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            log.info("shutting down", extra={"fields": {"grace_seconds": self._grace}})
            self._scheduler.drain(self._grace)
        super().handle_exit(sig, frame)


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
