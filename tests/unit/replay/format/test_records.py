"""Records: an episode as a row of the catalog, and back."""

from dataclasses import replace
from pathlib import Path

import pytest

from understudy.core import DamageError, EpisodeInfo
from understudy.replay.format.records import (
    ATTRIBUTE_COLUMNS,
    EPISODE_COLUMNS,
    EpisodeRecord,
    attribute_values,
    decode_episode,
    editable_fields,
    encode_episode,
    info_from_json,
    info_to_json,
    with_labels,
)

INFO = EpisodeInfo(task="pick", seed=3, group="g", success=False, labels={"b": "2", "a": "1"}, split="train")
RECORD = EpisodeRecord(
    id=4, writer=1, number=0, spec=2, state="cut", info=INFO, num_rows=7, begun=3, changed=5, begun_at=1.5, deleted=9
)


def test_a_row_comes_back() -> None:
    row = encode_episode(RECORD)
    assert len(row) == len(EPISODE_COLUMNS)
    assert decode_episode(tuple(row), Path("c")) == RECORD
    assert decode_episode(tuple(encode_episode(replace(RECORD, purged=True))), Path("c")).purged is True


@pytest.mark.parametrize("column", ["num_rows", "task", "success", "labels"])
def test_a_changed_value_is_damage(column: str) -> None:
    row = encode_episode(RECORD)
    row[EPISODE_COLUMNS.index(column)] = {"labels": "{}", "task": "place"}.get(column, 1)
    with pytest.raises(DamageError, match="c: episode 4 is not as it was written; run `understudy repair`"):
        decode_episode(tuple(row), Path("c"))
    assert decode_episode(tuple(row), Path("c"), check=False) != RECORD


def test_attributes_in_json_are_those_that_are_not_defaults() -> None:
    assert info_to_json(EpisodeInfo()) == {}
    assert info_from_json(info_to_json(INFO)) == INFO
    assert editable_fields(RECORD) == ("cut", 9, info_to_json(INFO))
    values = dict(zip(ATTRIBUTE_COLUMNS, attribute_values("cut", INFO), strict=True))
    assert (values["state"], values["group_key"], values["success"]) == ("cut", "g", 0)
    assert values["labels"] == '{"a": "1", "b": "2"}'


def test_labels_are_set_and_removed() -> None:
    assert with_labels(RECORD, {"a": None, "c": "3"}, 11).info.labels == {"b": "2", "c": "3"}
    assert with_labels(RECORD, {}, 11).changed == 11
