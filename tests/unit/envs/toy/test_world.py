"""The toy table: its physics by hand, its expert on every start, its images, and its speed."""

import time
import zlib

import numpy as np
import pytest

from understudy.core import tree as trees
from understudy.envs import ToyTable, WorldError, script
from understudy.envs.toy.physics import BUTTON_PRESSED, HALF_BLOCK, HOLD_OPENING, NOTHING, Table
from understudy.envs.toy.tasks import BLUE, NUM_STARTS, PURPLE, RED, STATE_NAMES, SUITE, TASKS
from understudy.envs.toy.world import start_state


def make_table(**changes: object) -> Table:
    fields: dict[str, object] = {
        "gripper": [0.0, 0.0, 0.2],
        "blocks": [[0.0, 0.0, 0.03], [0.15, 0.0, 0.03], [-0.15, 0.1, 0.03]],
        "plate": (0.1, -0.15),
        "zone": (-0.1, -0.15),
        "button": (0.2, 0.15),
    }
    return Table(**{**fields, **changes})  # type: ignore[arg-type]


def act(table: Table, num_steps: int, dx: float = 0, dy: float = 0, dz: float = 0, grip: float = 0) -> None:
    for _ in range(num_steps):
        table.act(dx, dy, dz, grip)


# --- physics ---


def test_a_block_is_grasped_lifted_and_let_go() -> None:
    table = make_table()
    act(table, 6, dz=-1)
    assert table.gripper[2] == pytest.approx(0.02)
    act(table, 2, grip=1)
    assert (table.held, table.opening) == (RED, HOLD_OPENING)
    act(table, 3, dx=1, dz=1)
    assert table.blocks[RED] == pytest.approx([0.09, 0.0, 0.12])
    act(table, 1, grip=-0.1)
    assert table.held == RED, "a loose grip still holds"
    act(table, 1, grip=-1)
    assert table.held == NOTHING
    act(table, 3)
    assert table.blocks[RED] == pytest.approx([0.09, 0.0, HALF_BLOCK])


def test_fingers_close_on_nothing_beside_a_block() -> None:
    table = make_table(gripper=[0.0, 0.03, 0.02])
    act(table, 4, grip=1)
    assert (table.held, table.opening) == (NOTHING, 0.0)


def test_closed_fingers_push_and_stay_in_touch() -> None:
    table = make_table(gripper=[-0.08, 0.0, 0.02], opening=0.0)
    act(table, 3, dx=1)
    assert table.gripper[0] == pytest.approx(0.01)
    assert table.blocks[RED] == pytest.approx([0.01 + 0.046, 0.0, HALF_BLOCK])


def test_a_pushed_block_pushes_the_next() -> None:
    table = make_table(gripper=[-0.08, 0.0, 0.02], opening=0.0)
    act(table, 6, dx=1)
    assert table.blocks[RED][0] == pytest.approx(0.1 + 0.046)
    assert table.blocks[BLUE][0] == pytest.approx(0.1 + 0.046 + 0.06)
    assert table.blocks[PURPLE] == [-0.15, 0.1, 0.03]


def test_nothing_leaves_the_table() -> None:
    table = make_table(gripper=[0.0, -0.1, 0.02], opening=0.0)
    act(table, 40, dy=1)
    assert table.blocks[RED][1] == pytest.approx(0.23)
    assert table.gripper[1] == pytest.approx(0.25)


def test_fingers_stand_on_a_block_and_touch_it() -> None:
    table = make_table(opening=0.0)
    assert not table.touched(RED)
    act(table, 10, dz=-1)
    assert table.gripper[2] == pytest.approx(2 * HALF_BLOCK)
    assert table.touched(RED)
    assert not table.touched(BLUE)


def test_a_block_stands_on_another_and_falls_when_that_is_taken() -> None:
    table = make_table(blocks=[[0.01, 0.0, 0.2], [0.0, 0.0, 0.03], [-0.15, 0.1, 0.03]])
    act(table, 5)
    assert table.blocks[RED][2] == pytest.approx(0.09)
    assert table.stacked(RED, BLUE)
    assert not table.stacked(BLUE, RED)
    table.blocks[BLUE][0] = 0.2
    act(table, 3)
    assert table.resting(RED)


def test_a_held_block_is_set_down_and_not_through() -> None:
    table = make_table(gripper=[0.15, 0.0, 0.2], opening=HOLD_OPENING, held=RED)
    table.blocks[RED] = [0.15, 0.0, 0.2]
    act(table, 20, dz=-1)
    assert table.blocks[RED][2] == pytest.approx(0.09)
    act(table, 2, grip=-1)
    assert table.stacked(RED, BLUE)


