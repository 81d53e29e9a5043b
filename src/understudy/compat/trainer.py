"""The trainer of agentlace, over the delivery service: where it listens, and the learner's side of it.

    server = TrainerServer(make_trainer_config(), request_callback=stats_callback)      # in the learner
    server.register_data_store("actor_env", replay_buffer)
    server.start(threaded=True)
    server.publish_network(params)

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| the threads of each Server | the actors | see service/server/server.py | - |
| the server's keeper | the buffers | a second | `stop` |

The actor's side is in trainer_client.py.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from understudy.compat.arrays import to_numpy, tree_to_numpy
from understudy.compat.hil_serl import MemoryEfficientReplayBuffer
from understudy.compat.options import refuse
from understudy.core import RefusedError, SpecError, StepSpec, StoreError
from understudy.core.spec import describe
from understudy.core.tree import Tree
from understudy.service import Remote, Server, ServerConfig, connect
from understudy.web.tokens import read_token

logger = logging.getLogger(__name__)

STORES = "understudy/stores"  # the request that tells a client where to write, and what
KEEP_EVERY_S = 1.0
STOP_GRACE_S = 0.2
START_TIMEOUT_S = 10.0

RequestCallback: TypeAlias = Callable[[str, Any], Any]

LOGGING = "nothing is printed here; choose a level with logging.getLogger('understudy').setLevel"
_CONFIG_OPTIONS = ("port_number", "broadcast_port", "request_types")
_CONFIG_THEIRS = {
    "rate_limit": "requests are answered as fast as they come; leave it out, and ask less often",
    "version": "both sides compare the version of the protocol by themselves; leave it out",
    "experimental_pipeline_port": "transitions are always sent ahead of their acknowledgements; leave it out",
}
_SERVER_OPTIONS = ("config", "request_callback", "host", "token", "token_file")
_SERVER_THEIRS = {"log_level": LOGGING}


@dataclass(frozen=True, init=False)
class TrainerConfig:
    """Where a server listens: the first data store at `port_number`, the second at `broadcast_port`, more behind it.

    A port carries transitions one way and weights the other; those and the requests are the first one's.
    """

    port_number: int  # 0: any that is free
    broadcast_port: int
    request_types: tuple[str, ...]

    def __init__(
        self, port_number: int = 5555, broadcast_port: int = 5556, request_types: Iterable[str] = (), **others: Any
    ):
        refuse("TrainerConfig", others, _CONFIG_THEIRS, _CONFIG_OPTIONS)
        if port_number == broadcast_port != 0:
            raise StoreError(f"broadcast_port: expected another than port_number, got {broadcast_port} for both")
        object.__setattr__(self, "port_number", port_number)
        object.__setattr__(self, "broadcast_port", broadcast_port)
        object.__setattr__(self, "request_types", tuple(request_types))

    @staticmethod
    def of(config: Any) -> TrainerConfig:
        """The same, from agentlace's own class; what is set there and would change nothing here is refused."""
        if isinstance(config, TrainerConfig):
            return config
        if not all(hasattr(config, name) for name in _CONFIG_OPTIONS):
            raise StoreError(f"config: expected a TrainerConfig, got {describe(config)}; make one")
        others = {name: getattr(config, name, None) for name in ("rate_limit", "experimental_pipeline_port")}
        return TrainerConfig(
            config.port_number,
            config.broadcast_port,
            config.request_types,
            **{name: value for name, value in others.items() if value is not None},
        )

    def port(self, index: int) -> int:
        """Of the data store that was registered as number `index`."""
        if index == 0 or self.port_number == 0:
            return self.port_number
        return self.broadcast_port + index - 1


def make_trainer_config(port_number: int = 5588, broadcast_port: int = 5589) -> TrainerConfig:
    """The config of HIL-SERL's scripts."""
    return TrainerConfig(port_number=port_number, broadcast_port=broadcast_port, request_types=["send-stats"])


# ---- the learner's side


