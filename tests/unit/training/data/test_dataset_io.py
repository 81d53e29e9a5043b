"""Data sets of others into a store and back: whole episodes, each once."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from tests.docs.pages import DOCS, run_page

from understudy.core import ArraySpec, Episode, Spec, StepSpec, StoreError
from understudy.core.examples import CANONICAL, random_episode, small_spec
from understudy.formats import ORIGIN, DatasetPath, Field, FormatError, parse_dataset_path
from understudy.replay import Reader, Store, verify
from understudy.service import Server, ServerConfig
from understudy.training.data.dataset_io import (
    ORIGIN_DIGEST,
    ImportReport,
    StoreImportTarget,
    export_episodes,
    import_episodes,
    open_import_target,
)


@dataclass
class Made:
    """A data set of another format, made on the spot; damaged behind `good` episodes."""

    spec: StepSpec
    all: dict[str, Episode]
    good: int = 1000
    mapping: tuple[Field, ...] = ()
    given: list[str] = field(default_factory=list)

    @property
    def num_episodes(self) -> int:
        return len(self.all)

    def episodes(self, skip: Container[str] = ()) -> Iterator[tuple[str, Episode]]:
        for number, (key, episode) in enumerate(self.all.items()):
            if number >= self.good:
                raise FormatError("the rest is damaged")
            if key not in skip:
                self.given.append(key)
                yield key, episode

    def close(self) -> None:
        pass


def some(num: int = 4, spec: StepSpec | None = None) -> Made:
    spec = spec or small_spec()
    return Made(spec, {f"e/{n}": random_episode(spec, 3 + n, n, terminated=n % 2 == 0) for n in range(num)})


PLACE = parse_dataset_path("rlds:kitchen")  # whose name is in the origins; what is read is what was made


def stored(path: Path) -> list[Episode]:
    with Reader(path) as reader:
        return [reader.read(record.id) for record in reader.episodes()]


def without_origin(episode: Episode) -> Episode:
    labels = {name: text for name, text in episode.info.labels.items() if name not in (ORIGIN, ORIGIN_DIGEST)}
    return replace(episode, info=replace(episode.info, labels=labels))


@pytest.mark.parametrize("name", [name for name in CANONICAL if name != "long"])
def test_what_is_imported_is_the_same_episode(tmp_path: Path, name: str) -> None:
    spec, episode = CANONICAL[name]()
    with open_import_target(str(tmp_path / "store")) as target:
        report = import_episodes(Made(spec, {"only": episode}), target, PLACE)
    assert report == ImportReport(num_imported=1, num_steps=len(episode))
    (found,) = stored(tmp_path / "store")
    assert without_origin(found).equals(episode)
    assert verify(tmp_path / "store").problems == []


def test_frames_are_imported_by_the_codec_that_is_asked_for(tmp_path: Path) -> None:
    spec, episode = CANONICAL["images"]()
    for codec, lossy in (("raw", None), ("png", False), ("jpeg", True)):
        with open_import_target(str(tmp_path / codec)) as target:
            import_episodes(Made(spec, {"only": episode}), target, PLACE, codec=codec)
        (found,) = stored(tmp_path / codec)
        assert without_origin(found).equals(episode) == (not lossy)
        with Reader(tmp_path / codec) as reader:
            codecs = reader.spec(1).encoded
        assert {path: chosen.lossy for path, chosen in codecs.items()} == (
            {} if lossy is None else {"observation/wrist_1": lossy, "observation/wrist_2": lossy}
        )


def test_an_episode_says_where_it_came_from(tmp_path: Path) -> None:
    with open_import_target(str(tmp_path / "store")) as target:
        import_episodes(some(), target, PLACE)
    origins = [episode.info.labels[ORIGIN] for episode in stored(tmp_path / "store")]
    start = origins[0].partition("@")[0]
    assert start == "rlds:kitchen"
    assert [origin.partition("#")[2] for origin in origins] == ["e/0", "e/1", "e/2", "e/3"]
    assert len({origin.partition("#")[0] for origin in origins}) == 1


def test_importing_twice_adds_nothing_and_reads_nothing_but_the_first(tmp_path: Path) -> None:
    for attempt in range(2):
        source = some()
        with open_import_target(str(tmp_path / "store")) as target:
            report = import_episodes(source, target, PLACE)
        assert (report.num_imported, report.num_known) == ((4, 0) if attempt == 0 else (0, 4))
    assert source.given == ["e/0"]  # for the digest
    assert len(stored(tmp_path / "store")) == 4


def test_what_was_added_to_the_data_set_is_added_to_the_store(tmp_path: Path) -> None:
    for num, new in ((2, 2), (5, 3)):
        with open_import_target(str(tmp_path / "store")) as target:
            assert import_episodes(some(num), target, PLACE).num_imported == new


def test_another_data_set_of_the_same_name_is_another(tmp_path: Path) -> None:
    other = some()
    other.all["e/0"] = random_episode(small_spec(), 3, 99)
    with open_import_target(str(tmp_path / "store")) as target:
        for source in (some(), other):
            assert import_episodes(source, target, PLACE).num_imported == 4


def test_a_data_set_that_was_moved_is_not_imported_again(tmp_path: Path) -> None:
    """The name of its directory changed, what is in it did not."""
    changed = some(5)  # one episode is new, and one is no longer what it was
    changed.all["e/2"] = random_episode(small_spec(), 7, 99)
    with open_import_target(str(tmp_path / "store")) as target:
        assert import_episodes(some(), target, PLACE).num_imported == 4
        for source, num_imported, num_known in ((some(), 0, 4), (changed, 2, 3), (changed, 0, 5)):
            report = import_episodes(source, target, parse_dataset_path("rlds:elsewhere"))
            assert (report.num_imported, report.num_known) == (num_imported, num_known)
        assert import_episodes(some(), target, parse_dataset_path("lerobot:kitchen")).num_imported == 4
    assert len(stored(tmp_path / "store")) == 10


def test_equal_episodes_of_one_data_set_are_all_imported(tmp_path: Path) -> None:
    episode = random_episode(small_spec(), 3, 0)
    twins = Made(small_spec(), {"e/0": episode, "e/1": episode})
    with open_import_target(str(tmp_path / "store")) as target:
        assert import_episodes(twins, target, PLACE).num_imported == 2


def test_what_was_deleted_stays_deleted(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        import_episodes(some(), StoreImportTarget(store), PLACE)
        store.delete([2])
        assert import_episodes(some(), StoreImportTarget(store), PLACE).num_known == 4
    assert len(stored(tmp_path / "store")) == 3


def test_damage_in_the_middle_leaves_whole_episodes_and_mended_data_goes_on(tmp_path: Path) -> None:
    source = some()
    source.good = 2
    with (
        open_import_target(str(tmp_path / "store")) as target,
        pytest.raises(FormatError, match="the rest is damaged"),
    ):
        import_episodes(source, target, PLACE)
    assert len(stored(tmp_path / "store")) == 2
    with open_import_target(str(tmp_path / "store")) as target:
        assert import_episodes(some(), target, PLACE).num_known == 2
    pairs = zip(stored(tmp_path / "store"), some().all.values(), strict=True)
    assert all(without_origin(mine).equals(wanted) for mine, wanted in pairs)


@pytest.mark.parametrize("kind", ["demonstration", "practice", "correction", None])
def test_what_the_episodes_are(tmp_path: Path, kind: str | None) -> None:
    with open_import_target(str(tmp_path / "store")) as target:
        import_episodes(some(1), target, PLACE, kind=kind)  # type: ignore[arg-type]
    assert stored(tmp_path / "store")[0].info.kind == (kind or "practice")


def test_values_out_of_bounds_or_not_finite_are_refused(tmp_path: Path) -> None:
    spec = replace(small_spec(), action=Spec(ArraySpec(shape=(2,), dtype="float32", low=-1, high=1)))
    wild = Made(spec, {"wild": random_episode(small_spec(), 3, 1)})
    with (
        open_import_target(str(tmp_path / "store")) as target,
        pytest.raises(FormatError, match="kitchen: wild: action"),
    ):
        import_episodes(wild, target, PLACE)
    endless = some(1)
    endless.all["e/0"].reward[1] = np.inf
    with (
        open_import_target(str(tmp_path / "store")) as target,
        pytest.raises(FormatError, match="e/0: reward: expected finite"),
    ):
        import_episodes(endless, target, PLACE)
    assert stored(tmp_path / "store") == []


def test_an_episode_that_was_never_ended_is_cut(tmp_path: Path) -> None:
    source = some(1)
    source.all["e/0"].terminated[-1] = False
    with open_import_target(str(tmp_path / "store")) as target:
        import_episodes(source, target, PLACE)
    with Reader(tmp_path / "store") as reader:
        (record,) = reader.episodes()
        assert (record.state, record.num_steps) == ("cut", 3)
        assert without_origin(reader.read(1)).equals(source.all["e/0"])


def test_import_into_a_server(tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store, Server(store, ServerConfig(port=0)) as server:
        with open_import_target(server.address) as target:
            assert import_episodes(some(3), target, PLACE).num_imported == 3
        with open_import_target(server.address) as target:
            report = import_episodes(some(5), target, PLACE, kind="demonstration")
            assert (report.num_imported, report.num_known) == (2, 3)
        with open_import_target(server.address) as target:
            moved = parse_dataset_path("rlds:it's elsewhere")
            for num, counted in ((5, (0, 5)), (6, (1, 5))):
                report = import_episodes(some(num), target, moved)
                assert (report.num_imported, report.num_known) == counted
    found = stored(tmp_path / "store")
    assert [episode.info.kind for episode in found[3:5]] == ["demonstration"] * 2
    for mine, wanted in zip(found, some(6).all.values(), strict=True):
        kept = replace(without_origin(mine), info=wanted.info)
        assert kept.equals(wanted)
        assert without_origin(mine).info.split == "train"
        assert mine.info.labels["colour"] == "red"


# ---- the other way


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with open_import_target(str(tmp_path / "store")) as target:
        import_episodes(some(5), target, PLACE)
    return tmp_path / "store"


def test_what_is_exported_and_imported_again_is_the_same(tmp_path: Path, store: Path) -> None:
    place = parse_dataset_path(f"rlds:{tmp_path}/out")
    report = export_episodes(store, place)
    assert (report.num_episodes, report.num_steps) == (5, 3 + 4 + 5 + 6 + 7)
    source = place.format.read(place.path, {})
    for (_, mine), wanted in zip(source.episodes(), stored(store), strict=True):
        assert mine.equals(wanted)


def test_where_chooses(tmp_path: Path, store: Path) -> None:
    place = parse_dataset_path(f"rlds:{tmp_path}/out")
    assert export_episodes(store, place, where="success = 1 and num_steps > 3").num_episodes == 2
    for where, text in (
        ("succes = 1", "there is no column 'succes'"),
        ("task = 'none'", "no episode matches \"task = 'none'\""),
    ):
        with pytest.raises(StoreError, match=text):
            export_episodes(store, parse_dataset_path(f"rlds:{tmp_path}/other"), where=where)
    assert not (tmp_path / "other").exists()


def test_an_export_that_fails_leaves_nothing(tmp_path: Path, store: Path) -> None:
    place = parse_dataset_path(f"rlds:{tmp_path}/out")

    def stop(done: int, of: int | None) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_episodes(store, place, progress=stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]


def test_episodes_of_different_specs_are_not_one_data_set(tmp_path: Path, store: Path) -> None:
    spec, episode = CANONICAL["nested"]()
    with open_import_target(str(store)) as target:
        import_episodes(Made(spec, {"n": episode}), target, PLACE)
    with pytest.raises(StoreError, match=r"5 of spec 1, 1 of spec 2.*choose with --where 'spec = 1'"):
        export_episodes(store, parse_dataset_path(f"rlds:{tmp_path}/out"))
    assert export_episodes(store, parse_dataset_path(f"rlds:{tmp_path}/out"), where="spec = 2").num_episodes == 1


def test_what_is_open_is_exported_as_far_as_it_is_known(tmp_path: Path, store: Path) -> None:
    with Store.open(store) as opened:
        writer = opened.writer("now", small_spec())
        for length in (1, 3):
            writer.begin()
            for step in list(random_episode(small_spec(), 5, 1).steps())[:length]:
                writer.append(step)
            writer.flush()
            if length == 1:
                writer.cut()
        report = export_episodes(store, parse_dataset_path(f"rlds:{tmp_path}/out"))
    assert (report.num_episodes, report.num_unfinished) == (6, 1)


def test_a_place_has_a_format_a_path_and_options() -> None:
    place = parse_dataset_path("rlds:a/b?split=train&last=step")
    assert isinstance(place, DatasetPath)
    assert (place.path, place.options) == (Path("a/b"), {"split": "train", "last": "step"})


@pytest.mark.parametrize("page", ["importing.md", "rlds.md"])
def test_the_code_of_the_docs_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_page(DOCS / page) == 1