def test_the_button() -> None:
    table = make_table(gripper=[0.2, 0.15, 0.1])
    assert not table.pressed
    act(table, 4, dz=-1)
    assert table.gripper[2] <= BUTTON_PRESSED
    assert table.pressed


def test_grasping_what_should_be_pushed_ends_the_episode() -> None:
    world = ToyTable(cameras=False)
    world.reset(seed=0, options={"task": "push_blue", "start": 0})
    world.table.gripper[:2] = world.table.blocks[BLUE][:2]
    world.table.gripper[2] = 0.02
    for _ in range(2):
        _, reward, terminated, truncated, info = world.step(np.array([0, 0, 0, 1], np.float32))
    assert (reward, terminated, truncated, info["success"]) == (0.0, True, False, False)


# --- tasks and starts ---


def test_a_start_is_the_same_for_ever() -> None:
    digest = 0
    for task in TASKS:
        for start in range(50):
            table = start_state(task, start)
            numbers = [*table.gripper, *np.ravel(table.blocks), *table.plate, *table.zone, *table.button]
            digest = zlib.crc32(np.round(numbers, 9).astype(np.float32).tobytes(), digest)
    assert digest == 3905632559


def test_state_names_say_what_the_numbers_are() -> None:
    world = ToyTable(cameras=False)
    observation, _ = world.reset(seed=3, options={"task": "pick_blue"})
    state = dict(zip(STATE_NAMES, observation["state"].tolist(), strict=True))
    assert state["opening"] == 1.0
    assert state["held"] == 0.0
    assert state["blue_x"] == np.float32(world.table.blocks[BLUE][0])
    assert state["zone_y"] == np.float32(world.table.zone[1])
    assert set(observation) == {"state"}


def test_suite() -> None:
    assert len(SUITE.tasks) == 10
    assert {task.num_starts for task in SUITE.tasks} == {NUM_STARTS}
    assert {task.max_steps for task in SUITE.tasks} == {100}
    assert list(SUITE.starts("pick_red", "eval")) == list(range(400, 500))


# --- the expert ---


def success_rate(task: str, starts: range, noise: float = 0.0) -> float:
    world = ToyTable(cameras=False)
    rng = np.random.default_rng(0)
    num_successes = 0
    for start in starts:
        world.reset_without_observation(seed=0, options={"task": task, "start": start})
        ended = False
        while not ended:
            _, terminated, truncated, info = world.step_without_observation(script(world, noise=noise, rng=rng))
            ended = terminated or truncated
        num_successes += info["success"]
    return num_successes / len(starts)


@pytest.mark.parametrize("task", TASKS)
def test_the_expert_solves_every_start(task: str) -> None:
    assert success_rate(task, range(NUM_STARTS)) == 1.0


@pytest.mark.parametrize("task", TASKS)
def test_the_expert_copes_with_noise(task: str) -> None:
    assert success_rate(task, range(0, NUM_STARTS, 5), noise=0.3) == 1.0


@pytest.mark.parametrize("task", ["red_on_plate", "stack_red_on_blue", "press_button"])
def test_the_expert_takes_over_from_anywhere(task: str) -> None:
    world = ToyTable(cameras=False)
    rng = np.random.default_rng(1)
    num_successes = 0
    for start in range(20):
        world.reset_without_observation(seed=0, options={"task": task, "start": start})
        ended, info = False, {"success": False}
        while not ended:
            action = rng.uniform(-1, 1, 4).astype(np.float32) if world._num_steps < 25 else script(world)
            _, terminated, truncated, info = world.step_without_observation(action)
            ended = terminated or truncated
        num_successes += info["success"]
    assert num_successes >= 19


def test_noise_needs_a_generator() -> None:
    world = ToyTable(cameras=False)
    world.reset(seed=0)
    with pytest.raises(WorldError, match=r"rng: noise needs a random generator, got None; pass np.random.default_rng"):
        script(world, noise=0.1)


# --- images ---


@pytest.mark.parametrize("size", [64, 128])
def test_pictures_fit_and_repeat(size: int) -> None:
    one, two = ToyTable(size=size), ToyTable(size=size)
    first, _ = one.reset(seed=1)
    second, _ = two.reset(seed=1)
    one.step_spec.observation.check(first)
    assert trees.equal(first, second)
    assert first["front"].shape == (size, size, 3)


