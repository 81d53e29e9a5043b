"""The page's endpoints: its files, and below /api what it shows. Only /api/PLACE/ask changes anything."""

from __future__ import annotations

import math
import mimetypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field

from understudy import __version__
from understudy.core import UnderstudyError
from understudy.dashboard.api import alarms as vitals
from understudy.dashboard.api import episode_queries as library
from understudy.dashboard.api import store_stats as tallies
from understudy.dashboard.api.cluster import cluster_view, members
from understudy.dashboard.api.compare import compare
from understudy.dashboard.api.door import ENTER, Door
from understudy.dashboard.api.episode_rows import Pictures, steps_of
from understudy.dashboard.api.filters import Filter
from understudy.dashboard.api.live import MAX_PAGES, Live
from understudy.dashboard.api.targets import Place
from understudy.replay.write import edit_requests as inbox
from understudy.robots.app import printable, what_is_wrong

PAGE = Path(__file__).parents[1] / "page"
FOREVER = {"cache-control": "private, max-age=31536000, immutable"}  # for what its address names fully
Strict = Field(strict=True)


class Wish(BaseModel):
    """What a page asks of a store; see replay/write/edit_requests.py."""

    model_config = {"extra": "forbid"}

    action: str
    episodes: Annotated[list[Annotated[int, Strict]], Field(min_length=1, max_length=10_000)]
    labels: dict[str, str | None] = {}
    who: str = ""


class Key(BaseModel):
    """The token, from the address."""

    token: Annotated[str, Field(max_length=200)]


def make_app(places: list[Place], live: Live, door: Callable[[], Door]) -> FastAPI:
    """The app. `door` is asked about tokens; it stands before the app, and so is made after it."""
    app = FastAPI(title="understudy watch", docs_url=None, redoc_url=None, openapi_url=None)
    _answer_errors(app)
    _add_files(app)
    _add_entrance(app, door)
    _add_views(app, places, live)
    _add_episodes(app, places)
    return app


def _add_files(app: FastAPI) -> None:
    """The files of the page, read once: no path of a request ever reaches the disk."""
    types = {
        ".js": "text/javascript; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".svg": "image/svg+xml",
        ".html": "text/html; charset=utf-8",
    }

    def add(route: str, path: Path) -> None:
        body = path.read_bytes()
        kind = types.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
        app.get(route)(lambda: Response(body, media_type=kind, headers={"cache-control": "no-cache"}))

    for path in sorted(PAGE.rglob("*")):
        if path.is_file():
            add("/" if path.name == "index.html" else f"/{path.relative_to(PAGE).as_posix()}", path)


def _add_entrance(app: FastAPI, door: Callable[[], Door]) -> None:
    @app.post(ENTER)
    def enter(key: Key) -> Response:
        value = door().enter(key.token)
        if value is None:
            return JSONResponse({"detail": "the token is wrong; open the address that `understudy watch` printed"}, 401)
        answer = JSONResponse({})
        answer.set_cookie(door().cookie, value, httponly=True, samesite="strict", max_age=30 * 86400)
        return answer


