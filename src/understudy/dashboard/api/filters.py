"""Filters: which episodes to show, as SQL on the catalog; and the edits that are not applied yet."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from understudy.core import StoreError
from understudy.core.step import Source
from understudy.replay.write.edit_requests import EditRequest

NONE = "(none)"  # for a field that is null
SORTS = {
    "newest": "id desc",
    "oldest": "id",
    "longest": "num_steps desc, id desc",
    "shortest": "num_steps, id desc",
    "reward": "total_reward desc, id desc",
    "human": "num_human desc, id desc",
}
VALUES = {  # of the mean over the steps of an episode, as a value model has estimated them: from, up to
    "value below -0.75": (float("-inf"), -0.75),
    "value -0.75 to -0.5": (-0.75, -0.5),
    "value -0.5 to -0.25": (-0.5, -0.25),
    "value above -0.25": (-0.25, float("inf")),
}
_EQUAL = ("task", "kind", "actor", "operator", "split", "state")
_TEXT = ("task", "instruction", "actor", "operator", "group_key", "labels")
_NUMBERS: dict[str, type] = {"since_s": float, "until_s": float, "upto": int}
_CHOICES = {
    "success": ("yes", "no", "unknown"),
    "source": tuple(source.name.lower() for source in Source),
    "deleted": ("no", "only", "all"),
    "sort": tuple(SORTS),
    "value": tuple(VALUES),
}


@dataclass(frozen=True, kw_only=True)
class Overlay:
    """Pending edits: deleted or restored episodes, labels, and outcomes."""

    deleted: Mapping[int, bool] = field(default_factory=dict)
    labels: Mapping[int, Mapping[str, str | None]] = field(default_factory=dict)
    success: Mapping[int, bool | None] = field(default_factory=dict)

    @staticmethod
    def of(requests: Iterable[EditRequest]) -> Overlay:
        deleted: dict[int, bool] = {}
        labels: dict[int, dict[str, str | None]] = {}
        success: dict[int, bool | None] = {}
        for request in requests:
            for episode in request.episodes:
                if request.action == "label":
                    labels.setdefault(episode, {}).update(request.labels)
                elif request.action == "judge":
                    success[episode] = request.success
                else:
                    deleted[episode] = request.action == "delete"
        return Overlay(deleted=deleted, labels=labels, success=success)

    def is_deleted(self) -> str:
        """SQL for whether an episode is deleted, or will be."""
        gone, back = ([str(e) for e, dead in self.deleted.items() if dead is wanted] for wanted in (True, False))
        condition = "deleted is not null"
        if back:
            condition = f"({condition} and id not in ({','.join(back)}))"
        return f"({condition} or id in ({','.join(gone)}))" if gone else condition


@dataclass(frozen=True, kw_only=True)
class Filter:
    """The conditions of a list; by default all episodes that are not deleted, the newest first."""

    task: str = ""
    kind: str = ""
    actor: str = ""
    operator: str = ""
    split: str = ""
    state: str = ""
    success: str = ""
    source: str = ""  # of at least one of its steps
    label: str = ""  # name, or name=value
    value: str = ""  # one of VALUES
    text: str = ""
    since_s: float = 0.0
    until_s: float = 0.0
    deleted: str = "no"
    sort: str = "newest"
    upto: int = 0  # the newest episode to show, so that pages of a list do not shift

    @staticmethod
    def parse(query: Mapping[str, str]) -> Filter:
        """A filter from the parameters of a request; unknown ones are ignored."""
        found: dict[str, Any] = {}
        for item in fields(Filter):
            given = query.get(item.name, "")[:500]
            if given == "":
                continue
            choices = _CHOICES.get(item.name)
            if choices is not None and given not in choices:
                raise StoreError(f"{item.name}: expected one of {', '.join(choices)}, got {given!r}")
            try:
                found[item.name] = _NUMBERS.get(item.name, str)(given)
            except ValueError:
                raise StoreError(f"{item.name}: expected a number, got {given!r}") from None
        return Filter(**found)

    def where(self, overlay: Overlay, mean_values: Mapping[int, float]) -> tuple[str, list[Any]]:
        """The SQL condition and its values; `mean_values` are those of the episodes that have estimates."""
        conditions, values = ["not purged"], list[Any]()

        def add(condition: str, *more: Any) -> None:
            conditions.append(condition)
            values.extend(more)

        for name in _EQUAL:
            wanted = getattr(self, name)
            if wanted == NONE:
                add(f"{name} is null")
            elif wanted:
                add(f"{name} = ?", wanted)
        if self.success:
            add({"yes": "success = 1", "no": "success = 0", "unknown": "success is null"}[self.success])
        if self.source:
            add(f"num_{self.source} > 0")
        if self.label:
            name, equals, value = self.label.partition("=")
            if equals:
                add("exists (select 1 from json_each(labels) j where j.key = ? and j.value = ?)", name, value)
            else:
                add("exists (select 1 from json_each(labels) j where j.key = ?)", name)
        if self.value:
            low, high = VALUES[self.value]
            chosen = [episode for episode, mean in mean_values.items() if low <= mean < high]
            add("id in (select value from json_each(?))", json.dumps(chosen))
        if self.text:
            pattern = "%" + self.text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
            like = " or ".join(f"{name} like ? escape '\\'" for name in _TEXT)
            number = int(self.text) if self.text.isdecimal() and len(self.text) < 18 else -1
            add(f"(id = ? or {like})", number, *[pattern] * len(_TEXT))
        if self.since_s:
            add("begun_at >= ?", self.since_s)
        if self.until_s:
            add("begun_at < ?", self.until_s)
        if self.upto:
            add("id <= ?", self.upto)
        if self.deleted != "all":
            add(overlay.is_deleted() if self.deleted == "only" else f"not ({overlay.is_deleted()})")
        return " and ".join(conditions), values
