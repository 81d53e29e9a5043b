"""Experience over a socket: the server, and the writers, samplers and parameters of its clients.

The server's names are loaded when they are first used, so that a robot does not import them.
"""

from typing import TYPE_CHECKING, Any

from understudy.service.wire import grpc_forks  # noqa: F401 (sets what gRPC reads when it is imported)

# isort: split
from understudy.service.client.outbox import Delivery, OutboxConfig
from understudy.service.client.remote import Remote, connect
from understudy.service.client.remote_sampler import RemoteSampler
from understudy.service.client.remote_writer import RemoteWriter
from understudy.service.client.sharded_sampler import ShardedSampler
from understudy.service.client.subscription import Subscription
from understudy.service.wire.parameters import Parameters

if TYPE_CHECKING:
    from understudy.service.server.malloc import keep_large_blocks
    from understudy.service.server.server import Server, ServerConfig

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
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from understudy.service.server import malloc, server

    return malloc.keep_large_blocks if name == "keep_large_blocks" else getattr(server, name)
