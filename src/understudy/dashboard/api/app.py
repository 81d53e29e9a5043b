"""The page's routes: its files, and below /api the data that it shows. Only /api/TARGET/edit and trim change anything.

TARGET is the position of a run or store on the command line, from 0.
"""

from __future__ import annotations

import math
import mimetypes
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field
from starlette.background import BackgroundTask

from understudy import __version__
from understudy.core import UnderstudyError
from understudy.dashboard.api import alarms, episode_queries, store_stats
from understudy.dashboard.api.change_events import MAX_PAGES, ChangeEvents
from understudy.dashboard.api.cluster import cluster_view, workers
from understudy.dashboard.api.compare import compare
from understudy.dashboard.api.episode_estimates import estimates_of
from understudy.dashboard.api.episode_files import EXPORTS, export_episode, trim_episode
from understudy.dashboard.api.episode_rows import EpisodeImages, steps_of
from understudy.dashboard.api.filters import Filter
from understudy.dashboard.api.targets import Target
from understudy.replay.write import edit_requests
from understudy.web.auth import LoginCookie
from understudy.web.replies import printable, validation_text

PAGE = Path(__file__).parents[1] / "page"
LOGIN = "/api/enter"
FOREVER = {"cache-control": "private, max-age=31536000, immutable"}  # for URLs that name a version
MEDIA_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".html": "text/html; charset=utf-8",
}
PROCESS_FIELDS = ("role", "name", "state", "step", "update", "steps_per_s", "updates_per_s", "doing", "page")
Strict = Field(strict=True)


class EditBody(BaseModel):
    """A change of episodes; see replay/write/edit_requests.py."""

    model_config = {"extra": "forbid"}

    action: str
    episodes: Annotated[list[Annotated[int, Strict]], Field(min_length=1, max_length=10_000)]
    labels: dict[str, str | None] = {}
    success: Annotated[bool, Strict] | None = None
    who: str = ""


class TrimBody(BaseModel):
    """The part of an episode to keep: steps from `first` up to `stop`, without it."""

    model_config = {"extra": "forbid"}

    episode: Annotated[int, Field(strict=True, gt=0, lt=2**63)]
    first: Annotated[int, Field(strict=True, ge=0, lt=2**63)]
    stop: Annotated[int, Field(strict=True, gt=0, lt=2**63)]


class TokenBody(BaseModel):
    """The token from the page's URL."""

    token: Annotated[str, Field(max_length=200)]


def make_app(targets: list[Target], changes: ChangeEvents, cookie: LoginCookie) -> FastAPI:
    """The app. A page that shows the token at LOGIN gets the cookie."""
    app = FastAPI(title="understudy watch", docs_url=None, redoc_url=None, openapi_url=None)
    _answer_errors(app)
    _add_files(app)
    _add_login(app, cookie)
    _add_views(app, targets, changes)
    _add_episodes(app, targets)
    return app


def _add_files(app: FastAPI) -> None:
    """Serve the files of the page from memory: no path of a request ever reaches the disk."""

    def add(route: str, path: Path) -> None:
        body = path.read_bytes()
        media_type = MEDIA_TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        app.get(route)(lambda: Response(body, media_type=media_type, headers={"cache-control": "no-cache"}))

    for path in sorted(PAGE.rglob("*")):
        if path.is_file():
            add("/" if path.name == "index.html" else f"/{path.relative_to(PAGE).as_posix()}", path)


def _add_login(app: FastAPI, cookie: LoginCookie) -> None:
    @app.post(LOGIN)
    def enter(body: TokenBody) -> Response:
        value = cookie.exchange(body.token)
        if value is None:
            return JSONResponse({"detail": "the token is wrong; open the address that `understudy watch` printed"}, 401)
        answer = JSONResponse({})
        answer.set_cookie(cookie.name, value, httponly=True, samesite="strict", max_age=30 * 86400)
        return answer


