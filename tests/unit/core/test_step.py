import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import step_specs
from tests.unit.core.complaints import complaint

from understudy.core import NO_VERSION, ArraySpec, Source, Spec, Step, StepSpec, text
from understudy.core.examples import nested_spec, random_steps, random_tree, small_spec, text_spec

OBSERVATION = np.array([1, 2, 3, 4], np.float32)
ACTION = np.array([5, 6], np.float32)


def step(**changes):
    return Step(**{"observation": OBSERVATION, "action": ACTION, "reward": 0.5} | changes)


def test_the_numbers_of_sources_are_in_stored_files():
    assert {source.name: source.value for source in Source} == {"POLICY": 0, "HUMAN": 1, "SCRIPT": 2, "RANDOM": 3}
    assert NO_VERSION == -1


@pytest.mark.parametrize(
    ("terminated", "truncated", "last"),
    [(False, False, False), (True, False, True), (False, True, True), (True, True, True)],
)
def test_last(terminated, truncated, last):
    assert step(terminated=terminated, truncated=truncated).last is last


def test_steps_and_specs_are_frozen():
    for value, name in ((step(), "reward"), (small_spec(), "reward")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, 1.0)


# --- the spec ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["observation", "action"])
def test_a_step_needs_an_observation_and_an_action(name):
    fields = {"observation": small_spec().observation, "action": small_spec().action} | {name: Spec({})}
    assert complaint(StepSpec, **fields) == f"{name}: expected at least one field, got none; add one to the spec"


@pytest.mark.parametrize(("reward", "shown"), [(ArraySpec(shape=(None,), dtype="int8"), "int8 [?]"), (text(), "text")])
def test_a_reward_is_not_ragged(reward, shown):
    said = complaint(dataclasses.replace, small_spec(), reward=reward)
    assert said == f"reward: expected a fixed shape, got {shown}; use float32 []"


def test_columns_stand_in_the_order_of_the_file():
    assert {path: str(leaf) for path, leaf in nested_spec().columns.items()} == {
        "observation/cameras/front": "uint8 [8, 8, 3]",
        "observation/cameras/depth": "uint16 [8, 8]",
        "observation/arm/pose": "float64 [7]",
        "observation/arm/touch": "bool []",
        "action/arm": "float32 [6]",
        "action/gripper": "int64 []",
        "proposal/arm": "float32 [6]",
        "proposal/gripper": "int64 []",
        "extras/log_prob": "float32 []",
        "extras/value": "float16 []",
        "reward": "float32 []",
        "terminated": "bool []",
        "truncated": "bool []",
        "source": "uint8 []",
        "policy_version": "int64 []",
        "has_proposal": "bool []",
        "is_step": "bool []",
    }
    assert list(small_spec().columns)[:3] == ["observation", "action", "proposal"]


@given(step_specs)
def test_a_step_spec_survives_json(spec):
    again = StepSpec.from_json(json.loads(spec.json_text))
    assert again == spec
    assert again.json_text == spec.json_text


def test_specs_that_differ_have_other_texts():
    spec = small_spec()
    leaf = ArraySpec(shape=(), dtype="int8")
    others = [dataclasses.replace(spec, **{name: Spec(leaf)}) for name in ("observation", "action", "extras")]
    others.append(dataclasses.replace(spec, reward=leaf))
    assert len({other.json_text for other in [spec, *others]}) == 5


# --- rows --------------------------------------------------------------------------------------------------------


def test_a_row_holds_every_field():
    ending = {"terminated": True, "truncated": np.bool_(False)}
    row = small_spec().row(step(source=Source.HUMAN, policy_version=np.int32(7), proposal=-ACTION, **ending))
    assert row.pop("observation") is OBSERVATION
    assert row.pop("action") is ACTION
    assert row.pop("proposal").tolist() == [-5, -6]
    assert row == {
        "reward": np.float32(0.5),
        "terminated": True,
        "truncated": False,
        "source": 1,
        "policy_version": 7,
        "has_proposal": True,
        "is_step": True,
    }
    assert row["reward"].dtype == np.float32


def test_the_defaults_of_a_step():
    row = small_spec().row(step())
    assert row["proposal"].tolist() == [0, 0]
    assert {name: row[name] for name in ("terminated", "truncated", "source", "policy_version", "has_proposal")} == {
        "terminated": False,
        "truncated": False,
        "source": Source.POLICY,
        "policy_version": -1,
        "has_proposal": False,
    }


