"""The page's parts need FastAPI, uvicorn and pillow."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("PIL")

from tests.unit.dashboard.stores import copy_of, make_store

from understudy.dashboard.api.targets import Target


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("template") / "store")


@pytest.fixture
def store(template: Path, tmp_path: Path) -> Path:
    """A store of its own, as a copy of one that is made once."""
    return copy_of(template, tmp_path / "store")


@pytest.fixture
def target(store: Path) -> Iterator[Target]:
    made = Target(store, "store")
    yield made
    made.close()
