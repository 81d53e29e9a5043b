"""The trainer of agentlace over the delivery service: its config and the learner's side.

    server = TrainerServer(make_trainer_config(), request_callback=stats_callback)      # in the learner
    server.register_data_store("actor_env", replay_buffer)
    server.start(threaded=True)
    server.publish_network(params)

| loop | takes from | blocks on | woken by |
|---|---|---|---|
| the threads of each Server | the actors | see service/server/server.py | - |
| retention thread | the buffers | RETIRE_EVERY_S | `stop` |

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

from understudy.compat.agentlace.message_pieces import PieceServer
from understudy.compat.agentlace.weights import pack_weights
from understudy.compat.arrays import to_numpy
from understudy.compat.hil_serl import MemoryEfficientReplayBuffer
from understudy.compat.options import accept_options
from understudy.core import RefusedError, SpecError, StepSpec, StoreError
from understudy.core.spec import describe
from understudy.core.tree import Tree
from understudy.service import Remote, Server, ServerConfig, connect
from understudy.web.tokens import read_token

logger = logging.getLogger(__name__)

STORES = "understudy/stores"  # the request with which a client gets the port and the spec of each data store
INTERVENED = "_intvn"  # the end of the name of a data store that gets a second copy of the steps of a human
RETIRE_EVERY_S = 1.0
STOP_GRACE_S = 0.2
START_TIMEOUT_S = 10.0

RequestCallback: TypeAlias = Callable[[str, Any], Any]

LOGGING = "nothing is printed; choose a level with logging.getLogger('understudy').setLevel"
_CONFIG_OPTIONS = ("port_number", "broadcast_port", "request_types")
_CONFIG_NO_EFFECT = {
    "rate_limit": "requests are answered as fast as they arrive",
    "version": "client and server compare the version of the protocol themselves",
    "experimental_pipeline_port": "transitions are always sent ahead of their acknowledgements",
}
_SERVER_OPTIONS = ("config", "request_callback", "host", "token", "token_file")
_SERVER_NO_EFFECT = {
    "log_level": LOGGING,
    "data_callback": "transitions go to the buffer's disk, and not through this process; follow the buffer's path with "
    "understudy.replay.Reader",
}


@dataclass(frozen=True, init=False)
class TrainerConfig:
    """Where a server listens: the first data store at `port_number`, the second at `broadcast_port`, others after it.

    Each port receives transitions. The first port also sends weights and answers requests.
    """

    port_number: int  # 0: any free port
    broadcast_port: int
    request_types: tuple[str, ...]

    def __init__(
        self, port_number: int = 5555, broadcast_port: int = 5556, request_types: Iterable[str] = (), **others: Any
    ):
        accept_options("TrainerConfig", others, _CONFIG_NO_EFFECT, _CONFIG_OPTIONS)
        if port_number == broadcast_port != 0:
            raise StoreError(f"broadcast_port: expected another than port_number, got {broadcast_port} for both")
        object.__setattr__(self, "port_number", port_number)
        object.__setattr__(self, "broadcast_port", broadcast_port)
        object.__setattr__(self, "request_types", tuple(request_types))

    @staticmethod
    def parse(config: Any) -> TrainerConfig:
        """Accept agentlace's own class too; options of it that have no effect here are logged."""
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
        """The port of the data store that was registered as number `index`."""
        if index == 0 or self.port_number == 0:
            return self.port_number
        return self.broadcast_port + index - 1


def make_trainer_config(port_number: int = 5588, broadcast_port: int = 5589) -> TrainerConfig:
    """The config of HIL-SERL's scripts."""
    return TrainerConfig(port_number=port_number, broadcast_port=broadcast_port, request_types=["send-stats"])


# ---- the learner's side