def test_a_missing_proposal_need_not_fit_the_bounds_of_the_action():
    spec = dataclasses.replace(small_spec(), action=Spec(ArraySpec(shape=(2,), dtype="float32", low=1, high=9)))
    assert spec.row(step())["proposal"].tolist() == [0, 0]
    said = complaint(spec.row, step(proposal=np.zeros(2, np.float32)))
    assert said.startswith("proposal[0]: expected a value from 1 to 9, got 0; clip it")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"observation": np.zeros(4)}, "observation: expected float32 [4], got float64 [4]; convert it first"),
        ({"action": ACTION[:1]}, "action: expected float32 [2], got float32 [1]; convert it first"),
        ({"proposal": {}}, "proposal: expected float32 [2], got nothing; add the field"),
        (
            {"extras": {"value": 1.0}},
            "extras/value: expected no such field, got float 1.0; drop it, or add it to the spec (it has no fields)",
        ),
        ({"reward": np.zeros(1)}, "reward: expected float32 [], got float64 [1]; convert it first"),
        ({"reward": None}, "reward: expected float32 [], got None; pass a number"),
        ({"reward": float("nan")}, "reward: expected a finite number, got nan; check the environment"),
        ({"reward": -float("inf")}, "reward: expected a finite number, got -inf; check the environment"),
        ({"reward": 1e300}, "reward: expected float32 [], got float 1e+300, which does not fit; choose a wider dtype"),
        (
            {"source": 9},
            "source: expected one of POLICY (0), HUMAN (1), SCRIPT (2), RANDOM (3), got int 9; pass a Source",
        ),
        ({"policy_version": 1.5}, "policy_version: expected an int, got float 1.5; pass NO_VERSION if there is none"),
        ({"policy_version": None}, "policy_version: expected an int, got None; pass NO_VERSION if there is none"),
    ],
)
def test_a_wrong_field_is_named(changes, said):
    assert complaint(small_spec().row, step(**changes)) == said


def test_extras_are_checked():
    steps, _ = random_steps(nested_spec(), 1, seed=0)
    said = complaint(nested_spec().row, dataclasses.replace(steps[0], extras={}))
    assert said == "extras/log_prob: expected float32 [], got nothing; add the field"


def test_the_reward_may_have_a_shape_and_bounds():
    spec = dataclasses.replace(small_spec(), reward=ArraySpec(shape=(2,), dtype="float32", high=1))
    assert spec.row(step(reward=[0, 1]))["reward"].tolist() == [0, 1]
    assert complaint(spec.row, step(reward=[0, 2])).startswith("reward[1]: expected a value from -inf to 1, got 2;")
    assert complaint(spec.row, step(reward=1)).startswith("reward: expected float32 [2], got float32 [];")


def test_the_last_row_holds_an_observation_and_nothing_else():
    observation = {"prompt": "go", "jpeg": np.zeros(5, np.uint8), "state": np.ones(3, np.float32)}
    row = text_spec().last_row(observation)
    assert row["observation/prompt"] == "go"
    assert row["observation/jpeg"].shape == (5,)
    assert row["observation/state"].tolist() == [1, 1, 1]
    assert row["action"].shape == row["proposal"].shape == (0, 4)
    assert row["extras/thought"] == ""
    assert row["policy_version"] == NO_VERSION
    for name in ("reward", "terminated", "truncated", "source", "has_proposal", "is_step"):
        assert row[name] == 0


def test_the_last_observation_is_checked():
    said = complaint(small_spec().last_row, np.zeros(3, np.float32))
    assert said == "observation: expected float32 [4], got float32 [3]; convert it first"


@given(step_specs, st.integers(0, 2**32), st.booleans())
def test_every_row_has_the_columns_of_its_spec(spec, seed, proposed):
    rng = np.random.default_rng(seed)
    observation, action, extras = (random_tree(part, rng) for part in (spec.observation, spec.action, spec.extras))
    made = step(
        observation=observation,
        action=action,
        extras=extras,
        reward=spec.reward.zero(),
        proposal=random_tree(spec.action, rng) if proposed else None,
    )
    assert list(spec.row(made)) == list(spec.columns)
    assert list(spec.last_row(observation)) == list(spec.columns)


@pytest.mark.parametrize("reward", [1, 1.0, np.float64(1), np.float32(1), np.int64(1)])
def test_a_number_of_any_kind_is_a_reward(reward: float) -> None:
    spec = small_spec()
    step = Step(observation=np.zeros(4, np.float32), action=np.zeros(2, np.float32), reward=reward)
    assert spec.row(step)["reward"] == np.float32(1)


def test_what_is_no_step_is_refused_with_what_a_step_is():
    wanted = "step: expected a us.Step, got dict; pass us.Step(observation=..., action=..., reward=...)"
    assert complaint(small_spec().row, {"observation": OBSERVATION, "action": ACTION, "reward": 0.5}) == wanted
