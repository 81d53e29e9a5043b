"""Experience over a socket: the server, and the writers, samplers and parameters of its clients."""

from understudy.service.client.outbox import Delivery, OutboxConfig
from understudy.service.client.remote import Remote, connect, read_token
from understudy.service.client.remote_sampler import RemoteSampler
from understudy.service.client.remote_writer import RemoteWriter
from understudy.service.client.sharded_sampler import ShardedSampler
from understudy.service.parameters import Parameters, Subscription
from understudy.service.server.malloc import keep_large_blocks
from understudy.service.server.server import Server, ServerConfig
from understudy.web.access import is_loopback

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