def test_both_cameras_show_what_happens() -> None:
    world = ToyTable()
    first, _ = world.reset(seed=1, options={"task": "red_on_plate", "start": 0})
    before = {name: image.copy() for name, image in first.items()}
    for _ in range(10):
        observation, *_ = world.step(script(world))
    for name in world.camera_names:
        assert (observation[name] != before[name]).any(axis=-1).mean() > 0.01
        assert (first[name] == before[name]).all(), "an image given away stays as it is"


@pytest.mark.parametrize("colour", ["red", "blue", "purple"])
def test_every_block_is_seen_from_the_front(colour: str) -> None:
    world = ToyTable()
    block = ("red", "blue", "purple").index(colour)
    rgb = np.array([(222, 58, 50), (52, 104, 214), (150, 70, 180)][block])
    for start in range(10):
        world.reset(seed=0, options={"task": "pick_red", "start": start})
        world.table.gripper[:] = [-0.3, 0.25, 0.25]  # out of the way
        near = np.abs(world.observe()["front"].astype(int) - rgb).max(axis=-1) < 25
        assert near.sum() >= 4


def test_what_is_on_top_covers_what_is_below() -> None:
    world = ToyTable(size=128)
    world.reset(seed=0, options={"task": "stack_red_on_blue", "start": 3})
    table = world.table
    table.blocks[RED] = [*table.blocks[BLUE][:2], 0.09]
    table.gripper[:] = [*table.blocks[BLUE][:2], 0.2]
    wrist = world.observe()["wrist"].astype(int)
    red = (np.abs(wrist - (222, 58, 50)).max(axis=-1) < 10).sum()
    blue = (np.abs(wrist - (52, 104, 214)).max(axis=-1) < 10).sum()
    assert red > 100
    assert blue == 0


def test_size_is_checked() -> None:
    with pytest.raises(WorldError, match="size: expected 16 to 512 pixels, got int 8; 64 and 128 are usual"):
        ToyTable(size=8)


# --- speed ---


@pytest.mark.serial
@pytest.mark.nightly
def test_speed(capsys: pytest.CaptureFixture[str]) -> None:
    world = ToyTable()
    world.reset_without_observation(seed=0, options={"task": "stack_red_on_blue", "start": 0})
    action = np.array([0.01, -0.01, 0.01, 0.0], np.float32)
    renderer = world._renderer
    assert renderer is not None
    step_s = best_s(lambda: world.table.act(*action.tolist()), 200)
    world_step_s = min(best_s(lambda: world.step_without_observation(action), 90), 1.0)
    front_s = best_s(lambda: renderer.front(world.table), 200)
    wrist_s = best_s(lambda: renderer.wrist(world.table), 200)
    numbers = np.random.default_rng(0).random(20_000)
    sort_s = best_s(lambda: np.sort(numbers), 200)  # what this machine takes for numpy's own work: 0.1 ms
    with capsys.disabled():
        print(
            f"\ntoy table: step {world_step_s * 1e6:.0f} µs (physics {step_s * 1e6:.0f}), "
            f"64x64 frame {front_s * 1e6:.0f} µs front, {wrist_s * 1e6:.0f} µs wrist"
        )
    assert world_step_s < 2 * sort_s
    assert front_s < 25 * sort_s
    assert wrist_s < 25 * sort_s


def best_s(function: object, num_times: int) -> float:
    """The fastest of some calls: other programs only ever make one slower."""
    times = []
    for _ in range(num_times):
        start = time.perf_counter()
        function()  # type: ignore[operator]
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.parametrize(
    ("task", "names"),
    [
        ("pick_red", {"red"}),
        ("stack_blue_on_purple", {"blue", "purple"}),
        ("red_on_plate", {"red", "plate"}),
        ("push_blue", {"blue", "zone"}),
        ("press_button", {"button"}),
    ],
)
def test_the_state_of_a_task_has_only_what_it_speaks_of(task: str, names: set[str]) -> None:
    whole, part = ToyTable(cameras=False), ToyTable(cameras=False, state="task")
    for world in (whole, part):
        world.reset(seed=3, options={"task": task})
    state = dict(zip(STATE_NAMES, part.observe()["state"].tolist(), strict=True))
    for name, value in zip(STATE_NAMES, whole.observe()["state"].tolist(), strict=True):
        spoken_of = name.split("_")[0] in {"gripper", "opening", "held", *names}
        assert state[name] == (value if spoken_of else 0.0)
    with pytest.raises(WorldError, match="expected 'all' or 'task'"):
        ToyTable(state="some")  # type: ignore[arg-type]