class TrainerServer:
    """Serves the buffers that are registered, from `start` to `stop`; the buffers stay open.

    It listens on this machine alone, unless `host` says otherwise ("0.0.0.0": from everywhere); then a token is needed.
    """

    def __init__(
        self,
        config: Any,
        data_callback: Any = None,
        request_callback: RequestCallback | None = None,
        *,
        host: str = "127.0.0.1",
        token: str | None = None,
        token_file: str | Path | None = None,
        **others: Any,
    ):
        refuse("TrainerServer", others, _SERVER_THEIRS, _SERVER_OPTIONS)
        if data_callback is not None:
            raise StoreError(
                "TrainerServer: data_callback: transitions go to the buffer's disk, not through this process; leave it "
                "out, and follow the buffer's path with understudy.replay.Reader"
            )
        self.config = TrainerConfig.of(config)
        self._request_callback = request_callback
        self._host = host
        self._token = token if token_file is None else read_token(Path(token_file))
        ServerConfig(host=host, token=self._token)  # complain now, not at `start`
        self._answering = threading.Lock()  # a callback sees one request at a time
        self._buffers: dict[str, MemoryEfficientReplayBuffer] = {}
        self._servers: dict[str, Server] = {}
        self._stores: dict[str, dict[str, Any]] = {}  # what a client is told of each
        self._remote: Remote | None = None
        self._started = threading.Event()
        self._stopped = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="keeper", daemon=True)

    def register_data_store(self, name: str, data_store: MemoryEfficientReplayBuffer) -> None:
        """Name a buffer that actors write to; before `start`, and always in the same order."""
        if not isinstance(data_store, MemoryEfficientReplayBuffer):
            raise StoreError(
                f"data store {name!r}: expected a MemoryEfficientReplayBufferDataStore, got {describe(data_store)}"
            )
        if self._servers:
            raise StoreError(f"data store {name!r}: the server runs already; register it before start()")
        if name in self._buffers:
            raise StoreError(f"data store {name!r}: there is one already; choose another name")
        self._buffers[name] = data_store

    def store_names(self) -> set[str]:
        return set(self._buffers)

    def data_store(self, name: str) -> MemoryEfficientReplayBuffer | None:
        return self._buffers.get(name)

    @property
    def address(self) -> str:
        """Of the first data store; empty before `start`."""
        return next((server.address for server in self._servers.values()), "")

    def start(self, threaded: bool = False) -> None:
        """Listen. With `threaded` it returns when all ports are open, without it when `stop` was called."""
        if not self._buffers:
            raise StoreError("TrainerServer: there is no data store; call register_data_store first")
        if self._servers or self._stopped.is_set():
            raise StoreError("TrainerServer: it was started before; make a new one")
        try:
            for index, (name, buffer) in reversed([*enumerate(self._buffers.items())]):
                # The first comes last: whoever is told where the others are finds them there.
                self._serve(name, buffer, self.config.port(index), answer=self._answer if index == 0 else None)
        except BaseException:
            self.stop()
            raise
        self._servers = {name: self._servers[name] for name in self._buffers}
        self._stores = {name: self._describe(name) for name in self._buffers}
        self._remote = connect(_local(self.address), token=self._token)
        self._started.set()
        self._keeper.start()
        if not threaded:
            self._stopped.wait()

    def _serve(self, name: str, buffer: MemoryEfficientReplayBuffer, port: int, answer: RequestCallback | None) -> None:
        store = buffer.begin_serving(self.stop)
        try:
            config = ServerConfig(host=self._host, port=port, token=self._token)
            accept = partial(self._check_writer, name)
            self._servers[name] = Server(store, config, on_request=answer, accept_writer=accept).start()
        except BaseException:
            buffer.end_serving()
            raise

    def _check_writer(self, name: str, writer: str, spec: StepSpec) -> None:
        """Refuse steps that belong to another data store: they would lie where no batch finds them."""
        meant = writer.partition("/")[0]
        if meant != name and meant in self._buffers:
            raise RefusedError(
                f"data store {meant!r}: this port is that of {name!r} now; register the data stores in the order that "
                f"they had, or start the actor again"
            )
        if spec != self._buffers[name].spec:
            raise SpecError(
                f"data store {name!r}: the actor sends steps of another spec than the buffer's; start the actor again, "
                f"or the learner with the spaces and the path that it had"
            )

    def _describe(self, name: str) -> dict[str, Any]:
        buffer, server = self._buffers[name], self._servers[name]
        port = int(server.address.rpartition(":")[2])
        return {"port": port, "spec": buffer.spec.to_json(), "capacity": buffer.capacity}

    def publish_network(self, params: Tree) -> int:
        """Give all actors new weights, those that come later too; returns their version when it is on disk."""
        if self._remote is None:
            raise StoreError("publish_network: the server does not run; call start(threaded=True) first")
        return self._remote.publish(tree_to_numpy(params, "params"))

    def stop(self) -> None:
        """Close the ports; what was acknowledged is in the buffers, and actors keep the rest until a server is back."""
        self._stopped.set()
        if self._keeper.is_alive() and self._keeper is not threading.current_thread():
            self._keeper.join()
        if self._remote is not None:
            self._remote.close()
            self._remote = None
        while self._servers:
            name, server = self._servers.popitem()
            server.stop(STOP_GRACE_S)
            self._buffers[name].end_serving()

    def _answer(self, kind: str, payload: Any) -> Any:
        if kind == STORES:
            self._started.wait(START_TIMEOUT_S)
            return self._stores
        if kind not in self.config.request_types:
            known = ", ".join(self.config.request_types) or "none"
            raise RefusedError(
                f"request {kind!r}: the server answers {known}; add it to TrainerConfig(request_types=[...])"
            )
        if self._request_callback is None:
            raise RefusedError(f"request {kind!r}: pass request_callback= to the TrainerServer, which has none")
        with self._answering:
            return plain(self._request_callback(kind, payload), "answer")

    def _keep(self) -> None:
        """Keep each buffer to its capacity, whether the learner looks at it or not."""
        while not self._stopped.wait(KEEP_EVERY_S):
            for name, buffer in self._buffers.items():
                try:
                    buffer.retire()
                except Exception:  # the outermost loop of this thread; the store itself refuses what it cannot do
                    logger.exception("data store %r: old steps could not be given back; trying again", name)


def _local(address: str) -> str:
    """Where this process reaches a server that it runs itself."""
    host, _, port = address.rpartition(":")
    here = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
    return f"{here.get(host, host)}:{port}"


def plain(value: Any, path: str) -> Any:
    """The value as JSON has it: arrays become lists, and their numbers Python's."""
    if isinstance(value, Mapping):
        return {str(name): plain(child, f"{path}/{name}") for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [plain(child, f"{path}/{index}") for index, child in enumerate(value)]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    found = np.asarray(to_numpy(value, path))
    if found.dtype.kind not in "bifuU":
        raise StoreError(f"{path}: expected numbers, text, and lists and dicts of them, got {describe(value)}")
    return found.tolist()
