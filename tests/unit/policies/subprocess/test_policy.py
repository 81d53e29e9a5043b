"""A policy in another interpreter, one that has numpy and nothing else: the contract, and every way to fail."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.contracts import block_policy as contract
from tests.processes import alive, dies

import understudy
from understudy.core import ArraySpec, Spec, StepSpec
from understudy.core import tree as trees
from understudy.policies import PolicyError, Sampling
from understudy.policies.subprocess import (
    Limits,
    PolicyFactory,
    PolicyProcessDied,
    PolicyProcessGarbage,
    PolicyProcessHung,
    PolicyProcessRaised,
    SubprocessPolicy,
)
from understudy.policies.subprocess.child_main import generator_of, generator_state

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
SPEC = StepSpec(
    observation=Spec(
        {
            "camera": {"front": ArraySpec(shape=(4, 4, 3), dtype="uint8")},
            "hand": ArraySpec(shape=(3,), dtype="float32"),
        }
    ),
    action=Spec(ArraySpec(shape=(3,), dtype="float32", low=-1.0, high=1.0)),
)
SAID = ["pick", "place", "pick", "push", "open"]


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Another virtual environment, with the numpy of this one and no torch."""
    place = tmp_path_factory.mktemp("elsewhere") / "venv"
    venv.create(place, with_pip=False, symlinks=True)
    (packages,) = place.glob("lib/python*/site-packages")
    for part in Path(np.__file__).parent.parent.glob("numpy*"):
        (packages / part.name).symlink_to(part)
    found = str(place / "bin" / "python")
    missing = subprocess.run([found, "-c", "import numpy, torch"], capture_output=True, text=True, check=False)
    assert "No module named 'torch'" in missing.stderr
    return found


def factory(python: str | None, name: str = "plain_policy:PlainTokens", **options: Any) -> PolicyFactory:
    return PolicyFactory(factory=name, options=options, python=python, env={"PYTHONPATH": str(HERE)})


@pytest.fixture
def policy(python: str) -> Iterator[SubprocessPolicy]:
    with SubprocessPolicy(factory(python), SPEC) as made:
        yield made


def observations(num: int) -> Any:
    rng = np.random.default_rng(0)
    return {
        "camera": {"front": rng.integers(0, 256, (num, 4, 4, 3), np.uint8)},
        "hand": rng.normal(size=(num, 3)).astype(np.float32),
    }


def act(policy: SubprocessPolicy, *said: str, seed: int = 0) -> Any:
    return policy.act(observations(len(said)), said, rngs=contract.rngs(len(said), seed), sampling=Sampling())


def evaluate(policy: SubprocessPolicy, *said: str) -> Any:
    tokens = {"tokens": np.zeros((len(said), 2, 3), np.int32)}
    return policy.evaluate(observations(len(said)), said, tokens, sampling=Sampling())


def test_the_contract(policy: SubprocessPolicy) -> None:
    contract.check_all(policy, observations(5), SAID, SPEC.action, "close")
    assert policy.num_starts == 1


def test_it_equals_the_same_code_here(policy: SubprocessPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")  # it refuses to live beside it
    from tests.unit.policies.subprocess.plain_policy import PlainTokens

    here = PlainTokens().act(trees.flatten(observations(5)), SAID, rngs=contract.rngs(5), temperature=1.0, greedy=False)
    there = act(policy, *SAID)
    np.testing.assert_array_equal(there.action, here["action"])
    np.testing.assert_allclose(there.log_prob, here["log_prob"], rtol=1e-6)


def test_the_interpreter_options_and_variables_are_those_named(
    policy: SubprocessPolicy, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PolicyProcessRaised, match="RuntimeError: /") as raised:
        act(policy, "interpreter")
    assert python in str(raised.value)
    shared = ["understudy", "understudy.processes", "understudy.processes.child_main", "understudy.processes.messages"]
    assert str([*shared, "understudy_process"]) in str(raised.value)  # and nothing else of ours
    assert repr(str(Path(understudy.__file__).parents[1])) not in str(raised.value)  # on the path
    with pytest.raises(PolicyProcessRaised, match="No module named 'torch'"):
        act(policy, "torch")
    with SubprocessPolicy(factory(python, seed=1), SPEC) as other:
        assert not np.array_equal(act(other, *SAID).log_prob, act(policy, *SAID).log_prob)
    monkeypatch.setenv("PYTHONPATH", str(HERE))  # is for this interpreter, and not for another
    with pytest.raises(PolicyProcessRaised, match="No module named 'plain_policy'"):
        SubprocessPolicy(PolicyFactory(factory="plain_policy:PlainTokens", python=python), SPEC)


def test_generators_go_on_from_where_they_were_left(policy: SubprocessPolicy) -> None:
    for kind in (np.random.PCG64, np.random.Philox, np.random.MT19937, np.random.SFC64):
        used, beside = np.random.Generator(kind(3)), np.random.Generator(kind(3))
        first = policy.act(observations(1), ["pick"], rngs=[used], sampling=Sampling())
        second = policy.act(observations(1), ["pick"], rngs=[used], sampling=Sampling())
        assert not np.array_equal(first.replay["tokens"], second.replay["tokens"])
        beside.random((2, 2, 3, 1))
        assert used.random() == beside.random()
        assert generator_of(generator_state(used)).random() == used.random()


# ---- weights


def some_weights(scale: float) -> dict[str, Any]:
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(12, 96)).astype(np.float32)
    return {"logits": scale * logits, "value": np.ones(12, np.float32)}


