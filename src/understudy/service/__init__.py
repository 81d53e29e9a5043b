"""Experience over a socket: the server, and the writers, samplers and parameters of its clients.

Names are loaded when they are first used: a robot does not import the server, and a command that reads a spool or
published parameters on the disk needs no gRPC.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from understudy.service.wire import grpc_forks  # noqa: F401 (sets what gRPC reads when it is imported)

if TYPE_CHECKING:
    from understudy.service.client.outbox import Delivery, OutboxConfig
    from understudy.service.client.remote import Remote, connect
    from understudy.service.client.remote_sampler import RemoteSampler
    from understudy.service.client.remote_writer import RemoteWriter
    from understudy.service.client.sharded_sampler import ShardedSampler
    from understudy.service.client.subscription import Subscription
    from understudy.service.server.malloc import keep_large_blocks
    from understudy.service.server.server import Server, ServerConfig
    from understudy.service.wire.parameters import Parameters

_MODULES = {
    "client.outbox": ("Delivery", "OutboxConfig"),
    "client.remote": ("Remote", "connect"),
    "client.remote_sampler": ("RemoteSampler",),
    "client.remote_writer": ("RemoteWriter",),
    "client.sharded_sampler": ("ShardedSampler",),
    "client.subscription": ("Subscription",),
    "server.malloc": ("keep_large_blocks",),
    "server.server": ("Server", "ServerConfig"),
    "wire.parameters": ("Parameters",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Delivery",
    "OutboxConfig",
    "Parameters",
    "Remote",
    "RemoteSampler",
    "RemoteWriter",
    "Server",
    "ServerConfig",
    "ShardedSampler",
    "Subscription",
    "connect",
    "keep_large_blocks",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found
