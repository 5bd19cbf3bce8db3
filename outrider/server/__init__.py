"""An OpenAI-compatible server: `outrider serve`, or `make_app` for an ASGI application. Needs ``pip install outrider[server]``."""

from .app import Options, make_app
from .requests import Served
from .scheduler import Limits

__all__ = ["Limits", "Options", "Served", "make_app"]
