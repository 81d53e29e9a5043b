"""The algorithm of an RLPD run: SAC, or DSRL where the actor chooses the noise of a base policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from understudy.algorithms import DSRL, SAC
from understudy.core import SequenceBatch, StepSpec, TransitionBatch, Tree
from understudy.core import tree as trees
from understudy.policies import Stats
from understudy.processes.stop import StopRequest
from understudy.replay import DEMO, Mixture
from understudy.training.offpolicy.rlpd import STATS_STEPS, RLPDConfig
from understudy.training.offpolicy.steering import FrozenPolicy


def new_sac(
    config: RLPDConfig,
    spec: StepSpec,
    mixture: Mixture[Any],
    stop: StopRequest | None = None,
    base: FrozenPolicy | None = None,
) -> SAC | DSRL:
    """A new SAC with statistics of the stored steps; its actor is cloned from demonstrations if the config says so.
    With a `base` it is DSRL."""
    samplers = [sampler for sampler in mixture.samplers.values() if len(sampler)]
    seen = (_first_observation(sampler.peek(STATS_STEPS)) for sampler in samplers)
    stats = Stats.of_data(config.inputs(spec), seen)
    sac = _untrained(config, spec, stats, base)
    if config.cloning_updates and isinstance(sac, SAC):  # the config refuses it for DSRL
        cloning = config.cloning(spec, stats)
        for _ in range(config.cloning_updates):
            if stop is not None:
                stop.check()
            cloning.update(mixture.samplers[DEMO.name].sample(), report=False)
        sac.start_from(cloning.policy())
    return sac


def restored_sac(
    config: RLPDConfig, spec: StepSpec, state: Mapping[str, Any], base: FrozenPolicy | None = None
) -> SAC | DSRL:
    """The SAC or DSRL that a saved state belongs to."""
    sac = _untrained(config, spec, Stats.none(config.inputs(spec)), base)
    sac.restore(state)
    return sac


def _untrained(config: RLPDConfig, spec: StepSpec, stats: Stats, base: FrozenPolicy | None) -> SAC | DSRL:
    if base is None:
        return SAC(config.sac, spec, stats, seed=config.seed, device=config.device)
    return DSRL(config.sac, spec, stats, base, seed=config.seed, device=config.device)


def _first_observation(batch: TransitionBatch | SequenceBatch) -> Tree:
    """[B, ...]: what the drawn steps were chosen on."""
    if isinstance(batch, TransitionBatch):
        return batch.observation
    return trees.map_leaves(lambda leaf: leaf[:, 0], batch.observation)
