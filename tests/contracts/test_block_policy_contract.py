"""The contract of a BlockPolicy, over every one there is: small VLA, OpenVLA, flow, lerobot, one in a subprocess."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

pytest.importorskip("transformers")

from tests.contracts import block_policy as contract
from tests.unit.policies.flow import test_policy as flow
from tests.unit.policies.lerobot import made as lerobot
from tests.unit.policies.openvla import make_checkpoint as checkpoint
from tests.unit.policies.openvla import test_policy as openvla
from tests.unit.policies.subprocess import test_policy as subprocess
from tests.unit.policies.vla import test_policy as vla

from understudy.core import Spec
from understudy.policies import BlockPolicy
from understudy.policies.subprocess import SubprocessPolicy

torch.set_num_threads(1)

Case: TypeAlias = tuple[
    BlockPolicy, Any, list[str], Spec, str
]  # observation, instructions, action, another instruction


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.make_checkpoint(tmp_path_factory.mktemp("openvla") / "checkpoint", proprio=True)


@pytest.fixture(scope="module")
def l1_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.make_checkpoint(tmp_path_factory.mktemp("l1") / "checkpoint", proprio=True, l1_head=True)


@contextmanager
def opened(name: str, directory: Path) -> Iterator[Case]:
    kind, _, case = name.partition(": ")
    if kind == "vla":
        policy = vla.policy_of(replace(vla.TINY, value_head=case == "value head"))
        yield policy, vla.observations(5), vla.told(5), vla.SPEC.action, "press the red door"
    elif kind == "openvla":
        loaded = openvla.with_random_value_head(openvla.load(directory, **openvla.CASES[case]))
        num = openvla.NUM
        words = checkpoint.instructions(num)
        yield loaded, checkpoint.observations(num), words, checkpoint.SPEC.action, "put it on the plate"
    else:
        factory = subprocess.factory(None, has_value=case == "value head")
        with SubprocessPolicy(factory, subprocess.SPEC) as remote:
            yield remote, subprocess.observations(5), subprocess.SAID, subprocess.SPEC.action, "close"


NAMES = ["vla: plain", "vla: value head", *(f"openvla: {case}" for case in openvla.CASES)]
NAMES += ["subprocess: plain", "subprocess: value head"]


@pytest.mark.parametrize("name", NAMES)
def test_every_block_policy_keeps_the_contract(name: str, directory: Path) -> None:
    with opened(name, directory) as case:
        contract.check_all(*case)


@pytest.mark.parametrize("case", flow.CASES)
def test_a_flow_policy_keeps_the_contract(case: str) -> None:
    policy = flow.policy_of(replace(flow.TINY, **flow.CASES[case]))
    seen, said = flow.observations(5), flow.told(5)
    contract.check_all(policy, seen, said, flow.SPEC.action, "press the red door", density=True)


@pytest.mark.parametrize("case", ["parallel", "prompts padded together", "causal"])
def test_a_policy_with_a_diffusion_head_keeps_the_contract(case: str, tmp_path: Path) -> None:
    directory = checkpoint.make_checkpoint(tmp_path, diffusion=True)
    policy = openvla.load(directory, **openvla.CASES[case], num_diffusion_steps=5)
    num = openvla.NUM
    words, seen = checkpoint.instructions(num), checkpoint.observations(num)
    contract.check_all(policy, seen, words, checkpoint.SPEC.action, "put it on the plate", density=True)


@pytest.mark.parametrize("case", ["parallel", "two cameras, proprioception, value", "causal"])
def test_a_policy_with_an_l1_head_keeps_the_contract(case: str, l1_directory: Path) -> None:
    """With a scale of 0.3, by which differences of rounding are divided."""
    options = {**openvla.CASES[case], "l1_scale": 0.3}
    policy = openvla.with_random_value_head(openvla.load(l1_directory, **options))
    num = openvla.NUM
    words, seen = checkpoint.instructions(num), checkpoint.observations(num)
    contract.check_all(policy, seen, words, checkpoint.SPEC.action, "put it on the plate", density=True)


@pytest.fixture(scope="module")
def lerobot_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lerobot.make_policies(tmp_path_factory.mktemp("lerobot"))


@lerobot.needs_lerobot
@pytest.mark.parametrize("kind", lerobot.KINDS)
def test_a_policy_of_lerobot_keeps_the_contract(kind: str, lerobot_directory: Path) -> None:
    said = lerobot.SAID
    seen = lerobot.observations(len(said))
    with lerobot.opened(lerobot_directory, kind) as policy:
        if kind == "act":
            contract.check_draws_nothing(policy, seen, said, lerobot.SPEC.action)
        else:
            other = "open the drawer" if kind in lerobot.WITH_WORDS else None
            contract.check_all(policy, seen, said, lerobot.SPEC.action, other, density=True)
