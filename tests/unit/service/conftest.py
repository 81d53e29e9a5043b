"""A real server on a real socket, and clients of it; all closed at the end of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from understudy.replay import Store
from understudy.service import Remote, Server, ServerConfig, connect


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def serve(tmp_path: Path, cleanup: ExitStack) -> Callable[..., Server]:
    """Opens a store below tmp_path and serves it at any free port; options are those of ServerConfig."""

    def start(name: str = "store", **options: Any) -> Server:
        store = cleanup.enter_context(Store.open(tmp_path / name))
        server = Server(store, ServerConfig(**{"port": 0, **options}))
        cleanup.callback(server.stop, 0.0)
        return server.start()

    return start


@pytest.fixture
def remote_to(cleanup: ExitStack) -> Callable[..., Remote]:
    """Connects to a server, or an address; options are those of `connect`."""

    def to(where: Server | str, **options: Any) -> Remote:
        return cleanup.enter_context(connect(where if isinstance(where, str) else where.address, **options))

    return to


@pytest.fixture
def store(tmp_path: Path, cleanup: ExitStack) -> Store:
    return cleanup.enter_context(Store.open(tmp_path / "store"))


@pytest.fixture
def server(store: Store, cleanup: ExitStack) -> Server:
    """Serves `store`."""
    return cleanup.enter_context(Server(store, ServerConfig(port=0)))


@pytest.fixture
def remote(server: Server, cleanup: ExitStack) -> Remote:
    """A client of `server`."""
    return cleanup.enter_context(connect(server.address))
