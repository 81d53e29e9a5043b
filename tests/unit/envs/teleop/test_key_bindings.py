"""Keys: what each key, stick and button pushes and says."""

from __future__ import annotations

import pytest

from understudy.core import ArraySpec, Spec
from understudy.envs.teleop.axes import Axes, DeviceError
from understudy.envs.teleop.key_bindings import NUM_BUTTONS, Held, KeyBindings, past_dead_zone


def bindings(size: int, **options: object) -> KeyBindings:
    spec = Spec(ArraySpec(shape=(size,), dtype="float32", low=-1, high=1))
    return KeyBindings.of(Axes.of(spec, **options))  # type: ignore[arg-type]


def down(*keys: str) -> Held:
    return Held(keys=frozenset(keys))


def pad(sticks: tuple[float, ...] = (0, 0, 0, 0), **buttons: float) -> Held:
    values = [0.0] * NUM_BUTTONS
    for name, value in buttons.items():
        values[int(name.removeprefix("b"))] = value
    return Held(sticks=sticks, buttons=tuple(values))


PUSHED = {
    "KeyD": ("x", 1),
    "KeyA": ("x", -1),
    "KeyW": ("y", 1),
    "KeyS": ("y", -1),
    "KeyE": ("z", 1),
    "KeyQ": ("z", -1),
    "KeyO": ("roll", 1),
    "KeyU": ("roll", -1),
    "KeyI": ("pitch", 1),
    "KeyK": ("pitch", -1),
    "KeyJ": ("yaw", 1),
    "KeyL": ("yaw", -1),
    "ArrowUp": ("y", 1),
    "ArrowDown": ("y", -1),
    "ArrowLeft": ("x", -1),
    "ArrowRight": ("x", 1),
}


@pytest.mark.parametrize("key", PUSHED)
def test_each_key_pushes_its_axis_and_no_other(key: str) -> None:
    seven = bindings(7)
    axis, way = PUSHED[key]
    assert {name: push for name, push in seven.pushes(down(key)).items() if push} == {axis: way}
    assert seven.active(down(key))


@pytest.mark.parametrize(
    ("held", "axis", "way"),
    [
        (pad((1, 0, 0, 0)), "x", 1),
        (pad((0, 1, 0, 0)), "y", -1),
        (pad((0, 0, 1, 0)), "yaw", -1),
        (pad((0, 0, 0, 1)), "pitch", -1),
        (pad(b7=1), "z", 1),
        (pad(b6=1), "z", -1),
        (pad(b5=1), "roll", 1),
        (pad(b4=1), "roll", -1),
    ],
)
def test_each_part_of_a_gamepad_pushes_its_axis_and_no_other(held: Held, axis: str, way: float) -> None:
    seven = bindings(7)
    assert {name: push for name, push in seven.pushes(held).items() if push} == {axis: way}
    assert seven.active(held)


def test_an_axis_that_is_not_there_takes_nobody_over() -> None:
    four = bindings(4)
    assert not four.active(down("KeyI"))
    assert not four.active(pad((0, 0, 1, 0)))
    assert not bindings(3).active(down("KeyG"))  # no grip
    assert four.active(down("KeyG"))


def test_keys_and_sticks_add_up_to_no_more_than_a_full_push() -> None:
    both = Held(keys=frozenset({"KeyD"}), sticks=(1, 0, 0, 0))
    assert bindings(4).pushes(both)["x"] == 1


def test_opposite_keys_cancel_and_still_hold() -> None:
    four = bindings(4)
    assert not any(four.pushes(down("KeyA", "KeyD")).values())
    assert four.active(down("KeyA", "KeyD"))


def test_the_holding_key_is_in_control_and_pushes_nothing() -> None:
    four = bindings(4)
    for held in (down("Space"), pad(b1=1)):
        assert four.active(held)
        assert not any(four.pushes(held).values())
    for held in (Held(), down("Enter"), down("Digit1"), pad(b9=1), pad((0.1, -0.1, 0, 0))):
        assert not four.active(held)


def test_only_pressing_says_something() -> None:
    four = bindings(4)
    assert list(four.events(Held(), down("KeyG"))) == ["grip"]
    assert list(four.events(down("KeyG"), down("KeyG", "KeyW"))) == []
    assert list(four.events(down("KeyG"), Held())) == []
    assert list(four.events(Held(), down("Enter"))) == ["success"]
    assert list(four.events(Held(), down("Backspace"))) == ["failure"]
    assert [list(four.events(Held(), pad(**{f"b{i}": 1}))) for i in (0, 8, 9)] == [["grip"], ["failure"], ["success"]]
    assert list(bindings(3).events(Held(), down("KeyG"))) == []


def test_speeds() -> None:
    four = bindings(4)
    assert [four.speed(0.5, Held(), down(f"Digit{i}")) for i in (1, 2, 3)] == [0.25, 0.5, 1.0]
    assert four.speed(0.5, down("Digit1"), down("Digit1")) == 0.5
    assert [four.speed(speed, Held(), pad(b3=1)) for speed in (0.25, 0.5, 0.7, 1.0)] == [0.5, 1.0, 1.0, 0.25]


def test_other_axes_get_pairs_of_keys_above_each_other() -> None:
    arm = bindings(8, names=[*(f"joint {i}" for i in range(1, 8)), "grip"])
    assert arm.pairs["joint 1"] == ("KeyA", "KeyQ")
    assert arm.pairs["joint 7"] == ("KeyK", "KeyI")
    keys = [key for pair in arm.pairs.values() for key in pair]
    assert len(set(keys)) == 14
    assert "KeyG" not in keys
    assert arm.pushes(down("KeyI"))["joint 7"] == 1
    assert arm.pushes(pad((0, -1, 0, 0)))["joint 2"] == 1
    assert not arm.active(down("ArrowUp"))
    assert not any(arm.pushes(down("ArrowUp")).values())
    with pytest.raises(DeviceError, match="expected up to 8 axes, one pair of keys each, got 14"):
        bindings(14)


def test_the_page_is_told_all() -> None:
    said = bindings(7).describe()
    assert [axis["name"] for axis in said["axes"]] == ["x", "y", "z", "roll", "pitch", "yaw"]
    assert said["axes"][0]["less"] == {"key": "KeyA", "label": "left"}
    assert said["axes"][2]["pad"] == "triggers"
    assert (said["grip"], len(said["arrows"])) == ("KeyG", 4)
    assert (said["discard"], bindings(7).describe(can_discard=True)["discard"]) == (None, "Digit0")
    assert list(bindings(7).events(down(), down("Digit0"))) == ["discard"]
    assert (bindings(3).describe()["grip"], bindings(5).describe()["arrows"]) == (None, [])


def test_the_dead_zone_has_no_step() -> None:
    assert [past_dead_zone(value, 0.2) for value in (0, 0.2, -0.2)] == [0, 0, 0]
    assert past_dead_zone(0.6, 0.2) == pytest.approx(0.5)
    assert past_dead_zone(-1.3, 0.2) == -1
    assert 0 < past_dead_zone(0.201, 0.2) < 0.01