def test_weights_by_arrays_and_by_path(
    policy: SubprocessPolicy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = act(policy, *SAID)
    assert policy.with_parameters(some_weights(1.0), version=4) is policy
    arrays = act(policy, *SAID)
    assert arrays.version == 4
    assert not np.array_equal(arrays.log_prob, before.log_prob)
    np.savez(tmp_path / "weights.npz", **some_weights(2.0))
    monkeypatch.chdir(tmp_path)
    policy.with_parameters("weights.npz", version=5)
    by_path = act(policy, *SAID)
    policy.with_parameters(some_weights(2.0), version=6)
    np.testing.assert_array_equal(act(policy, *SAID).log_prob, by_path.log_prob)
    assert not np.array_equal(by_path.log_prob, arrays.log_prob)


def test_weights_that_do_not_fit_leave_the_old_ones(policy: SubprocessPolicy) -> None:
    policy.with_parameters(some_weights(1.0), version=4)
    before = act(policy, *SAID)
    with pytest.raises(PolicyProcessRaised, match=r"load raised ValueError: logits: expected \(12, 96\), got \(3,\)"):
        policy.with_parameters({**some_weights(1.0), "logits": np.zeros(3, np.float32)}, version=5)
    after = act(policy, *SAID)
    np.testing.assert_array_equal(after.log_prob, before.log_prob)
    assert (after.version, policy.num_starts) == (4, 2)


def test_a_new_process_gets_the_newest_weights(policy: SubprocessPolicy) -> None:
    policy.with_parameters(some_weights(1.0), version=4)
    before = act(policy, *SAID)
    with pytest.raises(PolicyProcessDied):
        act(policy, "exit")
    assert policy.pid is None
    after = act(policy, *SAID)
    np.testing.assert_array_equal(after.log_prob, before.log_prob)
    assert after.version == 4
    assert policy.num_starts == 2


# ---- failures


def test_what_raises_there_raises_here_and_goes_on(policy: SubprocessPolicy) -> None:
    for method, call in (("act", act), ("evaluate", evaluate)):
        with pytest.raises(PolicyProcessRaised, match=f"PlainTokens: {method} raised ValueError: no such") as raised:
            call(policy, "raise")
        assert "misbehave" in raised.value.evidence
    act(policy, "pick")
    assert policy.num_starts == 1


def test_a_dead_process_says_how_it_died(policy: SubprocessPolicy) -> None:
    with pytest.raises(PolicyProcessDied, match="ended with exit code 3 during act") as died:
        act(policy, "exit")
    assert "out of cheese" in str(died.value)
    with pytest.raises(PolicyProcessDied, match=r"was killed by SIGKILL \(out of memory\?\) during act"):
        act(policy, "kill")
    assert policy.pid is None
    act(policy, "pick")
    pid = policy.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)  # between two calls
    assert dies(pid)
    with pytest.raises(PolicyProcessDied, match="SIGKILL"):
        act(policy, "pick")
    act(policy, "pick")
    assert policy.num_starts == 4


def test_a_hung_process_says_where_it_hangs(python: str) -> None:
    with SubprocessPolicy(factory(python), SPEC, limits=Limits(act_s=3.0)) as policy:
        pid = policy.pid
        with pytest.raises(PolicyProcessHung, match=r"act took longer than 3 s and was killed") as hung:
            act(policy, "hang")
        assert "where_it_hangs" in hung.value.evidence
        assert pid is not None
        assert dies(pid)


def test_each_limit_is_kept(python: str, tmp_path: Path) -> None:
    with pytest.raises(PolicyProcessHung, match=r"build took longer than 0\.4 s"):
        SubprocessPolicy(factory(python, sleep_s=60), SPEC, limits=Limits(build_s=0.4))
    with SubprocessPolicy(factory(python), SPEC, limits=Limits(evaluate_s=0.4, load_s=0.4)) as policy:
        with pytest.raises(PolicyProcessHung, match=r"evaluate took longer than 0\.4 s"):
            evaluate(policy, "hang")
        os.mkfifo(tmp_path / "pipe")  # whoever reads it waits for ever
        with pytest.raises(PolicyProcessHung, match=r"load took longer than 0\.4 s"):
            policy.with_parameters(tmp_path / "pipe", version=2)
        act(policy, "pick")
    with pytest.raises(PolicyError, match="limits/act_s: expected more than 0, got 0"):
        Limits(act_s=0)


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("nan", r"log_prob\[0, 0, 0\]: expected a value from -inf to inf, got nan"),
        ("shape", r"log_prob: expected float32 \[1, 2, 3\], got float32 \[1, 1, 3\]"),
        ("bounds", r"action\[0, 0, 0\]: expected a value from -1 to 1"),
        ("missing", r"replay/tokens: expected int32 \[1, 2, 3\], got nothing"),
        ("more", "replay/chain: expected no such field"),
        ("garbage", "expected a message, got"),
        ("hang up", "it closed its socket and is still running"),
    ],
)
def test_answers_that_make_no_sense(policy: SubprocessPolicy, word: str, problem: str) -> None:
    with pytest.raises(PolicyProcessGarbage, match=f"act gave no valid answer: .*{problem}"):
        act(policy, word)
    assert policy.pid is None
    act(policy, "pick")
    assert policy.num_starts == 2