def _add_views(app: FastAPI, targets: list[Target], changes: ChangeEvents) -> None:
    @app.get("/api/targets")
    def all_targets() -> Response:
        listed = [
            {
                "name": target.name,
                "path": str(target.path),
                "run": target.is_run,
                "store": target.has_store,
                "cluster": target.cluster.exists,
            }
            for target in targets
        ]
        return answer({"version": __version__, "targets": listed})

    @app.get("/api/events")
    async def events() -> Response:
        if changes.num_pages >= MAX_PAGES:
            return JSONResponse({"detail": f"{MAX_PAGES} pages are open already; close one"}, 503)
        return StreamingResponse(changes.events(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    @app.get("/api/runs")
    def runs() -> Response:
        return answer(compare(targets))

    def view(name: str, show: Callable[[Target], dict[str, Any]]) -> None:
        app.get(f"/api/{{number}}/{name}")(lambda number: answer(show(_target(targets, number))))

    view("overview", overview)
    view("replay", replay)
    view(
        "interventions",
        lambda target: {
            "kind": (target.config() or {}).get("kind"),
            **(store_stats.interventions(target) if target.has_store else {"absent": True}),
        },
    )
    view(
        "health",
        lambda target: {
            "processes": alarms.processes(target),
            "lock_owner": alarms.lock_owner(target),
            "disk": alarms.disk_space(target.path),
            "directories": [str(path) for path in target.health],
        },
    )
    view("cluster", cluster_view)

    @app.get("/api/{number}/workers")
    def worker_group(number: str, role: str, node: str = "", offset: int = 0) -> Response:
        return answer(workers(_target(targets, number), node, role, offset))


def overview(target: Target) -> dict[str, Any]:
    """The first view: progress, scores, curves and alarms."""
    metrics = target.metrics.follow()
    has_store, cluster = target.has_store, target.cluster.read()
    found: dict[str, Any] = {
        "run": target.is_run,
        "store": has_store,
        "config": target.config(),
        "metrics": metrics,
        "totals": store_stats.totals(target) if has_store else None,
        "tasks": store_stats.tasks(target) if has_store else [],
        "course": store_stats.training_course(target) if has_store else [],
        "recent": store_stats.recent_practice(target) if has_store else None,
        "operators": store_stats.operators(target) if has_store else [],
        "processes": [{name: process.get(name) for name in PROCESS_FIELDS} for process in alarms.processes(target)],
        "pending": len(edit_requests.pending_edits(target.store)),
        "cluster": None if cluster is None else cluster.driver_state,
    }
    evaluations = metrics["evaluations"]
    by_task = evaluations[-1]["tasks"] if evaluations else {}
    found["scores"] = [{"task": task, **store_stats.score_json(*tally)} for task, tally in by_task.items()]
    last_commit_s = found["totals"]["rate"]["last_commit_s"] if has_store else None
    found["alarms"] = alarms.find_alarms(target, last_train=metrics["last"].get("train"), last_commit_s=last_commit_s)
    return found


def replay(target: Target) -> dict[str, Any]:
    """The contents of the store, and what was sampled from it."""
    if not target.has_store:
        return {"absent": True}
    metrics = target.metrics.follow()
    return {
        "totals": store_stats.totals(target),
        "groups": store_stats.groups(target),
        "train": metrics["curves"].get("train"),
        "last": metrics["last"].get("train"),
        "disk": alarms.disk_space(target.store),
        "config": target.config(),
        "processes": [one for one in alarms.processes(target) if "delivery" in one or "writers" in one],
    }


def _add_episodes(app: FastAPI, targets: list[Target]) -> None:
    images = EpisodeImages()

    @app.get("/api/{number}/episodes")
    def episodes(number: str, request: Request, offset: int = 0, limit: int = 100) -> Response:
        target = _target(targets, number)
        if not target.has_store:
            return answer({"absent": True, "total": 0, "rows": [], "newest": 0, "offset": 0, "steps": 0, "store": ""})
        return answer(episode_queries.list_episodes(target, Filter.parse(request.query_params), offset, limit))

    @app.get("/api/{number}/facets")
    def facets(number: str) -> Response:
        target = _target(targets, number)
        return answer(episode_queries.facets(target) if target.has_store else {"absent": True})

    @app.get("/api/{number}/episode/{episode}")
    def episode(number: str, episode: int) -> Response:
        target = _target(targets, number)
        found, steps = episode_queries.one_episode(target, episode), steps_of(target, episode)
        return answer({**found, "steps": steps, "estimates": estimates_of(target, episode, steps["num_steps"])})

    @app.get("/api/{number}/thumbnail/{episode}")
    def thumbnail(number: str, episode: int, at: float = 1.0, v: str = "") -> Response:
        share = min(max(at, 0.0), 1.0) if math.isfinite(at) else 1.0
        made = images.thumbnail(_target(targets, number), episode, share, v[:64])
        return Response(made, media_type="image/jpeg", headers=FOREVER if v else None)

    @app.get("/api/{number}/frames/{episode}")
    def frames(number: str, episode: int, camera: str, first: int = 0, count: int = 32, v: str = "") -> Response:
        made = images.frames(_target(targets, number), episode, camera, first, count)
        return Response(made, media_type="application/octet-stream", headers=FOREVER if v else None)

    @app.post("/api/{number}/edit")
    def edit(number: str, body: EditBody) -> Response:
        request = edit_requests.EditRequest(
            action=body.action,  # type: ignore[arg-type]  # the request checks it
            episodes=tuple(body.episodes),
            labels=body.labels,
            success=body.success,
            who=body.who,
        )
        return answer(episode_queries.edit_episodes(_target(targets, number), request))

    @app.post("/api/{number}/trim")
    def trim(number: str, body: TrimBody) -> Response:
        return answer(trim_episode(_target(targets, number), body.episode, body.first, body.stop))

    @app.get("/api/exports")
    def exports() -> Response:
        return answer({"exports": EXPORTS})

    @app.get("/api/{number}/export/{episode}")
    def export(number: str, episode: int, format: str) -> Response:
        file, directory = export_episode(_target(targets, number), episode, format)
        return FileResponse(
            file,
            filename=file.name,
            media_type="application/octet-stream",
            background=BackgroundTask(shutil.rmtree, directory, ignore_errors=True),
        )


def _target(targets: list[Target], number: str) -> Target:
    if not number.isdecimal() or len(number) > 6 or int(number) >= len(targets):
        raise UnderstudyError(f"target: expected a number from 0 to {len(targets) - 1}, got {number[:20]!r}")
    return targets[int(number)]


def answer(value: Mapping[str, Any]) -> Response:
    """A JSON response, in which NaN and infinity are null."""
    return JSONResponse(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _answer_errors(app: FastAPI) -> None:
    async def invalid_body(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": validation_text(error)}, 422)

    async def refused(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": printable(str(error))}, 409)

    app.add_exception_handler(RequestValidationError, invalid_body)
    app.add_exception_handler(UnderstudyError, refused)
