"""Reads demonstrations that Understudy wrote, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Container
from dataclasses import replace
from functools import partial
from typing import Any

from understudy.core import Episode, EpisodeInfo, StepSpec
from understudy.core import tree as trees
from understudy.formats.format import FormatError
from understudy.formats.hdf5 import Group, Hdf5Reader
from understudy.formats.hdf5.columns import column_from
from understudy.formats.robomimic.writer import ABOUT, BARE, UNDERSTUDY


def exact_episode(spec: StepSpec, reader: Hdf5Reader, group: Group, skip: Container[str]) -> tuple[str, Episode] | None:
    """The key and the episode; None if the key is in `skip`."""
    try:
        about = json.loads(reader.read(f"{group.path}/{ABOUT}").tobytes())
        key, info = str(about["key"]), EpisodeInfo(**about["info"])
        num_steps = int(group.attrs["num_samples"])
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise FormatError(f"{ABOUT}: {error}; the file is damaged") from None
    if key in skip:
        return None
    columns: dict[str, Any] = {}

    def read(name: str, part: str) -> Any:
        name = trees.join(name, part)
        if name not in group.datasets:
            raise FormatError(f"{name}: is missing; the file is damaged")
        if group.datasets[name].shape[:1] > (2**31,):
            raise FormatError(f"{name}: has too many rows; the file is damaged")
        return reader.read(f"{group.path}/{name}")

    for path, leaf in spec.columns.items():
        if path == "is_step":
            continue
        try:
            if path.partition("/")[0] == "observation":
                name = path.partition("/")[2] or BARE
                before = column_from(leaf, partial(read, f"obs/{name}"), num_steps)
                after = column_from(leaf, partial(read, f"next_obs/{name}"), num_steps)
                columns[path] = [*before, *after[-1:]]
            else:
                if path.partition("/")[0] == "proposal":  # zero without a proposal, also outside the bounds
                    leaf = replace(leaf, low=None, high=None)
                columns[path] = column_from(leaf, partial(read, f"{UNDERSTUDY}/{path}"), num_steps)
        except FormatError as error:
            raise FormatError(f"{path}: {error}") from None
    return key, _checked(spec, columns, info)


def _checked(spec: StepSpec, columns: dict[str, Any], info: EpisodeInfo) -> Episode:
    """Build the episode step by step, so that every value and flag is checked."""
    rows = {
        path: column if path.partition("/")[0] == "observation" else [*column, None] for path, column in columns.items()
    }
    loose = Episode.from_columns(rows, info)
    return Episode.from_steps(spec, list(loose.steps()), loose.last_observation, info)
