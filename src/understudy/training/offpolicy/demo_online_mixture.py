"""The demo/online mixture of RLPD: a Mixture of demonstrations and online experience, in exact shares of each batch.

Both are views (DEMO, ONLINE) of a store on this machine, or of several shards; demonstrations may be in a store of
their own. While one of the two has no steps, the other gives all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from understudy.core import StepSpec
from understudy.core.resize import ResizeOption
from understudy.replay import DEMO, ONLINE, Mixture, Sampler, View
from understudy.replay.sample.batch_source import Batch, BatchShape, ViewSampler

if TYPE_CHECKING:
    from understudy.service.client.remote import Remote


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Where experience is stored, if not in one store on this machine."""

    remote: Remote
    local: Mapping[str, Path] = field(default_factory=dict)  # shards whose directory is on this machine, too
    own: Path | None = None  # a store on this machine that nobody writes to: demonstrations, and earlier experience
    lost: frozenset[str] = frozenset()  # earlier shards that are gone for good


def open_demo_online_mixture(
    *,
    store: Path | Shards,
    demos: Path | None,
    spec: StepSpec,
    batch_size: int,
    demo_weight: int,
    online_weight: int,
    seed: int,
    shape: BatchShape[Batch],
    resize: ResizeOption | None = None,
    on_wait: Callable[[str], None] | None = None,
) -> Mixture[Batch]:
    """Experience is in `store`, demonstrations in `demos`, or in `store` too. While the steps of a view are only on
    shards that do not answer, the mixture waits for these and calls `on_wait` again and again."""
    seeds = np.random.SeedSequence([seed, 2]).generate_state(2, np.uint64).tolist()
    samplers: dict[str, ViewSampler[Batch]] = {}
    with ExitStack() as undo:
        for view, where, view_seed in zip((DEMO, ONLINE), (demos or store, store), seeds, strict=True):
            options: dict[str, Any] = {"batch_size": batch_size, "seed": view_seed, "shape": shape, "spec": spec}
            options["resize"] = resize
            if isinstance(where, Path):
                samplers[view.name] = Sampler(where, view, **options)
            else:
                samplers[view.name] = _open_sharded(where, view, on_wait or (lambda text: None), options)
            undo.callback(samplers[view.name].close)
        weights = {DEMO.name: demo_weight, ONLINE.name: online_weight}
        mixture = Mixture(samplers, weights, batch_size=batch_size)
        undo.pop_all()
    return mixture


def _open_sharded(
    shards: Shards, view: View, on_wait: Callable[[str], None], options: Mapping[str, Any]
) -> ViewSampler[Batch]:
    from understudy.service.client.sharded_sampler import OWN, ShardedSampler  # only now: it needs gRPC

    stores: dict[str, Path | None] = {name: shards.local.get(name) for name in shards.remote.names}
    if shards.own is not None:  # the first draws what a run in one process draws
        stores = {OWN: shards.own, **stores} if view is DEMO else {**stores, OWN: shards.own}
    return ShardedSampler(shards.remote, view, stores=stores, lost=shards.lost, on_wait=on_wait, **options)
