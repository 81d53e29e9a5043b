"""Setting aside: what a run lived after its checkpoint is deleted softly before it goes on, and lived again."""

from __future__ import annotations

from pathlib import Path

from understudy.replay import Store
from understudy.training.runs.run import RunError


def set_aside(store: Store, path: Path, commit: int, actor: str) -> list[str]:
    """Delete, softly, what `actor` began after a commit; says so. `Store.restore` brings it back."""
    if store.last_commit < commit:
        raise RunError(
            f"{path}: has {store.last_commit} commits, and the checkpoint counts on {commit}; "
            f"restore the store, or begin a new run"
        )
    with store.snapshot() as catalog:
        records = [r for r in catalog.episodes("deleted is null and begun > ?", (commit,)) if r.info.actor == actor]
    if not records:
        return []
    store.delete([record.id for record in records])
    steps = sum(record.num_steps for record in records)
    return [f"set aside {len(records)} episodes ({steps} steps) that were lived after the checkpoint"]
