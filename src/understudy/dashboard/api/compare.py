"""Compare: runs side by side: where configs differ, how curves went, and what each score was measured on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from understudy.dashboard.api.targets import Place

NOT_THERE = "-"


def compare(places: list[Place]) -> dict[str, Any]:
    """All runs among the places."""
    runs = []
    for number, place in enumerate(places):
        if not place.is_run:
            continue
        said = place.config() or {}
        known = place.metrics.follow()
        train = known["curves"].get("train", {"step": [], "update": [], "values": {}})
        runs.append(
            {
                "place": number,
                "name": place.name,
                "path": str(place.path),
                "kind": said.get("kind"),
                "understudy": said.get("understudy"),
                "flat": dict(_flat(said.get("config", {}))),
                "evaluations": [_evaluation(one) for one in known["evaluations"]],
                "train": train,
                "last": {kind: line for kind, line in known["last"].items() if kind == "train"},
            }
        )
    names = list(dict.fromkeys(name for run in runs for name in run["flat"]))
    table = [{"name": name, "values": [run["flat"].get(name, NOT_THERE) for run in runs]} for name in names]
    for row in table:
        row["differs"] = any(value != row["values"][0] for value in row["values"])
    for run in runs:
        del run["flat"]
    return {"runs": runs, "config": table}


def _evaluation(said: Mapping[str, Any]) -> dict[str, Any]:
    names = (
        "step",
        "update",
        "success",
        "low",
        "high",
        "episodes",
        "starts",
        "mean_steps",
        "tasks",
        "fingerprint",
        "protocol",
        "split",
        "meaning",
        "sampling",
        "temperature",
    )
    return {name: said.get(name) for name in names}


def _flat(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """A config as one level of names; lists are values."""
    if isinstance(config, Mapping) and config:
        for name, value in config.items():
            yield from _flat(value, f"{path}.{name}" if path else str(name))
    else:
        yield path, config
