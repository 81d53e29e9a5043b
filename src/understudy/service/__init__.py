"""Experience over a socket: the server, and the writers, samplers and parameters of its clients."""

from understudy.core.access import is_loopback
from understudy.service.memory import keep_large_blocks
from understudy.service.outbox import Delivery, OutboxConfig
from understudy.service.parameters import Parameters, Subscription
from understudy.service.remote import Remote, connect, read_token
from understudy.service.remote_sampler import RemoteSampler
from understudy.service.remote_writer import RemoteWriter
from understudy.service.server import Server, ServerConfig
from understudy.service.shards import ShardedSampler

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
    "is_loopback",
    "keep_large_blocks",
    "read_token",
]
