"""Episode queries: pages of a filtered list, the values to filter by, one episode in full; and edits of episodes."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

from understudy.core import StoreError, StoreLockedError
from understudy.dashboard.api.episode_estimates import mean_values
from understudy.dashboard.api.filters import SORTS, VALUES, Filter, Overlay
from understudy.dashboard.api.targets import Target
from understudy.replay import Store
from understudy.replay.format.catalog import Catalog
from understudy.replay.format.paths import INBOX_DIRECTORY, REFUSED_DIRECTORY
from understudy.replay.write import edit_requests
from understudy.replay.write.edit_requests import EditRequest

# Labels that the software writes and reads again. People cannot change them here, because they would break what
# depends on them: an import that adds nothing the second time, the counts of interventions, the tickets of a run.
RECORDED_LABELS = re.compile(
    r"(origin|origin_digest|fps|robot_type|names|(intervention|takeover)_.*|ticket|iteration|policy_seed|clipped_steps"
    r"|trajectory|complete|cut|measured_fps|sensors|late_steps|steps_missing_before|salvaged_.*|(trimmed|split|merged)_from)"
)
MAX_PAGE = 300
MAX_VALUES = 100  # of a field, to filter by
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


def pending_edits(target: Target) -> Overlay:
    """The edits that are not applied yet."""
    return Overlay.of(edit_requests.pending_edits(target.store))


def list_episodes(target: Target, wanted: Filter, offset: int, limit: int) -> dict[str, Any]:
    """One page of a list, and the newest episode of the store; the first page also has the length of the list."""
    overlay = pending_edits(target)
    where, values = wanted.where(overlay, mean_values(target) if wanted.value else {})
    with target.catalog().reader() as reader:
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
    """The fields of an observation that are images: uint8 [H, W, C] with C = 1, 3 or 4."""
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
    found["success"] = overlay.success.get(found["id"], found["success"])
    found["pending"] = any(found["id"] in edits for edits in (overlay.deleted, overlay.labels, overlay.success))
    found["deleted"] = overlay.deleted.get(found["id"], found["deleted"])
    labels = {**found["labels"], **overlay.labels.get(found["id"], {})}
    present = {name: value for name, value in labels.items() if value is not None}
    found["labels"] = {name: value for name, value in present.items() if not RECORDED_LABELS.fullmatch(name)}
    found["recorded_labels"] = {name: value for name, value in present.items() if name not in found["labels"]}
    return found


def one_episode(target: Target, episode: int) -> dict[str, Any]:
    """All attributes of an episode, and the ids of the episodes before and after it."""
    overlay = pending_edits(target)
    with target.catalog().reader() as reader:
        catalog = reader.catalog
        rows = catalog.select(f"select {', '.join(COLUMNS)} from episodes where id = ? and not purged", (episode,))
        if not rows:
            raise StoreError(f"episode {episode} does not exist; compaction may have removed it")
        beside = "select {}(id) from episodes where not purged and deleted is null and id {} ?"
        return {
            **_row(COLUMNS, rows[0], overlay, {rows[0][-1]: cameras_of(catalog, rows[0][-1])}),
            "before": catalog.select(beside.format("max", "<"), (episode,))[0][0],
            "after": catalog.select(beside.format("min", ">"), (episode,))[0][0],
            "store": catalog.store_id[:8],
        }


def facets(target: Target) -> dict[str, Any]:
    """The values to filter by, with the number of their episodes."""

    def count() -> dict[str, Any]:
        with target.catalog().reader() as reader:
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

    return {**target.cached("facets", count), "value": _values(target)}


def _values(target: Target) -> list[list[Any]]:
    """The ranges of mean values that episodes have, with their number; none if their file is damaged."""
    try:
        means = mean_values(target)
    except StoreError:
        return []
    found = []
    with target.catalog().reader() as reader:
        for name in VALUES if means else ():
            where, values = Filter(value=name).where(Overlay(), means)
            found.append([name, reader.catalog.select(f"select count(*) from episodes where {where}", values)[0][0]])
    return [[name, number] for name, number in found if number]


# ---- edits


def edit_episodes(target: Target, request: EditRequest) -> dict[str, Any]:
    """Request an edit; applied at once if no process holds the store. Returns whether it is pending, and its undo."""
    for name in request.labels:
        if RECORDED_LABELS.fullmatch(name):
            raise StoreError(f"labels: {name!r} is written and read again by Understudy itself; choose another name")
    undo = _undo(target, request)
    path = edit_requests.submit_edit(target.store, request)
    target.close_readers()  # an open reader would keep SQLite from merging the catalog's log
    with suppress(StoreLockedError):  # the process that holds it applies the edit with its next commit
        Store.open(target.store, create=False).close()
    if (target.store / INBOX_DIRECTORY / REFUSED_DIRECTORY / path.name).exists():
        raise StoreError("the store refused this edit; check that its episodes still exist")
    return {"pending": path.exists(), "undo": undo}


def _undo(target: Target, request: EditRequest) -> list[dict[str, Any]]:
    """The requests that restore the present state."""
    overlay = pending_edits(target)
    ids = ",".join(str(episode) for episode in request.episodes)
    with target.catalog().reader() as reader:
        rows = reader.catalog.select(
            f"select id, deleted, labels, success from episodes where id in ({ids}) and not purged"
        )
    if len(rows) < len(set(request.episodes)):
        raise StoreError(f"episodes: {len(set(request.episodes)) - len(rows)} of them do not exist (any more)")
    if request.action == "judge":
        judged: dict[bool | None, list[int]] = {}
        for episode, _, _, success in rows:
            now = overlay.success.get(episode, None if success is None else bool(success))
            judged.setdefault(now, []).append(episode)
        return [
            {"action": "judge", "episodes": some, "success": now}
            for now, some in judged.items()
            if now is not request.success
        ]
    if request.action != "label":
        wanted = request.action == "delete"
        changed = [row[0] for row in rows if overlay.deleted.get(row[0], row[1] is not None) is not wanted]
        back = "restore" if wanted else "delete"
        return [{"action": back, "episodes": changed}] if changed else []
    before: dict[str, list[int]] = {}
    for episode, _, labels, _ in rows:
        present = {**json.loads(labels), **overlay.labels.get(episode, {})}
        before.setdefault(json.dumps({name: present.get(name) for name in request.labels}), []).append(episode)
    return [{"action": "label", "episodes": some, "labels": json.loads(labels)} for labels, some in before.items()]
