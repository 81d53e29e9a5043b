"""What every format promises, over all that can be written here: what it carries comes back, and damage is refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.contracts.formats.case import Case, all_cases
from tests.strategies import step_specs
from tests.unit.formats.mutation import check

from understudy.core import Episode, EpisodeInfo, StepSpec
from understudy.core.examples import CANONICAL, random_episode, random_steps, random_value, small_spec
from understudy.formats import FormatError, find_format
from understudy.formats.registry import guess_format

CASES = all_cases()
ROOT = Path(__file__).parents[2]


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    assert isinstance(request.param, Case)
    return request.param


def written(case: Case, folder: Path, spec: StepSpec, episodes: dict[str, Episode]) -> None:
    folder.mkdir(exist_ok=True)
    target = case.write(folder, spec)
    try:
        for key, episode in episodes.items():
            target.add(key, episode)
        target.close()
    except BaseException:
        target.abandon()
        raise


def read(case: Case, folder: Path, skip: tuple[str, ...] = ()) -> tuple[StepSpec, dict[str, Episode]]:
    source = case.read(folder)
    try:
        found = list(source.episodes(skip))
        assert source.num_episodes is None or source.num_episodes == len(found) + len(skip)
        assert len(dict(found)) == len(found), "two episodes have one key"
        for _, episode in found:
            check(source.spec, episode)
        return source.spec, dict(found)
    finally:
        source.close()


def some(num: int = 3) -> tuple[StepSpec, dict[str, Episode]]:
    spec = small_spec()
    return spec, {f"e{n}": random_episode(spec, 3 + n, n, terminated=n % 2 == 0) for n in range(num)}


def assert_round_trip(case: Case, folder: Path, spec: StepSpec, episodes: dict[str, Episode]) -> None:
    wanted = [case.carried(spec, episode) for episode in episodes.values()]
    if None in wanted:
        with pytest.raises(FormatError):
            written(case, folder, spec, episodes)
        assert not (folder / case.file).exists(), "something half-written is left"
        return
    written(case, folder, spec, episodes)
    got_spec, got = read(case, folder)
    assert len(got) == len(wanted)
    for pair, mine in zip(wanted, got.values(), strict=True):
        assert pair is not None
        assert got_spec == pair[0]
        assert case.same(pair[1], mine), f"wanted {pair[1].columns()} {pair[1].info}, got {mine.columns()} {mine.info}"


@pytest.mark.parametrize("name", [name for name in CANONICAL if name != "long"])
def test_what_it_carries_comes_back(case: Case, tmp_path: Path, name: str) -> None:
    spec, episode = CANONICAL[name]()
    assert_round_trip(case, tmp_path, spec, {"only": episode})


def test_its_files_show_its_format(case: Case, tmp_path: Path) -> None:
    written(case, tmp_path, *some())
    assert guess_format(tmp_path / case.file) == case.format


def test_several_come_back_in_order(case: Case, tmp_path: Path) -> None:
    assert_round_trip(case, tmp_path, *some())


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(spec=step_specs, seed=st.integers(0, 2**31), num_steps=st.integers(1, 12), terminated=st.booleans())
def test_anything_comes_back_or_is_refused(
    case: Case, spec: StepSpec, seed: int, num_steps: int, terminated: bool
) -> None:
    rng = np.random.default_rng(seed)
    steps, last_observation = random_steps(spec, num_steps, seed, terminated=terminated)
    steps = [replace(step, reward=random_value(spec.reward, rng)) for step in steps]
    episode = Episode.from_steps(spec, steps, last_observation, EpisodeInfo(task="tidy up", labels={"é": "猫"}))
    with TemporaryDirectory() as folder:
        assert_round_trip(case, Path(folder), spec, {"only": episode})


def test_keys_stay_when_the_data_is_moved_and_skip_leaves_out(case: Case, tmp_path: Path) -> None:
    written(case, tmp_path / "here", *some())
    _, first = read(case, tmp_path / "here")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "here" / case.file).rename(tmp_path / "elsewhere" / case.file)
    _, second = read(case, tmp_path / "elsewhere")
    assert list(second) == list(first)
    leave_out = list(first)[1]
    _, third = read(case, tmp_path / "elsewhere", (leave_out,))
    assert list(third) == [key for key in first if key != leave_out]
    assert all(third[key].equals(first[key]) for key in third)


def test_reading_twice_from_one_source_gives_the_same(case: Case, tmp_path: Path) -> None:
    written(case, tmp_path, *some())
    source = case.read(tmp_path)
    try:
        first, second = list(source.episodes()), list(source.episodes())
    finally:
        source.close()
    assert [key for key, _ in first] == [key for key, _ in second]
    assert all(a.equals(b) for (_, a), (_, b) in zip(first, second, strict=True))


def test_every_field_of_the_spec_is_in_the_mapping(case: Case, tmp_path: Path) -> None:
    written(case, tmp_path, *some())
    source = case.read(tmp_path)
    try:
        internal = {line.internal for line in source.mapping}
        assert {"observation", "action", "reward"} <= {name.partition("/")[0] for name in internal}
        wanted = [*dict(source.spec.observation.leaves("observation")), *dict(source.spec.action.leaves("action"))]
        assert set(wanted) <= internal
    finally:
        source.close()


def test_an_option_that_it_does_not_have_is_refused(case: Case, tmp_path: Path) -> None:
    written(case, tmp_path, *some())
    format = find_format(case.format)
    with pytest.raises(FormatError, match="has no option 'colour'"):
        format.read(tmp_path / case.file, {**case.read_options, "colour": "red"})
    with pytest.raises(FormatError, match="has no option 'colour'"):
        format.write(tmp_path / "other", small_spec(), {**case.options, "colour": "red"})


def test_what_is_there_is_not_written_over(case: Case, tmp_path: Path) -> None:
    written(case, tmp_path, *some())
    before = read(case, tmp_path)[1]
    with pytest.raises(FormatError, match="already exists"):
        case.write(tmp_path, small_spec())
    assert list(read(case, tmp_path)[1]) == list(before)


def test_nothing_is_there_before_close_and_nothing_after_abandon(case: Case, tmp_path: Path) -> None:
    spec, episodes = some()
    target = case.write(tmp_path, spec)
    for key, episode in episodes.items():
        target.add(key, episode)
    assert not (tmp_path / case.file).exists()
    target.abandon()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_there_is_refused(case: Case, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=str(tmp_path / case.file)):
        case.read(tmp_path)
    (tmp_path / case.file).mkdir()
    with pytest.raises(FormatError, match=str(tmp_path / case.file)):
        case.read(tmp_path)
    shutil.rmtree(tmp_path / case.file)
    (tmp_path / case.file).write_bytes(b"not this")
    with pytest.raises(FormatError, match=str(tmp_path / case.file)):
        read(case, tmp_path)


def test_it_says_what_it_cannot_carry(case: Case) -> None:
    for sentence in find_format(case.format).cannot:
        assert sentence.endswith(".")


@pytest.mark.parametrize("num", ["20", pytest.param("600", marks=pytest.mark.nightly)])
def test_damage_is_refused(num: str, case: Case) -> None:
    """In a process of its own, which may not crash, hang, or take much memory."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "benchmarks/mutate.py", "--only", str(case), "--num", num],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