class TrainerServer:
    """Serves the registered buffers from `start` to `stop`; the buffers stay open.

    It accepts connections from this machine only. With another `host`, such as "0.0.0.0", it needs a token.
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
        if data_callback is not None:
            others["data_callback"] = data_callback
        accept_options("TrainerServer", others, _SERVER_NO_EFFECT, _SERVER_OPTIONS)
        self.config = TrainerConfig.parse(config)
        self._request_callback = request_callback
        self._host = host
        self._token = token if token_file is None else read_token(Path(token_file))
        ServerConfig(host=host, token=self._token)  # raises now, not at `start`
        self._callback_lock = threading.Lock()  # the callback gets one request at a time
        self._buffers: dict[str, MemoryEfficientReplayBuffer] = {}
        self._servers: dict[str, Server] = {}
        self._stores: dict[str, dict[str, Any]] = {}  # by name: port, spec and capacity, for clients
        self._pieces = PieceServer()
        self._remote: Remote | None = None
        self._started = threading.Event()
        self._stopped = threading.Event()
        self._retention = threading.Thread(target=self._retire_old_steps, name="keeper", daemon=True)

    def register_data_store(self, name: str, data_store: MemoryEfficientReplayBuffer) -> None:
        """Register a buffer that actors write to. Call this before `start`, always in the same order."""
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
        """The address of the first data store; empty before `start`."""
        return next((server.address for server in self._servers.values()), "")

    def start(self, threaded: bool = False) -> None:
        """Open the ports. With `threaded` this returns when all are open, otherwise when `stop` was called."""
        if not self._buffers:
            raise StoreError("TrainerServer: there is no data store; call register_data_store first")
        if self._servers or self._stopped.is_set():
            raise StoreError("TrainerServer: it was started before; make a new one")
        for name, buffer in self._buffers.items():
            base = self._human_steps_of(name)
            if base is not None:
                buffer.include_human_steps(self._buffers[base])
        try:
            for index, (name, buffer) in reversed([*enumerate(self._buffers.items())]):
                # The first port opens last: a client that learns the other ports from it can connect to them.
                self._serve(name, buffer, self.config.port(index), on_request=self._answer if index == 0 else None)
        except BaseException:
            self.stop()
            raise
        self._servers = {name: self._servers[name] for name in self._buffers}
        self._stores = {name: self._describe(name) for name in self._buffers}
        self._remote = connect(_local(self.address), token=self._token)
        self._started.set()
        self._retention.start()
        if not threaded:
            self._stopped.wait()

    def _serve(
        self, name: str, buffer: MemoryEfficientReplayBuffer, port: int, on_request: RequestCallback | None
    ) -> None:
        store = buffer.begin_serving(self.stop)
        try:
            config = ServerConfig(host=self._host, port=port, token=self._token)
            accept = partial(self._check_writer, name)
            self._servers[name] = Server(store, config, on_request=on_request, accept_writer=accept).start()
        except BaseException:
            buffer.end_serving()
            raise

    def _check_writer(self, name: str, writer: str, spec: StepSpec) -> None:
        """Refuse steps of another data store or spec: this buffer would never sample them."""
        meant = writer.partition("/")[0]
        if meant != name and meant in self._buffers:
            raise RefusedError(
                f"data store {meant!r}: this port now serves {name!r}; register the data stores in the same order as "
                f"before, or start the actor again"
            )
        if spec != self._buffers[name].spec:
            raise SpecError(
                f"data store {name!r}: the actor sends steps of another spec than the buffer's; start the actor again, "
                f"or the learner with the spaces and the path that it had"
            )

    def _describe(self, name: str) -> dict[str, Any]:
        buffer, server = self._buffers[name], self._servers[name]
        port = int(server.address.rpartition(":")[2])
        described = {"port": port, "spec": buffer.spec.to_json(), "capacity": buffer.capacity}
        return {**described, "human_steps_of": self._human_steps_of(name)}

    def _human_steps_of(self, name: str) -> str | None:
        """The data store whose human steps this one shows, by their names: actor_env for actor_env_intvn."""
        base = name.removesuffix(INTERVENED)
        if base == name or base not in self._buffers or self._buffers[base].spec != self._buffers[name].spec:
            return None
        return base

    def publish_network(self, params: Tree) -> int:
        """Publish new weights to all actors, present and future; returns their version when it is on disk."""
        if self._remote is None:
            raise StoreError("publish_network: the server does not run; call start(threaded=True) first")
        tree, metadata = pack_weights(params)
        return self._remote.publish(tree, metadata=metadata)

    def stop(self) -> None:
        """Close the ports. Acknowledged steps are in the buffers; actors keep the others until a server is back."""
        self._stopped.set()
        if self._retention.is_alive() and self._retention is not threading.current_thread():
            self._retention.join()
        if self._remote is not None:
            self._remote.close()
            self._remote = None
        while self._servers:
            name, server = self._servers.popitem()
            server.stop(STOP_GRACE_S)
            self._buffers[name].end_serving()

    def _answer(self, kind: str, payload: Any) -> Any:
        return self._pieces.answer(kind, payload, self._answer_whole)

    def _answer_whole(self, kind: str, payload: Any) -> Any:
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
        with self._callback_lock:
            return to_json_value(self._request_callback(kind, payload), "answer")

    def _retire_old_steps(self) -> None:
        """Keep each buffer at its capacity, even if the learner does not sample."""
        while not self._stopped.wait(RETIRE_EVERY_S):
            for name, buffer in self._buffers.items():
                try:
                    buffer.retire()
                except Exception:  # the outermost loop of this thread; the store itself refuses what it cannot do
                    logger.exception("data store %r: the space of old steps could not be freed; trying again", name)


def _local(address: str) -> str:
    """The address at which this process reaches its own server."""
    host, _, port = address.rpartition(":")
    here = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
    return f"{here.get(host, host)}:{port}"


def to_json_value(value: Any, path: str) -> Any:
    """The value with JSON's types: arrays become lists of Python numbers."""
    if isinstance(value, Mapping):
        return {str(name): to_json_value(child, f"{path}/{name}") for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(child, f"{path}/{index}") for index, child in enumerate(value)]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    found = np.asarray(to_numpy(value, path))
    if found.dtype.kind not in "bifuU":
        raise StoreError(f"{path}: expected numbers, text, and lists and dicts of them, got {describe(value)}")
    return found.tolist()
