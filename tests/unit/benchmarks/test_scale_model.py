"""The model of scale: numbers worked out by hand, every assumption counts, and the first to run out is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from benchmarks.scale_machine import Used, verdict
from benchmarks.scale_model import (
    RESOURCES,
    Costs,
    Load,
    Node,
    cores_per_env,
    costs_of,
    first_full,
    here,
    most_envs,
    shares,
)

COSTS = Costs(
    server_s_per_gb=2.0,
    writer_s_per_gb=1.0,
    writer_idle_cores=0.01,
    draw_server_s_per_gb=0.5,
    draw_learner_s_per_gb=1.5,
    shard_gb_s=0.5,
    disk_amplification=1.1,
)
NODE = Node(cores=10, disk_gb_s=1.0, nic_gb_s=2.0, memory_gb=100.0, shards=2)
LOAD = Load(
    envs=100,
    rate_hz=10.0,
    row_bytes=1_000_000,
    env_s_per_step=0.02,
    env_memory_gb=0.5,
    batches_s=8.0,
    batch_bytes=250_000_000,
)


def test_shares_are_those_worked_out_by_hand() -> None:
    # 1,000 steps/s: 1 GB/s in; 2 GB/s out; 4 nodes. CPU: 20 simulators + 1 idle + 2 + 1 of writing + 4 of drawing.
    wanted = {"CPU": 28 / 40, "disk": 1.1 / 4, "network": 3 * 0.75 / 8, "shard": 1 / 4, "memory": 50 / 400}
    assert shares(LOAD, 4, NODE, COSTS) == pytest.approx(wanted)
    assert first_full(LOAD, 4, NODE, COSTS) == ("CPU", pytest.approx(0.7))
    assert cores_per_env(LOAD, COSTS) == pytest.approx(0.2 + 0.01 + 0.03)


def test_environments_elsewhere_bring_their_own_machines_and_all_of_it_comes_in() -> None:
    wanted = {"CPU": 6 / 40, "disk": 1.1 / 4, "network": (1 + 2 * 0.75) / 8, "shard": 1 / 4, "memory": 0}
    assert shares(replace(LOAD, inside=False), 4, NODE, COSTS) == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("what", "name", "resources"),
    [
        ("costs", "server_s_per_gb", {"CPU"}),
        ("costs", "writer_s_per_gb", {"CPU"}),
        ("costs", "writer_idle_cores", {"CPU"}),
        ("costs", "draw_server_s_per_gb", {"CPU"}),
        ("costs", "draw_learner_s_per_gb", {"CPU"}),
        ("costs", "shard_gb_s", {"shard"}),
        ("costs", "disk_amplification", {"disk"}),
        ("node", "cores", {"CPU"}),
        ("node", "disk_gb_s", {"disk"}),
        ("node", "nic_gb_s", {"network"}),
        ("node", "memory_gb", {"memory"}),
        ("node", "shards", {"shard"}),
        ("load", "envs", set(RESOURCES)),
        ("load", "rate_hz", {"CPU", "disk", "network", "shard"}),
        ("load", "row_bytes", {"CPU", "disk", "network", "shard"}),
        ("load", "env_s_per_step", {"CPU"}),
        ("load", "env_memory_gb", {"memory"}),
        ("load", "batches_s", {"CPU", "network"}),
        ("load", "batch_bytes", {"CPU", "network"}),
    ],
)
def test_each_assumption_moves_what_it_is_about_and_nothing_else(what: str, name: str, resources: set[str]) -> None:
    given: dict[str, Any] = {"costs": COSTS, "node": NODE, "load": LOAD}
    before = shares(given["load"], 4, given["node"], given["costs"])
    given[what] = replace(given[what], **{name: 2 * getattr(given[what], name)})
    after = shares(given["load"], 4, given["node"], given["costs"])
    assert {one for one in RESOURCES if after[one] != pytest.approx(before[one])} == resources


@pytest.mark.parametrize("nodes", [1, 4, 16])
@pytest.mark.parametrize("inside", [True, False])
def test_with_the_most_environments_one_resource_is_at_the_limit_and_none_beyond(nodes: int, inside: bool) -> None:
    load = replace(LOAD, inside=inside)
    most, which = most_envs(load, nodes, NODE, COSTS, limit=0.8)
    found = shares(replace(load, envs=most), nodes, NODE, COSTS)
    assert most > 0
    assert found[which] == pytest.approx(0.8)
    assert max(found.values()) == pytest.approx(0.8)


def test_nothing_is_left_where_learners_take_it_all() -> None:
    assert most_envs(replace(LOAD, batches_s=1e4), 4, NODE, COSTS)[0] == 0.0
    with pytest.raises(ValueError, match="environments cost nothing here"):
        most_envs(replace(LOAD, rate_hz=0.0, env_memory_gb=0.0), 4, NODE, replace(COSTS, writer_idle_cores=0.0))
    with pytest.raises(ValueError, match=r"shard_gb_s: expected a cost above 0, got 0"):
        replace(COSTS, shard_gb_s=0)


def used(**given: float) -> Used:
    cores = {role: given.pop(role, 0.0) for role in ("servers", "writers", "learner")}
    zero = dict.fromkeys(
        (
            "other_cores",
            "busiest_server_thread",
            "busiest_writer_thread",
            "disk_mb_s",
            "disk_busy",
            "loopback_mb_s",
            "rows_s",
            "chunk_mb_s",
            "batches_s",
        ),
        0.0,
    )
    return Used(seconds=1.0, cores=cores, **{**zero, **given})


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"servers": 1.0, "writers": 0.5, "other_cores": 0.4}, "CPU, most of ours in servers"),
        ({"servers": 0.3, "writers": 0.3, "other_cores": 1.3}, "CPU, most of it not ours"),
        ({"servers": 0.5, "writers": 1.4}, "CPU, most of ours in writers"),
        ({"servers": 0.2, "disk_mb_s": 900.0}, "disk"),
        ({"servers": 0.95, "busiest_server_thread": 0.9}, "one thread of a server"),
        ({"writers": 1.0, "busiest_writer_thread": 0.97}, "one thread of a writer"),
        ({"servers": 0.5, "disk_mb_s": 400.0}, "waiting (disk is fullest)"),
    ],
)
def test_the_verdict_names_what_is_full(given: dict[str, float], wanted: str) -> None:
    assert verdict(used(**given), 2, 1000.0).limit == wanted


def figures() -> dict[str, Any]:
    """Of a study with two numbers of environments, round numbers throughout."""

    def one(envs: int, servers: float, writers: float, gb_s: float, idle: float) -> dict[str, Any]:
        full = {"cores": {"servers": servers, "writers": writers}, "chunk_mb_s": 1e3 * gb_s, "disk_mb_s": 1.2e3 * gb_s}
        alone = {"cores": {"servers": 0.4, "writers": idle, "learner": 0.6}, "batches_s": 4 * 8.0}
        return {"envs": envs, "full": full, "alone": alone}

    points = [
        {"envs": 10, "rounds": [one(10, 0.8, 0.404, 0.4, 0.0)]},
        {"envs": 1000, "rounds": [one(1000, 0.6, 1.2, 0.2, 0.4)] * 3},
    ]
    study = {"shards": 4, "batch_bytes": 50_000_000, "cores": 2, "row_bytes": 100_000}
    return {"study": study, "points": points, "one_shard": [one(8, 0.5, 0.5, 0.5, 0.0)]}


def test_costs_come_from_the_figures() -> None:
    wanted = Costs(
        server_s_per_gb=2.0,
        writer_s_per_gb=1.0,
        writer_idle_cores=0.0004,
        draw_server_s_per_gb=1.0,
        draw_learner_s_per_gb=1.5,
        shard_gb_s=0.5,
        disk_amplification=1.2,
    )
    got = costs_of(figures(), 10)
    assert vars(got) == pytest.approx(vars(wanted))
    assert costs_of(figures()).server_s_per_gb == pytest.approx(3.0)  # of the largest
    empty = figures()
    empty["points"][0]["rounds"][0]["full"]["chunk_mb_s"] = 0.0
    with pytest.raises(ValueError, match="10 environments: nothing became durable or was drawn"):
        costs_of(empty, 10)
    # 2 cores, 0.5 of others, 0.4 of idle writers: 1.1 cores at 3 s/GB are 0.367 GB/s.
    assert here(figures(), 1000, 0.5, got) == pytest.approx(1.1 / 3 * 1e9 / 100_000)
