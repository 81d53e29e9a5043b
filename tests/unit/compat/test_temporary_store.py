"""A temporary store is removed by a call, or with its owner."""

from __future__ import annotations

import gc

from understudy.compat.temporary_store import temporary_store_path


class Owner:
    pass


def test_it_is_removed_by_the_call() -> None:
    owner = Owner()
    path, remove = temporary_store_path(owner)
    assert path.parent.is_dir()
    assert not path.exists()
    remove()
    assert not path.parent.exists()


def test_it_is_removed_with_its_owner() -> None:
    owner = Owner()
    path, _ = temporary_store_path(owner)
    del owner
    gc.collect()
    assert not path.parent.exists()
