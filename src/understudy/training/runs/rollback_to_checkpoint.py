"""Rollback: before a run resumes, the episodes that it recorded after its last checkpoint are soft-deleted.

The resumed run then runs these episodes again. `Store.restore` brings the deleted ones back.
"""

from __future__ import annotations

from pathlib import Path

from understudy.replay import Store
from understudy.training.runs.run import RunError


def rollback(store: Store, path: Path, commit: int, actor: str) -> list[str]:
    """Soft-delete the episodes that `actor` began after a commit; returns a sentence for the user if there were any."""
    if store.last_commit < commit:
        raise RunError(
            f"{path}: has {store.last_commit} commits, and the checkpoint was taken at commit {commit}; "
            f"restore the store, or start a new run"
        )
    with store.snapshot() as catalog:
        records = [r for r in catalog.episodes("deleted is null and begun > ?", (commit,)) if r.info.actor == actor]
    if not records:
        return []
    store.delete([record.id for record in records])
    steps = sum(record.num_steps for record in records)
    return [f"rolled back {len(records)} episodes ({steps} steps) that were recorded after the checkpoint"]
