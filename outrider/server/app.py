"""The application: routes of OpenAI's API over one `Scheduler`, and what surrounds them."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, AsyncIterator, cast

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse, Response
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from .. import __version__
from .answers import Answer, ChatAnswer, TextAnswer
from .errors import Refusal, closing, invalid, of_validation
from .gate import Gate
from .generation import EventStream, Generation, until_gone
from .metrics import Metrics
from .requests import Served
from .scheduler import Job, Limits, Scheduler
from .schema import ChatRequest, CompletionRequest, ErrorBody
from .traces import Traces

log = logging.getLogger("outrider.server")
PAGE = Path(__file__).parent / "page"
TRACE = "X-Outrider-Trace"
PROBLEMS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorBody} for code in (400, 401, 403, 404, 405, 413, 422, 429, 500, 503)
}
router = APIRouter()


@dataclass(frozen=True)
class Options:
    """limits: of the engine. api_key: what requests must bring. cors: origins of pages that may ask. hosts: names that requests
    may call the server by, besides localhost and addresses; None for any. max_body: bytes of a request. traces: a folder for traces of requests that ask for one. log_prompts: prompts and answers stand in the log.
    """

    limits: Limits = field(default_factory=Limits)
    api_key: str | None = None
    cors: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    max_body: int = 8 * 2**20
    traces: str | None = None
    log_prompts: bool = False


class Service:
    """What the routes work with."""

    def __init__(self, served: Served, options: Options):
        self.served = served
        self.options = options
        self.metrics = Metrics(served.name)
        self.scheduler = Scheduler(served.engine, options.limits, self.metrics.observe)
        self.metrics.watch(self.scheduler)
        self.traces = Traces(options.traces)
        self.reader = ThreadPoolExecutor(1, "outrider-reader")  # tokenizers take one text at a time

    def close(self) -> None:
        self.scheduler.stop()
        self.reader.shutdown()
        self.traces.close()


def make_app(served: Served, options: Options | None = None) -> FastAPI:
    """The server as an ASGI application. Its engine's thread runs while the application does."""
    options = options or Options()
    service = Service(served, options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.scheduler.start()
        yield
        await asyncio.to_thread(service.close)

    app = FastAPI(
        title="Outrider",
        version=__version__,
        summary="An OpenAI-compatible server with lossless speculative decoding",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    app.include_router(router)
    app.mount("/page", StaticFiles(directory=PAGE), name="page")
    passing = {"api_key": options.api_key, "max_body": options.max_body, "hosts": options.hosts}
    app.add_middleware(cast(Any, Gate), metrics=service.metrics, **passing)
    if options.cors:
        app.add_middleware(CORSMiddleware, allow_origins=list(options.cors), allow_methods=["*"], allow_headers=["*"])
    app.add_exception_handler(Refusal, _refused)
    app.add_exception_handler(RequestValidationError, _not_valid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RecursionError, _too_deep)
    app.add_exception_handler(Exception, _failed)
    return app


# ---- errors ---------------------------------------------------------------------------------------------------------


async def _refused(request: Request, error: Exception) -> Response:
    return cast(Refusal, error).response()


async def _not_valid(request: Request, error: Exception) -> Response:
    return of_validation(list(cast(RequestValidationError, error).errors())).response()


async def _http_error(request: Request, error: Exception) -> Response:
    failed = cast(HTTPException, error)
    made = Refusal(failed.status_code, str(failed.detail), "invalid_request_error").response()
    made.headers.update(failed.headers or {})
    return made


async def _too_deep(request: Request, error: Exception) -> Response:
    """JSON within JSON without end: nothing else that is done for a request calls itself."""
    return invalid("the body is nested too deeply").response()


async def _failed(request: Request, error: Exception) -> Response:
    return Refusal(500, "the server failed; its log says why", "server_error").response()


# ---- routes ---------------------------------------------------------------------------------------------------------


def _service(request: Request) -> Service:
    return request.app.state.service


@router.post("/v1/chat/completions", responses=PROBLEMS)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """An answer to a conversation."""
    return await _answer(body, request, ChatAnswer)


@router.post("/v1/completions", responses=PROBLEMS)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """A text that goes on."""
    return await _answer(body, request, TextAnswer)


async def _answer(body: ChatRequest | CompletionRequest, request: Request, kind: type[Answer]) -> Response:
    service = _service(request)
    if service.scheduler.is_closing:
        raise closing()
    await _check_text(body, request)
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options: needs stream to be true", "stream_options")
    generation = await _begin(service, body, request, kind)
    headers = {TRACE: f"/v1/traces/{generation.answer.id}"} if _wants_trace(request) else {}
    if body.stream:
        return EventStream(generation, bool(body.stream_options and body.stream_options.include_usage), headers)
    gone = asyncio.create_task(until_gone(request))
    whole = asyncio.create_task(generation.whole())
    try:
        await asyncio.wait([gone, whole], return_when=asyncio.FIRST_COMPLETED)
        return JSONResponse(whole.result(), headers=headers) if whole.done() else Response(status_code=499)
    finally:
        gone.cancel()
        whole.cancel()
        generation.close()
        if service.options.log_prompts:
            generation.fields["texts"] = [job.sequence.text for job in generation.jobs]


async def _check_text(body: BaseModel, request: Request) -> None:
    """JSON can name halves of surrogate pairs, which are no text."""
    if b"\\ud" in (await request.body()).lower():
        try:
            body.model_dump_json()
        except ValueError as error:
            raise invalid("the body is not text: it has half of a surrogate pair") from error


async def _begin(service: Service, body: ChatRequest | CompletionRequest, request: Request, kind: type[Answer]) -> Generation:
    """Check the request, queue its jobs, and open its trace."""
    loop = asyncio.get_running_loop()
    prepared = await loop.run_in_executor(service.reader, service.served.prepare, body)
    events: asyncio.Queue[Any] = asyncio.Queue()
    n = body.n or 1
    jobs = [Job(s, i, i % n == 0, loop, events) for i, s in enumerate(prepared.sequences)]
    report = bool(body.speculation and body.speculation.report)
    tokenizer = service.served.engine.target.tokenizer
    answer = kind(service.served.name, jobs, tokenizer, prepared.readers, report, body.prediction is not None)
    fields = request.state.fields
    if service.options.log_prompts:
        fields["body"] = await request.json()
    service.scheduler.submit(jobs)
    try:
        trace = service.traces.open(answer.id, service.served.engine, jobs) if _wants_trace(request) else None
    except BaseException:
        service.scheduler.cancel(jobs)
        raise
    return Generation(answer, service.scheduler, service.metrics, trace, fields)


def _wants_trace(request: Request) -> bool:
    value = request.headers.get(TRACE)
    if value not in (None, "0", "1"):
        raise invalid(f"the header {TRACE} must be 1 or 0")
    return value == "1"


@router.get("/v1/models", responses=PROBLEMS)
async def models(request: Request) -> Any:
    """What is served, with the drafters that requests may choose."""
    return {"object": "list", "data": [_model(_service(request))]}


@router.get("/v1/models/{name:path}", responses=PROBLEMS)
async def model(name: str, request: Request) -> Any:
    """The one model that is served."""
    service = _service(request)
    if name != service.served.name:
        raise Refusal(404, f"the model {name!r} is not here", "invalid_request_error", "model", "model_not_found")
    return _model(service)


def _model(service: Service) -> dict[str, Any]:
    served = service.served
    return {
        "id": served.name,
        "object": "model",
        "created": served.created,
        "owned_by": "outrider",
        "context_length": served.engine.target.context_length,
        "drafter": served.engine.drafter.name,
        "drafters": list(served.drafters),
    }


@router.get("/v1/traces/{name}", responses=PROBLEMS)
async def trace(name: str, request: Request) -> Response:
    """The trace of a request that asked for one."""
    path = _service(request).traces.find(name)
    if path is None:
        raise Refusal(404, f"there is no trace {name!r}", "invalid_request_error", "name")
    return FileResponse(path, media_type="application/jsonl", filename=path.name)


@router.get("/health", responses=PROBLEMS)
async def health(request: Request) -> Any:
    """Whether requests are taken."""
    scheduler = _service(request).scheduler
    if scheduler.is_closing or not scheduler.is_alive:
        raise closing() if scheduler.is_closing else Refusal(500, "the engine's thread has ended", "server_error")
    return {"status": "ok", "running": scheduler.running, "waiting": scheduler.waiting}


@router.get("/metrics", responses=PROBLEMS)
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    return Response(_service(request).metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """The chat page."""
    return FileResponse(PAGE / "index.html", headers={"Content-Security-Policy": "default-src 'self'; img-src data:"})
