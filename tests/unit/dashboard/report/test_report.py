"""Reports: of a finished run, of one at work, of one that has nothing yet; their command asks for the same again."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
import tyro
from PIL import Image
from tests.system.train_process import small_config
from tests.unit.dashboard.clusters import break_some, make_status
from tests.unit.dashboard.stores import copy_of

from understudy.cli import main
from understudy.core import Source
from understudy.core.examples import random_episode, small_spec
from understudy.dashboard.report import report as reports
from understudy.dashboard.report.repeat_command import command_of
from understudy.dashboard.report.report import Report, write_report
from understudy.dashboard.report.run_data import read_run
from understudy.policies import ActorConfig, EncoderConfig
from understudy.replay import Store
from understudy.training.offpolicy.cloning import CloningRunConfig
from understudy.training.offpolicy.local_run import LocalRun
from understudy.training.offpolicy.rlpd import InterventionConfig, RLPDConfig, small_sac
from understudy.training.runs.config import to_json
from understudy.training.runs.evaluate import EvaluationConfig
from understudy.training.runs.health import HEALTH, Health
from understudy.training.runs.metrics import read_metrics
from understudy.training.runs.run import Run

ENV = "toy:touch_purple?size=16"
FIGURES = {"learning", "intervention", "lengths", "age", "losses"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run, with cameras, a human and three evaluations."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("report") / "touch"
    assert main(["record", str(path / "store"), "--env", ENV, "--successes", "2"]) == 0
    state_only = ActorConfig(hidden=(16,), encoder=EncoderConfig(inputs=("state",)))
    config = small_config(
        None,
        env=ENV,
        steps=120,
        start_steps=0,
        batch_size=16,
        cloning_updates=0,
        updates_per_step=1,
        eval_every=60,
        evaluation=EvaluationConfig(episodes=2, videos=1),
        sac=small_config(None).sac.__class__(actor=state_only),
        intervention=InterventionConfig(source="script", patience_steps=5),
    )
    with LocalRun(Run.create(path, "rlpd", config)) as local:
        local.run()
    return path


@pytest.fixture(scope="module")
def written(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    return write_report(finished, tmp_path_factory.mktemp("written"))


def test_all_of_a_finished_run_is_in_it(finished: Path, written: Report) -> None:
    assert written.missing == ()
    text = written.html.read_text()
    lines = list(read_metrics(finished / "metrics.jsonl", "evaluation"))
    assert f"<b>{100 * lines[-1]['success']:.0f} %</b> of 2 held-out episodes" in text
    for line in lines:
        assert f"<td>{line['step']:,}</td><td>{line['update']:,}</td>" in text
        assert line["fingerprint"]["parameters"] in text
        assert f"{100 * line['low']:.1f} to {100 * line['high']:.1f} %" in text
    assert "<span class='state'>finished</span>" in text
    assert text.count("data:image/gif;base64,") == 1  # the worst episode
    assert text.count("data:image/svg+xml;base64,") == len(FIGURES)
    assert "2 (" in text  # demonstrations
    assert "<dt>cluster</dt>" not in text
    assert re.search(r"<dt>successful practice</dt><dd>\d+ of \d+ alone \(\d+ %\)", text)
    assert re.search(r"<b>intervention\.patience_steps: 5</b>", text)  # not the default
    assert "a human" not in text  # it was the script that took over
    assert "Intervention: the script took over in it." in text
    assert "\nseed: 0\n" in text


def test_it_needs_no_other_file_and_no_network(written: Report) -> None:
    text = written.html.read_text()
    assert set(re.findall(r"(?:src|href)='([^']{0,5})", text)) == {"data:"}
    assert not re.search(r"https?://|@import|url\(|<script|<link", re.sub(r"base64,[^']*", "", text))


def test_the_figures_are_files_for_a_paper(finished: Path, written: Report, tmp_path: Path) -> None:
    assert {path.stem for path in written.figures} == FIGURES
    for path in written.figures:
        if path.suffix == ".svg":
            ET.parse(path)
        elif path.suffix == ".png":
            with Image.open(path) as image:
                assert image.width >= 1200
        else:
            assert path.read_bytes().startswith(b"%PDF")
    again = write_report(finished, tmp_path)  # the same run gives the same figures
    for one, other in zip(written.figures, again.figures, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name


def test_videos_that_are_too_large_are_named(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "EMBED_BYTES", 10)
    text = write_report(finished, tmp_path).html.read_text()
    assert "image/gif" not in text
    assert "Too large to embed in this file" in text
    assert "failure.gif" in text or "success.gif" in text


def test_a_browser_shows_it(browser: Any, written: Report) -> None:
    page = browser.new_page(viewport={"width": 1160, "height": 900}, offline=True)
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.goto(written.html.as_uri())
    widths = page.evaluate("Promise.all([...document.images].map(i => i.decode().then(() => i.naturalWidth)))")
    across = page.evaluate("document.documentElement.scrollWidth")
    page.close()
    assert len(widths) == len(FIGURES) + 1
    assert all(width > 100 for width in widths)
    assert across <= 1160  # nothing sticks out
    assert wrong == []


def test_it_is_dark_where_the_reader_wants_that(browser: Any, written: Report) -> None:
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme)
        page.goto(written.html.as_uri())
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        turned = page.evaluate("getComputedStyle(document.querySelector('.plots img')).filter")
        page.close()
        assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 150) == (scheme == "dark")
        assert ("invert" in turned) == (scheme == "dark")


# ---- what is not there


def test_a_run_that_has_only_begun_says_what_is_missing(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "rlpd", RLPDConfig(eval_every=2000))
    written = write_report(run.path)
    assert written.html == run.path / "report" / "report.html"
    assert written.figures == ()
    assert written.missing == (
        f"no evaluation yet; the first comes after 2,000 steps of practice, or with `understudy evaluate {run.path}`",
        "no updates yet, so there are no losses to plot",
        "no episode of practice has ended yet",
        "the store of demonstrations cannot be read from here, so they are not counted",
    )
    text = written.html.read_text()
    assert "not evaluated yet" in text
    assert text.count("<li>") == 4
    assert text.index("<h2>Config</h2>") < text.index("Not in this report")  # a footnote
    assert "class='lost'" not in text


def test_a_running_run_is_read_as_far_as_it_is(finished: Path, tmp_path: Path) -> None:
    path = tmp_path / "copy"
    copy_of(finished, path)
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    first = next(number for number, line in enumerate(lines) if '"evaluation"' in line)
    (path / "metrics.jsonl").write_text("".join(lines[:first]) + lines[first][:50])  # it is writing a line
    shutil.rmtree(path / "videos")
    with Health(path / HEALTH, role="local", name="rlpd"):
        written = write_report(path)
        text = written.html.read_text()
    assert "<span class='state live'>running</span>" in text
    assert written.missing[0].startswith("no evaluation yet; the first comes after 60 steps")
    assert {figure.stem for figure in written.figures} == FIGURES - {"learning"}


def test_the_practice_of_actors_is_read_from_the_store(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "rlpd", RLPDConfig())
    with Store.open(run.store) as store:
        writer = store.writer("arm-1", small_spec())
        for kind, human in (("demonstration", 4), ("practice", 3)):
            episode = random_episode(small_spec(), 4, 1)
            writer.begin(task="t", kind=kind)
            for number, step in enumerate(episode.steps()):
                source = Source.HUMAN if number < human else Source.POLICY
                writer.append(replace(step, source=source, terminated=number == 3, truncated=False))
            writer.end(episode.last_observation, success=True)
    data = read_run(run.path)
    assert data.demonstrations == (1, 4)
    (episode,) = data.episodes
    assert (episode.step, episode.length, episode.human_steps, episode.success) == (4, 4, 3, True)  # type: ignore[attr-defined]


def test_names_are_text_and_not_html(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "<b>run", "rlpd", RLPDConfig(env="toy:<script>alert(1)</script>"))
    text = write_report(run.path).html.read_text()
    assert "<script>" not in text
    assert "&lt;script&gt;" in text
    assert "<b>run" not in text


def test_a_machine_without_torch_can_write_it(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "rlpd", RLPDConfig(seed=3))
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path; from understudy.dashboard.report.report import write_report\n"
        f"write_report(Path({str(run.path)!r}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert "--seed 3" in (run.path / "report" / "report.html").read_text()


# ---- how to repeat it


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("rlpd", RLPDConfig()),
        (
            "rlpd",
            RLPDConfig(
                env="toy:press_button?cameras=false&state=task",
                demos="a b/store",
                steps=7,
                max_pending_updates=100,
                seed=3,
                sinks=("tensorboard", "wandb"),
                intervention=InterventionConfig(source="script", burst_steps=4),
                sac=small_sac().__class__(
                    layer_norm=False,
                    backup_entropy=True,
                    critic_hidden=(8, 9),
                    actor=ActorConfig(encoder=EncoderConfig(inputs=("state",))),
                ),
            ),
        ),
        ("cloning", CloningRunConfig(updates=5, evaluation=EvaluationConfig(episodes=3, split="train"))),
    ],
    ids=["defaults", "everything", "cloning"],
)
def test_the_command_asks_for_the_same(kind: str, config: RLPDConfig | CloningRunConfig) -> None:
    name, verb, which, target, *options = shlex.split(command_of(kind, to_json(config)))
    assert (name, verb, target) == ("understudy", "train", "again")
    assert which == {"rlpd": "rlpd", "cloning": "clone"}[kind]
    assert bool(options) == (config != type(config)())
    markers = (tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands)  # those of cli/main.py
    assert tyro.cli(type(config), default=type(config)(), args=options, config=markers) == config


def test_a_run_on_a_cluster_says_who_worked_and_what_is_lost(finished: Path, tmp_path: Path) -> None:
    run = copy_of(finished, tmp_path / "touch")
    status = make_status(run)
    break_some(status)
    status.write("ended")
    text = write_report(run, tmp_path / "many").html.read_text()
    assert "<dt>cluster</dt><dd>3 nodes: 8 learners, 4 shards, 1,000 rollout workers; 4 restarts, 301 " in text
    lost = "250,002 steps of shard-2: the disk with <code>/data/understudy/press/shard-2</code> was lost"
    assert text.count(lost) == 1
    assert text.index("class='lost'") < text.index(lost) < text.index("<h2>Config</h2>")  # a warning
    assert "<span class='state'>finished</span>" in text
    status.write()
    assert read_run(run).is_running
