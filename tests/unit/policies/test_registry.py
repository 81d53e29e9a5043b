"""The registry: kinds of policies by name, those of other packages included, which are installed for real."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.unit.policies.flow.test_policy import SPEC, policy_of

from understudy.policies import PolicyError, policy_file
from understudy.policies.flow import FlowPolicy
from understudy.policies.load import load_block_policy, load_policy_file
from understudy.policies.registry import kinds, policy_class

SOURCE = '''
from understudy.policies import policy_file
from understudy.policies.flow import FlowPolicy


class Slow(FlowPolicy):
    """A flow policy under another name."""

    def description(self):
        return {**super().description(), "kind": "slow"}

    @staticmethod
    def of(parameters, description, *, device="cpu"):
        made = FlowPolicy.of(parameters, description, device=device)
        return Slow(made.config, made.spec, made.words, made.model, version=made.version)

    @staticmethod
    def load(path, spec=None, *, device="cpu"):
        description, parameters = policy_file.read(path, "slow")
        return Slow.of(parameters, description, device=device)

    def with_parameters(self, parameters, *, version):
        return Slow.of(parameters, {**self.description(), "version": version})

    def with_stats(self, stats):
        self.model.encoder.set_stats(stats)
        return self


class Fixed:
    """A policy that is not trained."""

    @staticmethod
    def load(path, spec=None, *, device="cpu"):
        return Fixed()


class Nothing:
    pass
'''

Install = Callable[..., None]


def install_package(directory: Path, monkeypatch: pytest.MonkeyPatch, name: str, **points: str) -> None:
    """Put a package with entry points where Python finds it, as pip does."""
    info = directory / name / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (directory / name / f"{name}.py").write_text(SOURCE)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = "".join(f"{kind} = {value}\n" for kind, value in points.items())
    (info / "entry_points.txt").write_text(f"[understudy.policies]\n{lines}")
    monkeypatch.syspath_prepend(str(directory / name))
    monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    return partial(install_package, tmp_path, monkeypatch)


def test_the_kinds_of_this_package() -> None:
    assert kinds()[:3] == ("vla", "flow", "lerobot")
    assert policy_class("flow") is FlowPolicy


def test_a_policy_of_another_package_is_loaded_by_its_kind(install: Install, tmp_path: Path) -> None:
    path = tmp_path / "policy.safetensors"
    made = policy_of()
    policy_file.write(path, {**made.description(), "kind": "slow"}, made.parameters())
    with pytest.raises(
        PolicyError, match=r"policy.safetensors: kind: expected a policy of kind vla, flow.*, got 'slow'"
    ):
        load_block_policy(path, SPEC)
    install("slow_policies", slow="slow_policies:Slow")
    assert kinds() == ("vla", "flow", "lerobot", "slow")
    loaded = load_block_policy(path, SPEC)
    assert type(loaded).__name__ == "Slow"
    assert np.array_equal(
        loaded.parameters()["weights"]["enter"]["bias"], made.parameters()["weights"]["enter"]["bias"]
    )


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ({"slow": "slow_b:Missing"}, r"'slow' is registered as slow_b:Missing, which cannot be imported .*Missing"),
        ({"slow": "nowhere:Slow"}, r"'slow' is registered as nowhere:Slow, which cannot be imported \(No module"),
        ({"slow": "slow_b:Nothing"}, r"slow_b:Nothing, which has no `load\(path, spec, \*, device\)`; give it one"),
        ({"flow": "slow_b:Slow"}, r"'flow' is registered as understudy.policies.flow:FlowPolicy and as slow_b:Slow"),
        ({"slower": "slow_b:Slow"}, r"got 'slow'; did you mean 'slower'\?"),
    ],
)
def test_what_is_registered_wrongly_is_named(points: dict[str, str], said: str, install: Install) -> None:
    install("slow_b", **points)
    with pytest.raises(PolicyError, match=said):
        policy_class("slow")


def test_two_packages_with_one_kind_are_refused(install: Install) -> None:
    install("slow_c", slow="slow_c:Slow")
    install("slow_d", slow="slow_d:Slow")
    with pytest.raises(
        PolicyError, match=r"kind: 'slow' is registered as slow_[cd]:Slow and as slow_[cd]:Slow; remove"
    ):
        kinds()


def test_files_that_are_no_such_policy_are_named(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="expected a policy, got no such file"):
        load_policy_file(tmp_path / "nothing")
    made = policy_of()
    policy_file.write(tmp_path / "a", {**made.description(), "kind": "policy"}, made.parameters())
    with pytest.raises(PolicyError, match="this policy takes no instructions; give one that `understudy sft` made"):
        load_policy_file(tmp_path / "a")
