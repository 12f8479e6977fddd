"""The server's routes: a page, what is known, and answers to questions, one at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from galvatron.core.errors import GalvatronError, InvalidInput
from galvatron.core.spec import OPTIMIZERS, SCHEDULES, SWITCHES, Precision
from galvatron.families import cluster_names, configured_names, load_cluster, model_names
from galvatron.planner.plan.options import help_of
from galvatron.planner.space import SPACES
from galvatron.studio.guard import Application, Guard, TooLarge
from galvatron.studio.question import SETUP, question_of
from galvatron.studio.reply import DOWNLOADS, Download, advice, download, price, reply

__all__ = ["studio"]

_LOG = logging.getLogger(__name__)
_KINDS = {"js": "text/javascript", "css": "text/css", "html": "text/html"}
_PAGES, _STUDIO = "galvatron.planner.pages", "galvatron.studio"
_FILES = {
    "": (_STUDIO, "studio.html"),
    "studio.js": (_STUDIO, "studio.js"),
    "studio.css": (_STUDIO, "studio.css"),
    "page.js": (_PAGES, "page.js"),
    "page.css": (_PAGES, "page.css"),
    "d3.min.js": (_PAGES, "d3.min.js"),
    "plot.min.js": (_PAGES, "plot.min.js"),
}
"""What is served, by its address: nothing else can be asked for."""


def studio(port: int) -> Application:
    """The application that a server on this port of the loopback interface runs."""
    one = threading.Lock()  # a search takes a core, and tracing a model changes torch's state
    files = [Route(f"/{address}", _file(*place)) for address, place in _FILES.items()]
    answers = [
        Route("/plan", _answers(one, lambda text: reply(question_of(text))), methods=["POST"]),
        Route("/price", _answers(one, lambda text: price(question_of(text))), methods=["POST"]),
        Route("/advice", _answers(one, lambda text: advice(question_of(text))), methods=["POST"]),
        Route("/known", _known),
        *(Route(f"/download/{each.file}", _answers(one, _maker(each)), methods=["POST"]) for each in DOWNLOADS),
    ]
    return Guard(Starlette(routes=[*files, *answers]), port)


def _file(package: str, name: str) -> Callable[[Request], Awaitable[Response]]:
    async def serve(_: Request) -> Response:
        content = resources.files(package).joinpath("assets", name).read_bytes()
        return Response(content, media_type=_KINDS[name.rpartition(".")[2]])

    return serve


async def _known(_: Request) -> Response:
    return JSONResponse(
        {
            "models": [*model_names(), *configured_names()],
            "traced": list(configured_names()),
            "clusters": [_kind(name) for name in cluster_names()],
            "switches": [
                {"name": each.name, "title": each.title, "help": each.help, "default": each.default}
                for each in SWITCHES
            ],
            "precisions": [str(each) for each in Precision],
            "optimizers": [each.name for each in OPTIMIZERS],
            "schedules": [each.name for each in SCHEDULES],
            "spaces": [each.name for each in SPACES],
            "help": {name: help_of(name) for name in SETUP},
            "downloads": [{"file": each.file, "about": each.about} for each in DOWNLOADS],
        }
    )


def _kind(name: str) -> dict[str, Any]:
    """A preset, and whether it comes in any number of nodes."""
    cluster = load_cluster(name)
    try:
        grows = load_cluster(name, devices=2 * cluster.devices).devices > cluster.devices
    except InvalidInput:
        grows = False
    return {"name": name, "device": cluster.device.name, "devices": cluster.devices, "grows": grows}


def _answers(one: threading.Lock, answer: Callable[[str], Any]) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        return await _answered(request, one, lambda text: JSONResponse(answer(text)))

    return respond


def _maker(wanted: Download) -> Callable[[str], Any]:
    return lambda text: download(question_of(text), wanted)


async def _answered(request: Request, one: threading.Lock, answer: Callable[[str], Response]) -> Response:
    """An answer, or one line that says why there is none."""

    def alone(text: str) -> Response:
        with one:
            return answer(text)

    try:
        return await run_in_threadpool(alone, await _text(request))
    except TooLarge as error:
        return JSONResponse({"error": str(error)}, status_code=413)
    except GalvatronError as error:
        return JSONResponse({"error": str(error)}, status_code=400)
    except Exception:
        _LOG.exception("a question was not answered")
        return JSONResponse({"error": "an error of Galvatron itself: its log says which"}, status_code=500)


async def _text(request: Request) -> str:
    body: bytes = await request.body()
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"question: byte {error.start} is not UTF-8 text; expected JSON") from None
