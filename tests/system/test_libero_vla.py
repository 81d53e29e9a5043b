"""One iteration of GRPO on LIBERO's own simulator, by the command line."""

from pathlib import Path

import numpy as np
import pytest

from understudy.cli import main
from understudy.core import tree as trees
from understudy.envs.registry import WORLD_REGISTRY, open_world
from understudy.policies.vla import VLAConfig, VLAPolicy
from understudy.replay import Reader
from understudy.training.runs.metrics import read_metrics

LIBERO = WORLD_REGISTRY["libero"]
TASK = "pick_up_the_black_bowl_next_to_the_plate_and_place_it_on_the_plate"
ENV = f'libero:libero_spatial?tasks=["{TASK}"]&size=32'
TINY = VLAConfig(
    block_steps=4,
    num_bins=16,
    vision_hidden=16,
    vision_layers=1,
    vision_heads=2,
    hidden=16,
    layers=1,
    heads=2,
    max_words=20,
    use_proprio=("state",),
    act_rows=2,
)
STEPS = 10  # two blocks and a half

needs_libero = pytest.mark.skipif(not LIBERO.ready, reason="LIBERO is not there; run `understudy env setup libero`")


@pytest.mark.nightly  # test_onpolicy.py does it in the toy, test_libero.py drives LIBERO
@needs_libero
def test_a_group_is_lived_and_learned_from(tmp_path: Path) -> None:
    """A policy that knows nothing fails, so what moves it is the entropy alone."""
    with open_world(ENV) as world:
        policy = VLAPolicy.new(TINY, world.step_spec, [world.task.instruction], seed=0)
    policy.save(tmp_path / "policy.safetensors")
    argv = [
        "train",
        "grpo",
        str(tmp_path / "run"),
        "--policy",
        str(tmp_path / "policy.safetensors"),
        "--env",
        ENV,
        "--iterations",
        "1",
        "--max-steps",
        str(STEPS),
        "--plan.n-samples",
        "2",
        "--plan.data-batch-size",
        "2",
        "--filters.no-filter-accuracy",
        "--algorithm.entropy-coeff",
        "0.01",
        "--workers.num-parallel-envs",
        "1",
        "--evaluation.episodes",
        "1",
    ]
    assert main(argv) == 0
    lines = list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    lived = [line for line in lines if line["kind"] == "episode"]
    assert [(line["task"], line["length"], line["success"]) for line in lived] == [(TASK, STEPS, False)] * 2
    assert lived[0]["start"] == lived[1]["start"]
    [trained] = [line for line in lines if line["kind"] == "train"]
    assert trained["gradient"] > 0
    played = [line for line in lines if line["kind"] == "evaluation"]
    assert [(line["update"] > 0, line["tasks"][TASK]["episodes"]) for line in played] == [(False, 1), (True, 1)]
    assert_the_group_was_seen(tmp_path / "run" / "store")
    before, after = trees.flatten(policy.parameters()), VLAPolicy.load(tmp_path / "run" / "policy.safetensors")
    assert any(not np.array_equal(before[name], array) for name, array in trees.flatten(after.parameters()).items())


def assert_the_group_was_seen(store: Path) -> None:
    """Both begin from the same picture, do different things, and see what came of them."""
    with Reader(store) as reader:
        one, other = (reader.read(record.id) for record in reader.episodes())
    assert one.extras["executed"].sum(axis=1).tolist() == [4, 4, 2]
    for name in ("agentview", "wrist"):
        assert np.array_equal(one.observation[name][0], other.observation[name][0])
        assert one.observation[name][0].std() > 8
        assert not np.array_equal(one.observation[name][0], one.observation[name][-1])
    assert not np.array_equal(one.action, other.action)
    assert not np.array_equal(one.observation["state"][-1], other.observation["state"][-1])
