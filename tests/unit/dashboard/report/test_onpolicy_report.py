"""Reports and views of runs that go on in iterations, and of supervised fine-tuning: real ones, as far as they came."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro

pytest.importorskip("transformers")

from tests.unit.training.onpolicy.making import make_config, save_policy

from understudy.algorithms.onpolicy.policy_gradient import PolicyGradientConfig
from understudy.cli import main
from understudy.dashboard.api.app import overview
from understudy.dashboard.api.curves import MetricsFollower
from understudy.dashboard.api.rollout_groups import RolloutGroups
from understudy.dashboard.api.targets import Target
from understudy.dashboard.report.repeat_command import command_of, evaluation_of
from understudy.dashboard.report.report import Report, write_report
from understudy.dashboard.report.run_data import read_run
from understudy.dashboard.server import WatchServer
from understudy.training.onpolicy.config import ESTIMATORS, OnPolicyConfig, default_config
from understudy.training.onpolicy.onpolicy_run import OnPolicyRun
from understudy.training.onpolicy.sft import SFTConfig
from understudy.training.runs.config import to_json
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import Run
from understudy.training.runs.wilson_interval import wilson_interval

FIGURES = {"learning", "groups", "lengths", "by_task", "losses"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run of two tasks: three iterations, three evaluations, videos, and groups that were dropped."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("groups")
    config = make_config(
        save_policy(directory / "policy.safetensors"),
        iterations=3,
        eval_every=2,
        plan={"n_samples": 4, "max_waves": 2},
        filters={"accuracy_lower_bound": 0.3, "accuracy_upper_bound": 0.7},
        evaluation={"episodes": 8, "temperature": 1.5, "videos": 1},
    )
    with OnPolicyRun(Run.create(directory / "grpo", "grpo", config)) as run:
        run.run()
    return directory / "grpo"


@pytest.fixture(scope="module")
def written(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return write_report(finished, tmp_path_factory.mktemp("written"))


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    return list(read_metrics(run / "metrics.jsonl", kind))


# ---- the report


def test_it_speaks_of_iterations_groups_and_tasks(finished: Path, written: Report) -> None:
    text = written.html.read_text()
    assert written.missing == ()
    last = lines(finished, "evaluation")[-1]
    assert f"<b>{100 * last['success']:.0f} %</b> of 8 held-out episodes, actions sampled at temperature 1.5" in text
    assert "after 3 iterations; held-out: starts of the eval split, which training never sees" in text
    assert "<dt>iterations</dt><dd>3 of 3</dd>" in text
    assert "<dt>algorithm</dt><dd>GRPO</dd>" in text
    assert not re.search("human|demonstration", re.sub(r"base64,[^']*", "", text))
    for name, task in last["tasks"].items():
        row = f"<td>{name}</td><td><b>{100 * task['success']:.0f} %</b></td>"
        assert f"{row}<td>{100 * task['low']:.0f} to {100 * task['high']:.0f} %</td><td>4</td>" in text
    assert "<th>iteration</th>" in text
    assert re.findall(r"<tr><td>(\d)</td><td>[\d,]+</td><td><b>", text) == ["3", "2", "0"]  # evaluations, newest first
    assert text.count("data:image/gif;base64,") == 1
    assert {path.stem for path in written.figures} == FIGURES


def test_groups_are_counted_by_what_became_of_them(finished: Path, written: Report) -> None:
    collected = lines(finished, "collection")
    kept = sum(line["kept"] for line in collected)
    dropped = {name: sum(line["rejected"].get(name, 0) for line in collected) for name in ("too hard", "too easy")}
    assert sum(dropped.values()) > 0
    said = re.search(r"<dt>groups</dt><dd>(.*?)</dd>", written.html.read_text())
    assert said is not None
    assert said[1].startswith(f"{kept} kept; dropped: ")
    for name, number in dropped.items():
        assert (f"{number} {name}" in said[1]) == (number > 0)


def test_how_to_repeat_it(finished: Path, written: Report) -> None:
    text = written.html.read_text()
    config = read_run(finished).config
    assert f"understudy train grpo again --policy {config['policy']}" in text
    assert "understudy evaluate again --episodes 8 --sampled --temperature 1.5" in text
    assert "# --policy must be the same initial policy: a file, or the run that trained it" in text


def test_one_that_has_only_begun_says_what_is_missing(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "ppo", default_config("ppo", policy="somewhere"))
    written = write_report(run.path)
    assert written.missing == (
        f"no evaluation yet; the first comes before the first iteration, or with `understudy evaluate {run.path}`",
        "no updates yet, so there are no losses to plot",
        "no iteration has ended yet",
    )
    assert "<dt>algorithm</dt><dd>PPO</dd>" in written.html.read_text()


def test_a_benchmark_score_is_not_called_held_out(finished: Path, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "rloo", default_config("rloo", policy="somewhere"))
    (run.path / "evaluations").mkdir()
    (finished / "evaluations").mkdir(exist_ok=True)
    assert (
        main(
            [
                "evaluate",
                str(finished),
                "--split",
                "all",
                "--episodes",
                "4",
                "--workers",
                "1",
                "--out",
                str(run.path / "evaluations"),
            ]
        )
        == 0
    )
    text = write_report(run.path).html.read_text()
    assert "of 4 benchmark episodes, most likely actions" in text
    assert "benchmark: all starts, as in published scores" in text
    assert "held-out episodes" not in text


def test_supervised_fine_tuning(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    run = tmp_path / "sft"
    env = "toy:touch_purple?size=32"
    assert main(["record", str(run / "store"), "--env", env, "--successes", "1"]) == 0
    small = ["--vla.hidden", "16", "--vla.vision-hidden", "16", "--vla.layers", "1", "--vla.vision-layers", "1"]
    assert (
        main(
            [
                "sft",
                str(run),
                "--env",
                env,
                "--updates",
                "3",
                "--report-every",
                "1",
                "--batch-size",
                "4",
                *small,
                "--evaluation.episodes",
                "2",
            ]
        )
        == 0
    )
    written = write_report(run)
    text = written.html.read_text()
    assert written.missing == ("no videos: they need a world with cameras, and `--evaluation.videos 3`",)
    assert " %</b> of 2 held-out episodes, actions sampled at temperature 1 " in text
    assert "<td>touch_purple</td>" in text
    assert "understudy evaluate again --episodes 2 --sampled --temperature 1.0" in text
    assert "<dt>algorithm</dt><dd>supervised fine-tuning</dd>" in text
    assert "<dt>updates</dt><dd>3</dd>" in text
    assert "<dt>demonstrations</dt><dd>1 (" in text
    assert "by the human" not in text
    assert "understudy sft again --env" in text
    assert {path.stem for path in written.figures} == {"losses"}


# ---- the command that asks for the same

MARKERS = (tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands)  # those of cli/main.py


@pytest.mark.parametrize("kind", list(ESTIMATORS))
def test_the_command_of_a_kind_gives_only_what_differs(kind: str) -> None:
    default = default_config(kind, policy="my run")
    assert shlex.split(command_of(kind, to_json(default))) == [
        "understudy",
        "train",
        kind,
        "again",
        "--policy",
        "my run",
    ]
    algorithm = PolicyGradientConfig(
        adv_estimator=ESTIMATORS[kind], shuffle=False, kl_in="loss", whiten_advantages=True
    )
    changed = replace(default, iterations=7, max_steps=20, sinks=("tensorboard",), algorithm=algorithm)
    _, _, _, _, *options = shlex.split(command_of(kind, to_json(changed)))
    assert tyro.cli(OnPolicyConfig, default=default_config(kind, policy=""), args=options, config=MARKERS) == changed


def test_the_command_of_supervised_fine_tuning() -> None:
    config = SFTConfig(env="toy", demos="a b", updates=5)
    name, verb, target, *options = shlex.split(command_of("sft", to_json(config)))
    assert (name, verb, target) == ("understudy", "sft", "again")
    assert tyro.cli(SFTConfig, default=SFTConfig(), args=options, config=MARKERS) == config


def test_an_evaluation_is_asked_for_as_it_was() -> None:
    config = to_json(default_config("grpo", policy="p"))
    config["evaluation"] |= {"sampling": "greedy", "protocol": "benchmark", "split": "train", "episodes": 3}
    assert evaluation_of("grpo", config) == "understudy evaluate again --episodes 3 --split train"
    assert evaluation_of("rlpd", {}) == "understudy evaluate again"


# ---- the page


def test_the_page_is_told_of_practice(finished: Path) -> None:
    target = Target(finished, "grpo")
    said = overview(target)
    target.close()
    collected = lines(finished, "collection")
    groups = said["metrics"]["rollout_groups"]
    assert groups["iterations"] == 3
    assert groups["kept"] == sum(line["kept"] for line in collected)
    for task in groups["tasks"]:
        counts = [line["tasks"][task["task"]] for line in collected if task["task"] in line["tasks"]]
        successes, episodes = (sum(count[name] for count in counts) for name in ("successes", "episodes"))
        assert (task["all"]["successes"], task["all"]["episodes"]) == (successes, episodes)
        assert (task["all"]["low"], task["all"]["high"]) == wilson_interval(successes, episodes)
    curve = said["metrics"]["curves"]["collection"]
    shares = [
        sum(t["successes"] for t in line["tasks"].values()) / sum(t["episodes"] for t in line["tasks"].values())
        for line in collected
    ]
    assert curve["values"]["success"] == shares
    assert [one["iteration"] for one in said["metrics"]["evaluations"]] == [0, 2, 3]
    assert said["metrics"]["evaluations"][-1]["sampling"] == "sampled"
    assert {score["task"] for score in said["scores"]} == {"left-0", "right-1"}


def test_a_run_that_is_taken_back_counts_its_groups_again(finished: Path, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = (finished / "metrics.jsonl").read_bytes()
    path.write_bytes(whole)
    follower = MetricsFollower(path)
    assert follower.follow()["rollout_groups"]["iterations"] == 3
    second = [number for number, line in enumerate(whole.splitlines()) if b'"collection"' in line][1]
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:second]))
    assert follower.follow()["rollout_groups"]["iterations"] == 1


def test_lately_is_the_last_iterations() -> None:
    groups = RolloutGroups(recent=2)
    for won in (4, 1, 2):
        groups.add({"kept": 1, "rejected": {}, "tasks": {"a": {"episodes": 4, "successes": won}}})
    (task,) = groups.to_json()["tasks"]
    assert (task["all"]["successes"], task["all"]["episodes"]) == (7, 12)
    assert (task["recent"]["successes"], task["recent"]["episodes"]) == (3, 8)


def test_a_reason_that_came_once_is_0_afterwards() -> None:
    groups = RolloutGroups()
    tasks = {"a": {"episodes": 2, "successes": 1}}
    assert groups.add({"kept": 1, "rejected": {"too easy": 2}, "tasks": tasks})["dropped too easy"] == 2
    assert groups.add({"kept": 3, "rejected": {}, "tasks": tasks}) == {
        "kept": 3,
        "dropped too easy": 0,
        "success": 0.5,
    }


@pytest.mark.parametrize(
    "line",
    [{}, {"kept": "x", "rejected": 3, "tasks": []}, {"tasks": {"a": 1, "b": {"episodes": None, "successes": 5}}}],
)
def test_a_line_that_is_not_one_counts_as_nothing(line: dict[str, Any]) -> None:
    groups = RolloutGroups()
    groups.add(line)
    json.dumps(groups.to_json())
    assert groups.to_json()["kept"] == 0


def test_a_browser_shows_every_view_of_it(page: Any, finished: Path) -> None:
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    with WatchServer([finished]) as server:
        for view, words in (
            ("overview", "evaluation, held-out starts, sampled at temperature 1.5"),
            ("episodes", "left-0"),
            ("episode/1", "1. action 1"),
            ("interventions", "In a run of grpo, the policy acts without an operator."),
            ("replay", "one row each"),
            ("health", "grpo"),
            ("runs", "held-out starts, sampled at temperature 1.5"),
        ):
            page.goto(f"{server.url}#/0/{view}")
            page.get_by_text(words).locator("visible=true").first.wait_for()  # not one in a closed list
            if view == "overview":
                said = page.locator("body").inner_text()
    assert wrong == []
    assert "Intervention rate" not in said
    assert "evaluated after 3 iterations, 8 episodes" in said
    assert re.search(r"iterations\s+3\s+of 3", said)
    assert "rollouts of the last 3 iterations" in said
    assert re.search(r"kept\s*\d+", said)
