"""Compare runs: where their configs differ, their curves, and what each score was measured on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from understudy.dashboard.api.store_stats import training_course
from understudy.dashboard.api.targets import Target
from understudy.training.runs.run import ON_POLICY

MISSING = "-"


def compare(targets: list[Target]) -> dict[str, Any]:
    """All runs among the targets."""
    runs = []
    for number, target in enumerate(targets):
        if not target.is_run:
            continue
        config = target.config() or {}
        metrics = target.metrics.follow()
        train = metrics["curves"].get("train", {"step": [], "update": [], "values": {}})
        runs.append(
            {
                "target": number,
                "name": target.name,
                "path": str(target.path),
                "kind": config.get("kind"),
                "understudy": config.get("understudy"),
                "flat": dict(_flat(config.get("config", {}))),
                "evaluations": [_evaluation(one) for one in metrics["evaluations"]],
                "train": train,
                "course": training_course(target) if target.has_store and config.get("kind") not in ON_POLICY else [],
                "last": {kind: line for kind, line in metrics["last"].items() if kind == "train"},
            }
        )
    names = list(dict.fromkeys(name for run in runs for name in run["flat"]))
    table = [{"name": name, "values": [run["flat"].get(name, MISSING) for run in runs]} for name in names]
    for row in table:
        row["differs"] = any(value != row["values"][0] for value in row["values"])
    for run in runs:
        del run["flat"]
    return {"runs": runs, "config": table}


def _evaluation(line: Mapping[str, Any]) -> dict[str, Any]:
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
    return {name: line.get(name) for name in names}


def _flat(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """A config as pairs of dotted name and value; lists are values."""
    if isinstance(config, Mapping) and config:
        for name, value in config.items():
            yield from _flat(value, f"{path}.{name}" if path else str(name))
    else:
        yield path, config