def _add_views(app: FastAPI, places: list[Place], live: Live) -> None:
    @app.get("/api/places")
    def all_places() -> Response:
        said = [
            {
                "name": place.name,
                "path": str(place.path),
                "run": place.is_run,
                "store": place.has_store,
                "cluster": place.cluster.exists,
            }
            for place in places
        ]
        return answer({"version": __version__, "places": said})

    @app.get("/api/live")
    async def events() -> Response:
        if live.num_pages >= MAX_PAGES:
            return JSONResponse({"detail": f"{MAX_PAGES} pages look on already"}, 503)
        return StreamingResponse(live.events(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    @app.get("/api/runs")
    def runs() -> Response:
        return answer(compare(places))

    def view(name: str, show: Callable[[Place], Any]) -> None:
        app.get(f"/api/{{number}}/{name}")(lambda number: answer(show(_place(places, number))))

    view("overview", overview)
    view("replay", replay)
    view(
        "interventions",
        lambda place: {
            "kind": (place.config() or {}).get("kind"),
            **(tallies.interventions(place) if place.has_store else {"absent": True}),
        },
    )
    view(
        "health",
        lambda place: {
            "roles": vitals.roles(place),
            "owner": vitals.owner(place),
            "disk": vitals.disk(place.path),
            "directories": [str(path) for path in place.health],
        },
    )
    view("cluster", cluster_view)

    @app.get("/api/{number}/members")
    def group(number: str, role: str, node: str = "", offset: int = 0) -> Response:
        return answer(members(_place(places, number), node, role, offset))


def overview(place: Place) -> dict[str, Any]:
    """The first view."""
    known = place.metrics.follow()
    there, cluster = place.has_store, place.cluster.read()
    found: dict[str, Any] = {
        "run": place.is_run,
        "store": there,
        "config": place.config(),
        "metrics": known,
        "totals": tallies.totals(place) if there else None,
        "tasks": tallies.tasks(place) if there else [],
        "course": tallies.course(place) if there else [],
        "roles": [
            {
                name: role.get(name)
                for name in ("role", "name", "state", "step", "update", "steps_per_s", "updates_per_s", "doing", "page")
            }
            for role in vitals.roles(place)
        ],
        "pending": len(inbox.pending(place.store)),
        "cluster": None if cluster is None else cluster.state,
    }
    evaluations = known["evaluations"]
    tried = evaluations[-1]["tasks"] if evaluations else {}
    found["scores"] = [{"task": task, **tallies.score_json(*tally)} for task, tally in tried.items()]
    last_commit_s = found["totals"]["rate"]["last_commit_s"] if there else None
    found["alarms"] = vitals.alarms(place, last_train=known["last"].get("train"), last_commit_s=last_commit_s)
    return found


def replay(place: Place) -> dict[str, Any]:
    """What is learned from."""
    if not place.has_store:
        return {"absent": True}
    known = place.metrics.follow()
    return {
        "totals": tallies.totals(place),
        "groups": tallies.groups(place),
        "train": known["curves"].get("train"),
        "last": known["last"].get("train"),
        "disk": vitals.disk(place.store),
        "config": place.config(),
        "roles": [role for role in vitals.roles(place) if "delivery" in role or "writers" in role],
    }


def _add_episodes(app: FastAPI, places: list[Place]) -> None:
    pictures = Pictures()

    @app.get("/api/{number}/episodes")
    def episodes(number: str, request: Request, offset: int = 0, limit: int = 100) -> Response:
        place = _place(places, number)
        if not place.has_store:
            return answer({"absent": True, "total": 0, "rows": [], "newest": 0, "offset": 0, "steps": 0, "store": ""})
        return answer(library.list_episodes(place, Filter.parse(request.query_params), offset, limit))

    @app.get("/api/{number}/facets")
    def facets(number: str) -> Response:
        place = _place(places, number)
        return answer(library.facets(place) if place.has_store else {"absent": True})

    @app.get("/api/{number}/episode/{episode}")
    def episode(number: str, episode: int) -> Response:
        place = _place(places, number)
        return answer({**library.one_episode(place, episode), "steps": steps_of(place, episode)})

    @app.get("/api/{number}/thumb/{episode}")
    def thumb(number: str, episode: int, at: float = 1.0, v: str = "") -> Response:
        share = min(max(at, 0.0), 1.0) if math.isfinite(at) else 1.0
        made = pictures.thumb(_place(places, number), episode, share, v[:64])
        return Response(made, media_type="image/jpeg", headers=FOREVER if v else None)

    @app.get("/api/{number}/frames/{episode}")
    def frames(number: str, episode: int, camera: str, first: int = 0, count: int = 32, v: str = "") -> Response:
        made = pictures.frames(_place(places, number), episode, camera, first, count)
        return Response(made, media_type="application/octet-stream", headers=FOREVER if v else None)

    @app.post("/api/{number}/ask")
    def ask(number: str, wish: Wish) -> Response:
        wanted = inbox.Request(
            action=wish.action,  # type: ignore[arg-type]  # it looks for itself
            episodes=tuple(wish.episodes),
            labels=wish.labels,
            who=wish.who,
        )
        return answer(library.ask(_place(places, number), wanted))


def _place(places: list[Place], number: str) -> Place:
    if not number.isdecimal() or len(number) > 6 or int(number) >= len(places):
        raise UnderstudyError(f"there is no place {number[:20]!r} here; there are 0 to {len(places) - 1}")
    return places[int(number)]


def answer(value: Any) -> Response:
    """As JSON; what is not a number is null there."""
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
    async def wrong_body(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": what_is_wrong(error)}, 422)

    async def refused(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"detail": printable(str(error))}, 409)

    app.add_exception_handler(RequestValidationError, wrong_body)
    app.add_exception_handler(UnderstudyError, refused)
