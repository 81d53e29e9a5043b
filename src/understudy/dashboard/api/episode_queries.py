"""Library: the episodes of a store as lists: pages of a filtered list, what can be filtered by, and one in full."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from understudy.core import StoreError, StoreLockedError
from understudy.dashboard.api.filters import SORTS, Filter, Overlay
from understudy.dashboard.api.targets import Place
from understudy.replay import Store
from understudy.replay.format.catalog import Catalog
from understudy.replay.write import edit_requests as inbox
from understudy.replay.write.edit_requests import INBOX_DIRECTORY, REFUSED_DIRECTORY, Request

MAX_PAGE = 300
MAX_VALUES = 100  # of a field, to choose from
LISTED = (
    "id",
    "state",
    "kind",
    "num_rows",
    "num_steps",
    "num_policy",
    "num_human",
    "num_script",
    "num_random",
    "task",
    "success",
    "labels",
    "deleted",
    "begun_at",
    "spec",
)
COLUMNS = (
    "id",
    "state",
    "kind",
    "num_rows",
    "num_steps",
    "num_bytes",
    "num_policy",
    "num_human",
    "num_script",
    "num_random",
    "total_reward",
    "task",
    "instruction",
    "init_state",
    "seed",
    "group_key",
    "actor",
    "operator",
    "success",
    "split",
    "labels",
    "deleted",
    "begun_at",
    "ended_at",
    "spec",
)


def overlay_of(place: Place) -> Overlay:
    """What is still to be applied."""
    return Overlay.of(inbox.pending(place.store))


def list_episodes(place: Place, wanted: Filter, offset: int, limit: int) -> dict[str, Any]:
    """One page of a list; with the first, how long the list is. And the newest episode there is."""
    overlay = overlay_of(place)
    where, values = wanted.where(overlay)
    with place.catalog().reader() as reader:
        catalog = reader.catalog
        total, num_steps = None, None
        with catalog.transaction(write=False):
            newest = catalog.last_episode_id()
            if offset <= 0:
                total, num_steps = catalog.select(
                    f"select count(*), coalesce(sum(num_steps), 0) from episodes where {where}", values
                )[0]
            rows = catalog.select(
                f"select {', '.join(LISTED)} from episodes where {where} order by {SORTS[wanted.sort]}"
                " limit ? offset ?",
                [*values, max(0, min(limit, MAX_PAGE)), max(offset, 0)],
            )
            cameras = {spec: cameras_of(catalog, spec) for spec in {row[-1] for row in rows}}
        store_id = catalog.store_id
    return {
        "total": total,
        "steps": num_steps,
        "newest": newest,
        "offset": offset,
        "store": store_id[:8],
        "rows": [_row(LISTED, row, overlay, cameras) for row in rows],
    }


def cameras_of(catalog: Catalog, spec: int) -> list[str]:
    """The fields of an observation that are pictures: uint8 [H, W, 1, 3 or 4]."""
    return [
        path
        for path, leaf in catalog.spec(spec).observation.leaves("observation")
        if leaf.dtype == "uint8"
        and not leaf.ragged
        and len(leaf.shape) == 3
        and leaf.fixed_shape[-1] in (1, 3, 4)
        and min(leaf.fixed_shape[:2]) >= 8
    ]


def _row(names: tuple[str, ...], row: Any, overlay: Overlay, cameras: dict[int, list[str]]) -> dict[str, Any]:
    found = dict(zip(names, row, strict=True))
    found["labels"] = json.loads(found["labels"])
    found["deleted"] = found["deleted"] is not None
    found["success"] = None if found["success"] is None else bool(found["success"])
    found["cameras"] = cameras[found.pop("spec")]
    found["pending"] = found["id"] in overlay.deleted or found["id"] in overlay.labels
    found["deleted"] = overlay.deleted.get(found["id"], found["deleted"])
    labels = {**found["labels"], **overlay.labels.get(found["id"], {})}
    found["labels"] = {name: value for name, value in labels.items() if value is not None}
    return found


def one_episode(place: Place, episode: int) -> dict[str, Any]:
    """All that is known of an episode, and its neighbours in time."""
    overlay = overlay_of(place)
    with place.catalog().reader() as reader:
        catalog = reader.catalog
        rows = catalog.select(f"select {', '.join(COLUMNS)} from episodes where id = ? and not purged", (episode,))
        if not rows:
            raise StoreError(f"there is no episode {episode}; it may have been removed by compaction")
        beside = "select {}(id) from episodes where not purged and deleted is null and id {} ?"
        return {
            **_row(COLUMNS, rows[0], overlay, {rows[0][-1]: cameras_of(catalog, rows[0][-1])}),
            "before": catalog.select(beside.format("max", "<"), (episode,))[0][0],
            "after": catalog.select(beside.format("min", ">"), (episode,))[0][0],
            "store": catalog.store_id[:8],
        }


def facets(place: Place) -> dict[str, Any]:
    """What there is to filter by, with counts."""

    def count() -> dict[str, Any]:
        with place.catalog().reader() as reader:
            found: dict[str, Any] = {"store": reader.catalog.store_id[:8]}
            for name in ("task", "kind", "actor", "operator", "split", "state"):
                rows = reader.catalog.select(
                    f"select {name}, count(*) from episodes where not purged and deleted is null"
                    f" group by 1 order by 2 desc limit {MAX_VALUES}"
                )
                found[name] = [[value, number] for value, number in rows]
            found["label"] = reader.catalog.select(
                "select j.key, count(*) from episodes, json_each(labels) j where not purged and deleted is null"
                f" and labels != '{{}}' group by 1 order by 2 desc limit {MAX_VALUES}"
            )
            found["deleted"] = reader.catalog.select(
                "select count(*) from episodes where not purged and deleted is not null"
            )[0][0]
            return found

    return place.kept("facets", count)


# ---- changing


def ask(place: Place, request: Request) -> dict[str, Any]:
    """Leave a request; applied at once if nobody holds the store. Returns whether it waits, and what undoes it."""
    undo = _undo(place, request)
    path = inbox.put(place.store, request)
    place.let_go()  # our own readers would keep the catalog's log from being settled
    with suppress(StoreLockedError):  # whoever holds it applies it with its next commit
        Store.open(place.store, create=False).close()
    if (place.store / INBOX_DIRECTORY / REFUSED_DIRECTORY / path.name).exists():
        raise StoreError("the store refused this; are the episode's rows still there?")
    return {"pending": path.exists(), "undo": undo}


def _undo(place: Place, request: Request) -> list[dict[str, Any]]:
    """The requests that bring back what is there now."""
    overlay = overlay_of(place)
    ids = ",".join(str(episode) for episode in request.episodes)
    with place.catalog().reader() as reader:
        rows = reader.catalog.select(f"select id, deleted, labels from episodes where id in ({ids}) and not purged")
    if len(rows) < len(set(request.episodes)):
        raise StoreError(f"episodes: {len(set(request.episodes)) - len(rows)} of them are not there (any more)")
    if request.action != "label":
        wanted = request.action == "delete"
        changed = [row[0] for row in rows if overlay.deleted.get(row[0], row[1] is not None) is not wanted]
        back = "restore" if wanted else "delete"
        return [{"action": back, "episodes": changed}] if changed else []
    before: dict[str, list[int]] = {}
    for episode, _, labels in rows:
        now = {**json.loads(labels), **overlay.labels.get(episode, {})}
        before.setdefault(json.dumps({name: now.get(name) for name in request.labels}), []).append(episode)
    return [{"action": "label", "episodes": some, "labels": json.loads(said)} for said, some in before.items()]
