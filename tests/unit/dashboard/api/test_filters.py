"""Each filter picks what it says, and what waits in the inbox counts."""

from collections.abc import Callable
from pathlib import Path

import pytest

from understudy.core import StoreError
from understudy.dashboard.api.episode_queries import list_episodes
from understudy.dashboard.api.filters import Filter, Overlay
from understudy.dashboard.api.targets import Target
from understudy.replay import EpisodeRecord, Reader, Store
from understudy.replay.write.edit_requests import EditRequest

CASES: list[tuple[dict[str, str], Callable[[EpisodeRecord], bool]]] = [
    ({"task": "pick"}, lambda e: e.info.task == "pick"),
    ({"task": "(none)"}, lambda e: e.info.task is None),
    ({"kind": "demonstration"}, lambda e: e.info.kind == "demonstration"),
    ({"actor": "arm-1"}, lambda e: e.info.actor == "arm-1"),
    ({"operator": "ada"}, lambda e: e.info.operator == "ada"),
    ({"split": "eval"}, lambda e: e.info.split == "eval"),
    ({"success": "yes"}, lambda e: e.info.success is True),
    ({"success": "no"}, lambda e: e.info.success is False),
    ({"success": "unknown"}, lambda e: e.info.success is None),
    ({"source": "human"}, lambda e: e.num_human > 0),
    ({"source": "script"}, lambda e: e.num_script > 0),
    ({"label": "look"}, lambda e: "look" in e.info.labels),
    ({"label": "intervention_count=2"}, lambda e: e.info.labels.get("intervention_count") == "2"),
    ({"label": "look=never"}, lambda e: False),
    ({"text": "number 1"}, lambda e: "number 1" in (e.info.instruction or "")),
    ({"text": "AGAIN"}, lambda e: e.info.labels.get("look") == "again"),
    ({"text": "5"}, lambda e: e.id == 5 or "5" in f"{e.info.instruction}{e.info.labels}"),
    ({"text": "%"}, lambda e: False),
    ({"text": "'; drop table episodes; --"}, lambda e: False),
    ({"upto": "4"}, lambda e: e.id <= 4),
    ({"state": "ended"}, lambda e: e.state == "ended"),
    ({"state": "cut"}, lambda e: False),
    (
        {"task": "press", "success": "no", "actor": "local"},
        lambda e: e.info.task == "press" and e.info.success is False and e.info.actor == "local",
    ),
]


@pytest.fixture
def records(store: Path) -> list[EpisodeRecord]:
    with Reader(store) as reader:
        return list(reader.episodes())


def ids(target: Target, **words: str) -> list[int]:
    return [row["id"] for row in list_episodes(target, Filter.parse(words), 0, 300)["rows"]]


@pytest.mark.parametrize(("words", "fits"), CASES, ids=[" ".join(map(str, case[0].items())) for case in CASES])
def test_a_filter_picks_what_it_says(
    words: dict[str, str], fits: Callable[[EpisodeRecord], bool], target: Target, records: list[EpisodeRecord]
) -> None:
    assert sorted(ids(target, **words)) == [record.id for record in records if fits(record)]


def test_times(target: Target, records: list[EpisodeRecord]) -> None:
    middle = records[5].begun_at
    assert sorted(ids(target, since_s=repr(middle))) == [r.id for r in records if r.begun_at >= middle]
    assert sorted(ids(target, until_s=repr(middle))) == [r.id for r in records if r.begun_at < middle]


@pytest.mark.parametrize(
    ("sort", "key"),
    [
        ("newest", lambda e: -e.id),
        ("oldest", lambda e: e.id),
        ("longest", lambda e: (-e.num_steps, -e.id)),
        ("shortest", lambda e: (e.num_steps, -e.id)),
        ("reward", lambda e: (-e.total_reward, -e.id)),
        ("human", lambda e: (-e.num_human, -e.id)),
    ],
)
def test_orders(
    sort: str, key: Callable[[EpisodeRecord], tuple[int, ...]], target: Target, records: list[EpisodeRecord]
) -> None:
    assert ids(target, sort=sort) == [record.id for record in sorted(records, key=key)]


def test_deleted_ones(target: Target, store: Path) -> None:
    with Store.open(store) as opened:
        opened.delete([2, 3])
    assert 2 not in ids(target)
    assert sorted(ids(target, deleted="only")) == [2, 3]
    assert len(ids(target, deleted="all")) == 12


def test_what_waits_in_the_inbox_counts(target: Target, store: Path) -> None:
    with Store.open(store) as opened:
        opened.delete([2, 3])
    requests = [
        EditRequest(action="restore", episodes=(2,)),
        EditRequest(action="delete", episodes=(5, 6)),
        EditRequest(action="restore", episodes=(6,)),
    ]
    overlay = Overlay.of(requests)
    with target.catalog().reader() as reader:
        for deleted, wanted in (("only", [3, 5]), ("no", [1, 2, 4, *range(6, 13)])):
            where, values = Filter(deleted=deleted).where(overlay, {})
            assert [e.id for e in reader.episodes(where, values)] == wanted


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"success": "maybe"}, "success: expected one of yes, no, unknown, got 'maybe'"),
        ({"sort": "id; drop"}, "sort: expected one of newest"),
        ({"since_s": "yesterday"}, "since_s: expected a number, got 'yesterday'"),
        ({"upto": "1.5"}, "upto: expected a number"),
    ],
)
def test_what_makes_no_sense_is_refused(words: dict[str, str], said: str) -> None:
    with pytest.raises(StoreError, match=said):
        Filter.parse(words)


def test_pages_fit_together(target: Target) -> None:
    pages = [list_episodes(target, Filter(), offset, 5) for offset in (0, 5, 10)]
    assert [len(page["rows"]) for page in pages] == [5, 5, 2]
    assert [row["id"] for page in pages for row in page["rows"]] == list(range(12, 0, -1))
    assert [page["total"] for page in pages] == [12, None, None]  # counted once
    assert pages[0]["steps"] == 72
