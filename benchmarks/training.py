"""What the data plane costs a learner and an actor.

    python benchmarks/training.py learner    # updates from a store, beside the same updates on a batch in memory
    python benchmarks/training.py actor      # what a step costs beside the policy's forward pass and the world

Both sides of `learner` take turns; a ratio is the median over rounds of CPU time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from understudy.algorithms import SAC, SACConfig
from understudy.cli import main as understudy
from understudy.core import Tree
from understudy.envs.toy import ToyTable
from understudy.policies import ActorConfig, ActorPolicy, EncoderConfig
from understudy.replay import Store
from understudy.service import Server, ServerConfig, connect
from understudy.training.data.run_episode import run_episode
from understudy.training.offpolicy.rlpd import RLPDConfig, policy_act, small_sac
from understudy.training.offpolicy.rlpd_learner import RLPDLearner
from understudy.training.runs.run import Run

ROUNDS = 7


def learner(place: Path, cameras: bool, num_critics: int, batch_size: int, updates: int) -> None:
    env = f"toy:press_button?cameras={'true' if cameras else 'false'}&state=task"
    path = place / f"{cameras}-{num_critics}-{batch_size}"
    assert understudy(["record", str(path / "store"), "--env", env, "--successes", "40"]) == 0
    sac = SACConfig(
        actor=ActorConfig(hidden=(128, 128), encoder=EncoderConfig()),
        critic_hidden=(128, 128),
        num_critics=num_critics,
    )
    config = RLPDConfig(env=env, batch_size=batch_size, sac=sac)
    run = Run.create(path, "rlpd", config)
    ratios, speeds = [], []
    with ToyTable(cameras=cameras) as world, RLPDLearner(run, config, world.step_spec) as ours:
        assert ours.policy() is not None
        assert ours.sac is not None
        batch = ours.batches.demo.sample(batch_size)
        for round_ in range(ROUNDS + 1):
            began = time.process_time()
            _bare(ours.sac, batch, updates)
            bare = time.process_time() - began
            began = time.process_time()
            ours.learn(updates)
            with_data = time.process_time() - began
            if round_:  # the first warms up
                ratios.append(bare / with_data)
                speeds.append(updates / with_data)
    print(
        f"cameras {cameras}, {num_critics} critics, batch {batch_size}: {np.median(speeds):.0f} updates/CPU s, "
        f"{np.median(ratios):.2f}x of the same updates on one batch in memory "
        f"(rounds {min(ratios):.2f} to {max(ratios):.2f})"
    )


def _bare(sac: SAC, batch: Any, updates: int) -> None:
    for _ in range(updates - 1):
        sac.update(batch, report=False)
    sac.update(batch)


def actor(place: Path, cameras: bool, episodes: int) -> None:
    world = ToyTable(cameras=cameras, size=128)
    world.choose("pick_red")
    policy = _policy(world)
    inner = policy_act(policy, np.random.default_rng(0))
    spent: list[float] = []
    rest: list[float] = []
    at = 0.0

    def act(observation: Tree) -> tuple[Tree, int]:
        nonlocal at
        began = time.perf_counter()
        if at:
            rest.append(began - at - sum(spent))
        spent.clear()
        found = inner(observation)
        at = time.perf_counter()
        return found

    step = world.step

    def timed_step(action: Tree) -> Any:
        began = time.perf_counter()
        found = step(action)
        spent.append(time.perf_counter() - began)
        return found

    world.step = timed_step  # type: ignore[method-assign]
    with (
        Store.open(place / f"actor-{cameras}") as store,
        Server(store, ServerConfig(port=0)) as server,
        connect(server.address) as remote,
        remote.writer("actor", world.step_spec, spool=place / f"spool-{cameras}") as writer,
    ):
        for number in range(episodes):
            at = 0.0
            run_episode(world, writer, act=act, seed=number)
    found = np.array(rest) * 1e3
    p50, p99, p999 = np.percentile(found, (50, 99, 99.9))
    print(
        f"cameras {cameras} (128x128, two): {len(found)} steps, besides: p50 {p50:.3f} ms, p99 {p99:.3f}, "
        f"p99.9 {p999:.3f}, most {found.max():.2f}"
    )


def _policy(world: ToyTable) -> ActorPolicy:
    from understudy.policies import Inputs, Stats

    config = small_sac()
    stats = Stats.none(Inputs(world.step_spec.observation))
    return SAC(config, world.step_spec, stats, seed=0).policy(version=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("learner", "actor"))
    parser.add_argument("--updates", type=int, default=200, help="of each side in each round")
    parser.add_argument("--episodes", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=".") as place:
        if options.what == "learner":
            for num_critics, batch_size in ((2, 128), (2, 256), (10, 256)):
                learner(Path(place), False, num_critics, batch_size, options.updates)
            learner(Path(place), True, 2, 64, max(options.updates // 10, 5))
        else:
            for cameras in (False, True):
                actor(Path(place), cameras, options.episodes)


if __name__ == "__main__":
    main()