def test_arrays_of_other_things_do_not_cross(policy: SubprocessPolicy) -> None:
    with pytest.raises(PolicyProcessRaised, match="expected numbers or truth values, got <U1"):
        act(policy, "type")
    with pytest.raises(PolicyError, match="act: the arguments cannot be sent: observation/hand: expected numbers"):
        policy.act({**observations(1), "hand": np.array([None])}, ["pick"], rngs=contract.rngs(1), sampling=Sampling())
    act(policy, "pick")


def test_a_policy_that_cannot_be_built(python: str) -> None:
    with pytest.raises(PolicyProcessRaised, match=r"build raised TypeError: .*unexpected keyword argument 'sead'"):
        SubprocessPolicy(factory(python, sead=1), SPEC)
    with pytest.raises(PolicyProcessRaised, match=r"build raised AttributeError: .*no attribute 'Nobody'"):
        SubprocessPolicy(factory(python, "plain_policy:Nobody"), SPEC)
    with pytest.raises(PolicyProcessRaised, match="has no attribute 'replay_spec'"):
        SubprocessPolicy(factory(python, "plain_policy:not_a_policy"), SPEC)
    with pytest.raises(PolicyProcessDied, match="ended with exit code 7 during build") as died:
        SubprocessPolicy(factory(python, shout=True), SPEC)
    assert "a last word of the policy" in str(died.value)
    with pytest.raises(PolicyError, match="python: expected an interpreter, got '/nowhere/python'"):
        SubprocessPolicy(factory("/nowhere/python"), SPEC)


def test_calls_that_make_no_sense(policy: SubprocessPolicy) -> None:
    with pytest.raises(PolicyError, match="rngs: expected 2 generators, one for each instruction, got 1"):
        policy.act(observations(2), ["a", "b"], rngs=contract.rngs(1), sampling=Sampling())
    policy.close()
    with pytest.raises(PolicyError, match="PlainTokens: the policy is closed; make a new one"):
        act(policy, "pick")


def test_noise_crosses_to_policies_that_take_it(policy: SubprocessPolicy, python: str) -> None:
    told: dict[str, Any] = {"rngs": contract.rngs(2), "sampling": Sampling()}
    noise = np.linspace(-1, 1, 12, dtype=np.float32).reshape(2, 2, 3)
    with SubprocessPolicy(factory(python, "plain_policy:PlainNoise"), SPEC) as noisy:
        assert noisy.noise_shape == (2, 3)
        np.testing.assert_array_equal(noisy.act(observations(2), ["a", "b"], **told, noise=noise).action, noise)
        assert (noisy.act(observations(2), ["a", "b"], **told).action > 0).all()  # drawn
        for wrong in (noise[:1], np.full_like(noise, np.nan)):
            with pytest.raises(PolicyError, match=r"noise: expected finite numbers \[2, 2, 3\], a row for each"):
                noisy.act(observations(2), ["a", "b"], **told, noise=wrong)
    assert policy.noise_shape is None
    with pytest.raises(PolicyError, match="noise: PlainTokens makes its blocks of none; leave it out"):
        policy.act(observations(2), ["a", "b"], **told, noise=noise)


def test_what_it_prints_is_kept_within_bounds(policy: SubprocessPolicy) -> None:
    for _ in range(3):
        act(policy, "noise")
    assert policy._child is not None
    assert os.fstat(policy._child._log).st_size < 2**20


# ---- nothing is left


def test_it_ends_with_its_policy(python: str) -> None:
    policy = SubprocessPolicy(factory(python), SPEC)
    pid = policy.pid
    assert pid is not None
    del policy
    gc.collect()
    assert dies(pid)


def test_it_ends_with_its_caller(python: str, tmp_path: Path) -> None:
    """In the middle of a call, though the caller is killed and can tell it nothing."""
    script = textwrap.dedent(f"""
        from tests.unit.policies.subprocess.test_policy import *
        policy = SubprocessPolicy(factory({python!r}), SPEC)
        print(policy.pid, flush=True)
        act(policy, "hang")
    """)
    marker = tmp_path / "hangs"
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "HANG_MARKER": str(marker)}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=env) as caller:
        assert caller.stdout is not None
        pid = int(caller.stdout.readline())
        try:
            deadline = time.monotonic() + 60.0
            while not marker.exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            caller.kill()
            caller.wait()
            assert dies(pid)
        finally:
            caller.kill()
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
