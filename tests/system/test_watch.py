"""The page in a real Chromium, beside a real run that is learning: every view, live; changes, and taking them back."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.chromium import open_page
from tests.system.train_process import SAC, small_config
from tests.unit.dashboard.stores import make_store, write_estimates
from tests.waiting import wait_for
from tests.writing import write_episode

from understudy.cli import main
from understudy.core import EpisodeInfo, Source
from understudy.core.examples import random_episode, robot_spec
from understudy.policies.config import EncoderConfig
from understudy.replay import EpisodeRecord, Reader, Store
from understudy.training.runs.health import Health
from understudy.training.runs.metrics import MetricLog
from understudy.training.runs.run import Run

pytest.importorskip("fastapi")
pytest.importorskip("PIL")
WatchServer: Any = pytest.importorskip("understudy.dashboard.server").WatchServer

pytestmark = pytest.mark.xdist_group("browser")

ENV = "toy:touch_purple?size=32&state=task"
AXES = """[...document.querySelectorAll(".chart:has(.line)")]
    .map(chart => [...chart.querySelectorAll(".axis")].map(axis => axis.textContent))"""
VIEWS = ("overview", "episodes", "episode/2", "interventions", "replay", "health", "runs")


def begin(path: Path) -> subprocess.Popen[bytes]:
    """The run, at work in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.system.train_process", str(path), "none"],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


AT_WORK: list[subprocess.Popen[bytes]] = []


@pytest.fixture(scope="module")
def prepared(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where there is a browser to look at it."""
    path = tmp_path_factory.mktemp("watched") / "touch"
    assert main(["record", str(path / "store"), "--env", ENV, "--successes", "3"]) == 0
    sac = replace(SAC, actor=replace(SAC.actor, encoder=EncoderConfig(inputs=("state",))))
    Run.create(path, "rlpd", small_config(None, env=ENV, steps=1_000_000, sac=sac, eval_every=100, checkpoint_every=60))
    yield path
    for process in AT_WORK:
        end(process)


@pytest.fixture(scope="module")
def run(prepared: Path) -> Path:
    """A run that is learning, and has been evaluated."""
    AT_WORK.append(begin(prepared))
    metrics = prepared / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and b"evaluation" in metrics.read_bytes())
    return prepared


@pytest.fixture
def server(run: Path) -> Iterator[Any]:
    with WatchServer([run, run / "store"]) as made:
        yield made


def number(text: str) -> int:
    return int(re.sub(r"\D", "", text) or -1)


def tile(page: Any, name: str) -> str:
    return str(page.locator(".tile", has=page.locator(f"dt:text-is('{name}')")).locator("dd").first.inner_text())


def records(run: Path, where: str = "deleted is null") -> list[EpisodeRecord]:
    with Reader(run / "store") as reader:
        return list(reader.episodes(where))


# ---- while it learns


def test_the_overview_is_live(page: Any, server: Any, run: Path) -> None:
    page.goto(server.url)
    page.locator("#link.on").wait_for()
    page.locator(".score.big").first.wait_for()  # an evaluation
    assert page.locator(".score.big b").inner_text() == "touch_purple"
    assert re.fullmatch(r"\d+ %", page.locator(".score.big strong").inner_text())
    assert re.search(r"\d+ % to \d+ %", page.locator(".score.big .ends").inner_text())
    assert page.locator(".title .pill.good").count() == 1
    before = number(tile(page, "environment steps")), number(tile(page, "updates")), number(tile(page, "episodes"))
    wait_for(lambda: number(tile(page, "environment steps")) > before[0])  # nobody has touched the page
    wait_for(lambda: number(tile(page, "updates")) > before[1])
    assert number(tile(page, "episodes")) >= before[2]
    wait_for(lambda: page.locator(".chart .line").count() > 5)
    wait_for(lambda: page.locator(".mini img").count() > 3)


def test_two_people_see_the_same(browser: Any, server: Any) -> None:
    with open_page(browser) as one, open_page(browser) as other:
        for page in (one, other):
            page.goto(server.url)
            page.locator("#link.on").wait_for()
        before = [number(tile(page, "environment steps")) for page in (one, other)]
        for page, was in zip((one, other), before, strict=True):
            wait_for(lambda page=page, was=was: number(tile(page, "environment steps")) > was)


def test_episodes_are_pictures_and_filters_are_right(page: Any, server: Any, run: Path) -> None:
    page.goto(f"{server.url}#/0/episodes")
    page.locator(".episode img[src]").first.wait_for()
    wait_for(lambda: page.locator(".episode img").first.evaluate("node => node.naturalWidth") == 32)
    assert number(page.locator(".episode").first.get_attribute("data-id")) > 3

    def total() -> int:
        return int(page.locator(".count").get_attribute("data-total"))

    def shown() -> set[int]:
        ids = page.locator(".episode").evaluate_all("nodes => nodes.map(node => node.dataset.id)")
        return {number(one) for one in ids}

    page.locator("select[data-filter=kind]").select_option("demonstration")
    wait_for(lambda: total() == 3)
    assert "kind=demonstration" in page.url
    wait_for(lambda: shown() == {1, 2, 3})
    page.locator("select[data-filter=kind]").select_option("")
    page.locator("select[data-filter=source]").select_option("human")
    human = [record.id for record in records(run) if record.num_human]
    policy = {record.id for record in records(run) if record.state == "ended" and not record.num_human}
    wait_for(lambda: policy.isdisjoint(shown()))
    wait_for(lambda: total() >= len(human))
    wait_for(lambda: set(human[-2:]) <= shown() | set(human[:-20]))
    page.locator("select[data-filter=source]").select_option("")
    page.get_by_label("Search").fill("nothing like this")
    page.get_by_text("No episode matches").wait_for()
    page.get_by_role("button", name="Clear filters").last.click()
    wait_for(lambda: total() > 3)
    before = total()
    wait_for(lambda: total() > before)  # what is lived meanwhile comes by itself


def test_a_change_waits_for_the_run_and_is_applied_and_taken_back(page: Any, server: Any, run: Path) -> None:
    page.goto(f"{server.url}#/0/episodes?kind=demonstration")
    card = page.locator(".episode[data-id='2']")
    card.locator(".pick").click()
    page.locator(".selection").get_by_text("1 episode selected").wait_for()
    AT_WORK[-1].send_signal(signal.SIGSTOP)  # else its next commit may come before the answer to the page
    try:
        page.locator(".selection").get_by_role("button", name="Delete").click()
        page.locator(".toast", has_text="1 episode deleted; the writer applies it with its next commit").wait_for()
    finally:
        AT_WORK[-1].send_signal(signal.SIGCONT)
    wait_for(lambda: card.count() == 0)  # done, as far as the page is concerned
    wait_for(lambda: records(run, "id = 2")[0].deleted)  # and then by the run
    page.locator(".toast").get_by_role("button", name="Undo").click()
    card.wait_for()
    wait_for(lambda: records(run, "id = 2")[0].deleted is None)
    card.locator(".pick").click()
    page.locator(".selection").get_by_role("button", name="Label").click()
    page.get_by_label("Label", exact=True).fill("good, reason=neat")
    page.get_by_label("Your name").fill("ada")
    page.locator("dialog").get_by_role("button", name="Label").click()
    wait_for(lambda: records(run, "id = 2")[0].info.labels.get("reason") == "neat")
    assert records(run, "id = 2")[0].info.labels["good"] == "yes"
    wait_for(lambda: "good, reason" in card.inner_text())
    page.locator("select[data-filter=label]").select_option("reason")
    wait_for(lambda: page.locator(".count").get_attribute("data-total") == "1")


def test_an_episode_is_played_step_by_step(page: Any, server: Any, run: Path) -> None:
    record = wait_for(lambda: next((r for r in reversed(records(run)) if r.num_human and r.state == "ended"), None))
    page.goto(f"{server.url}#/0/episode/{record.id}")
    shown = page.locator(".cameras canvas")
    wait_for(lambda: shown.count() == 2 and shown.first.get_attribute("data-row") == "0")
    assert page.locator(".counter").inner_text() == f"0 / {record.num_steps}"

    def at() -> int:
        return int(page.locator(".counter").inner_text().split(" / ")[0])

    def pixels() -> str:
        return str(shown.first.evaluate("node => node.toDataURL()"))

    first = pixels()
    for key, wanted in (("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", record.num_steps), ("Home", 0)):
        page.keyboard.press(key)
        assert at() == wanted
        wait_for(lambda wanted=wanted: shown.last.get_attribute("data-row") == str(wanted))
    assert pixels() == first
    page.keyboard.press("End")
    wait_for(lambda: pixels() != first)
    page.keyboard.press("Home")
    page.get_by_label("Speed").select_option("50")
    page.locator("h1").click()
    page.keyboard.press(" ")
    wait_for(lambda: at() > 2)
    wait_for(lambda: at() == record.num_steps)  # plays to the end
    assert "the policy's proposal" in page.locator(".legend:visible").first.inner_text()
    assert "script (takeover)" in page.locator(".legend:visible").first.inner_text()
    box = page.locator(".plotted").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 12)
    assert abs(at() - (record.num_steps - 1) / 2) <= 1
    # in a step of a takeover, here by the script, the policy's proposal stands beside the action
    human = next(step for step in range(record.num_steps) if _source(run, record.id, step) == 1)
    page.keyboard.press("Home")
    for _ in range(human):
        page.keyboard.press("ArrowRight")
    assert page.locator(".who-now").inner_text().startswith("script")
    assert re.search(r"\(-?[\d.e-]+\)", page.locator(".lanes .names").inner_text())
    page.get_by_role("link", name="Older").click()
    wait_for(lambda: f"#{record.id} " not in page.locator("h1").inner_text() + " ")


def _source(run: Path, episode: int, step: int) -> int:
    with Reader(run / "store") as reader:
        return int(reader.read(episode).source[step])


def test_the_other_views_say_what_the_store_says(page: Any, server: Any, run: Path) -> None:
    page.goto(f"{server.url}#/0/interventions")
    wait_for(lambda: page.locator("table tbody tr").count() > 2)
    taken = [r for r in records(run) if r.num_human and r.info.kind != "demonstration"]
    assert taken
    wait_for(lambda: number(tile(page, "takeovers")) >= len(taken))
    page.get_by_text("no progress for 30 steps").locator("visible=true").first.wait_for()
    page.goto(f"{server.url}#/0/replay")
    page.get_by_text("Integrity").wait_for()
    assert (tile(page, "lost rows"), tile(page, "duplicate rows"), tile(page, "dropped steps")) == ("0", "0", "0")
    wait_for(lambda: (tile(page, "wanted"), tile(page, "sampled")) == ("50 %", "50 %"))
    page.goto(f"{server.url}#/0/health")
    role = page.locator(".role")
    role.locator(".pill.good").wait_for()
    assert "{}" not in role.inner_text()
    assert "local" in role.inner_text()
    wait_for(lambda: "policy" in role.inner_text())
    page.goto(f"{server.url}#/0/runs")
    page.get_by_text("everything that a score depends on").wait_for()
    assert "touch" in page.locator(".prints").last.inner_text()
    assert ENV in page.locator(".prints").last.inner_text()
    assert re.search(r"\d+ % to \d+ %", page.locator(".prints").first.inner_text())
    wait_for(lambda: page.locator(".chart .band").count() + page.locator(".chart .whisker").count() > 0)


@pytest.mark.parametrize(
    ("phone", "dark"),
    [
        (True, True),
        pytest.param(True, False, marks=pytest.mark.nightly),
        pytest.param(False, True, marks=pytest.mark.nightly),
    ],
)
def test_every_view_fits_a_phone_and_the_dark(phone: bool, dark: bool, browser: Any, server: Any) -> None:
    with open_page(browser, phone=phone, dark=dark) as page:
        for view in VIEWS:
            page.goto(f"{server.url}#/0/{view}")
            page.locator("h1").first.wait_for()
            page.wait_for_timeout(150)
            for labels in page.evaluate(AXES):  # every axis says what it counts
                assert len(labels) == 2, view
                assert all(labels), (view, labels)
            wide = page.evaluate("[document.documentElement.scrollWidth, document.querySelector('#view').scrollWidth]")
            assert max(wide) <= page.viewport_size["width"], view
            red, green, blue = map(
                int, re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).background"))[:3]
            )
            assert (red + green + blue < 200) == dark
        box = page.locator("#nav").bounding_box()
        assert (box["y"] > 700) == phone


def test_a_learner_that_is_killed_is_shown_and_goes_on(page: Any, server: Any, run: Path) -> None:
    """The last test of the run: it is another process afterwards, and then none."""
    page.goto(f"{server.url}#/0/health")
    page.locator(".role .pill.good").wait_for()
    assert f"{AT_WORK[-1].pid} on " in page.locator(".role").inner_text()
    page.goto(f"{server.url}#/0/overview")
    page.locator("#link.on").wait_for()
    assert page.locator(".alarm.bad").count() == 0 or "disk" in page.locator(".alarm.bad").first.inner_text()
    end(AT_WORK[-1])
    page.locator(".title .pill", has_text="killed").wait_for()
    page.locator(".alarm", has_text="is gone").wait_for()
    steps = number(tile(page, "environment steps"))
    page.goto(f"{server.url}#/0/episodes?kind=demonstration")  # nobody holds the store: done at once
    page.locator(".episode[data-id='3'] .pick").click()
    page.locator(".selection").get_by_role("button", name="Delete").click()
    page.locator(".toast", has_text=re.compile("^1 episode deleted.?Undo")).wait_for()
    assert records(run, "id = 3")[0].deleted
    page.locator(".toast").get_by_role("button", name="Undo").click()
    wait_for(lambda: records(run, "id = 3")[0].deleted is None)
    page.goto(f"{server.url}#/0/overview")
    AT_WORK.append(begin(run))
    page.locator(".title .pill.good").wait_for()
    wait_for(lambda: number(tile(page, "environment steps")) > steps)
    assert page.locator(".alarm", has_text="is gone").count() == 0
    end(AT_WORK[-1])  # it would take a core from the tests below


# ---- with the keys alone


def focus(page: Any) -> str:
    """The name of what has the focus, as those hear it who do not see the page."""
    return str(page.evaluate("document.activeElement.ariaLabel || document.activeElement.textContent.trim()"))


def tab_to(page: Any, name: str) -> None:
    for _ in range(60):
        page.keyboard.press("Tab")
        if re.fullmatch(name, focus(page)):
            outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline == "solid", f"{name} has the focus, and nobody sees it"
            return
    raise AssertionError(f"{name}: cannot be reached with the tab key")


def test_an_episode_is_judged_exported_and_trimmed_with_keys_alone(page: Any, tmp_path: Path) -> None:
    store = make_store(tmp_path / "demos")
    with WatchServer([store]) as server:
        page.goto(server.url)
        page.locator("#link.on").wait_for()
        page.keyboard.press("Tab")
        assert focus(page) == "Skip to the content"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "view"
        page.keyboard.press("Shift+Tab")  # the last of the views
        assert focus(page) == "Runs"
        page.locator("#skip").focus()
        tab_to(page, "Episodes")
        page.keyboard.press("Enter")
        page.locator(".episode[data-id='12']").wait_for()
        tab_to(page, "Episode 12, .*")  # the newest
        for key, episode in (("ArrowRight", 11), ("ArrowRight", 10), ("ArrowLeft", 11)):
            page.keyboard.press(key)
            assert focus(page).startswith(f"Episode {episode}, ")
        page.keyboard.press("Enter")
        page.locator("h1", has_text="#11").wait_for()
        wait_for(lambda: page.locator(".counter").inner_text().startswith("0 /"))
        before = records_of(store, 11).info.success
        tab_to(page, "Failure" if before else "Success")
        page.keyboard.press(" ")  # presses the button, and plays nothing
        wait_for(lambda: records_of(store, 11).info.success is not before)
        wait_for(lambda: page.locator(".judge[aria-pressed=true]:focus").count() == 1)  # redrawn, and still there
        tab_to(page, "Export")
        page.keyboard.press("Enter")
        page.locator("dialog[open]").wait_for()
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        with page.expect_download() as download:
            page.keyboard.press("Enter")
        assert download.value.suggested_filename.endswith("-11.gif")
        assert Path(download.value.path()).read_bytes().startswith(b"GIF89a")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("[")
        page.keyboard.press("End")
        for _ in range(3):
            page.keyboard.press("ArrowLeft")
        page.keyboard.press("]")
        page.get_by_text("keeps steps 1 to 3 of 5").wait_for()
        tab_to(page, "Trim")
        page.keyboard.press("Enter")
        page.locator("h1", has_text="#13").wait_for()
        page.get_by_text("episode 11, steps 1 to 3").wait_for()  # where it comes from
        assert (records_of(store, 13).num_steps, records_of(store, 11).deleted is None) == (3, False)
        page.locator(".toast").last.get_by_role("button", name="Undo").press("Enter")
        page.locator("h1", has_text="#11").wait_for()
        assert (records_of(store, 13).deleted is None, records_of(store, 11).deleted) == (False, None)


def test_an_episode_is_played_as_fast_as_it_was_recorded(page: Any, tmp_path: Path) -> None:
    with Store.open(tmp_path / "store") as store:
        writer = store.writer("a", robot_spec(16))
        for labels in ({"fps": "30"}, {}):
            episode = random_episode(robot_spec(16), 5, 1)
            write_episode(writer, replace(episode, info=EpisodeInfo(task="pick", labels=labels)))
    with WatchServer([tmp_path / "store"]) as server:
        for number, speed in ((1, "30 steps/s, as recorded"), (2, "10 steps/s")):
            page.goto(f"{server.url}#/0/episode/{number}")
            page.locator("h1", has_text=f"#{number}").wait_for()
            chosen = page.get_by_label("Speed").locator("option:checked")
            wait_for(lambda chosen=chosen, speed=speed: chosen.inner_text() == speed)  # type: ignore[misc]


def test_the_page_says_that_it_loads_that_a_run_works_and_that_the_server_is_gone(
    page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("understudy.dashboard.api.change_events.FRESH_S", 0.0)  # the store was made right now
    store, link = make_store(tmp_path / "demos"), page.locator("#link")
    with WatchServer([store]) as server:
        held: list[Any] = []
        page.route("**/api/targets", lambda route: held.append(route), times=1)
        page.goto(server.url)
        page.locator("#view[aria-busy=true]").wait_for()
        assert (link.inner_text(), link.get_attribute("class")) == ("loading", None)
        while not held:
            page.wait_for_timeout(50)
        held[0].continue_()
        page.locator("#link.on", has_text="up to date").wait_for()
        page.locator("#view[aria-busy=false] .tile").first.wait_for()
        learner = Health(store / "health", role="learner", name="rlpd").start()
        page.locator("#link.on", has_text="live").wait_for()
        learner.close()
        page.locator("#link.on", has_text="up to date").wait_for()
    page.locator("#link.lost", has_text="not connected").wait_for()


def test_a_script_that_takes_over_is_not_called_a_human(page: Any, tmp_path: Path) -> None:
    labels = {"intervention_count": "1", "takeover_latency_ms": "0.0", "takeover_reasons": "no progress"}
    with Store.open(tmp_path / "store") as store:
        writer = store.writer("a", robot_spec(16))
        for operator in ("script", "script", "ada"):
            writer.begin(EpisodeInfo(task="pick", kind="practice", operator=operator, labels=labels))
            episode = random_episode(robot_spec(16), 5, 1)
            for number, step in enumerate(episode.steps()):
                source = Source.HUMAN if number > 2 else Source.POLICY
                writer.append(replace(step, source=source, terminated=number == 4, truncated=False))
            writer.end(episode.last_observation, success=True)
        store.delete([3])
    for operator, who, name in (("script", "the script", "script (takeover)"), ("ada", "a human", "human")):
        with WatchServer([tmp_path / "store"]) as server:  # a new one: nothing is cached
            page.goto(f"{server.url}#/0/overview")
            page.get_by_text(f"practice that succeeded with an intervention by {who}").wait_for()
            page.locator(".legend", has_text="practice that succeeded with an intervention").first.wait_for()
            assert page.locator(".card h2:text-is('Intervention rate')").is_visible()
            page.goto(f"{server.url}#/0/interventions")
            page.locator(".axis", has_text=f"practice steps by {who}").wait_for()
            assert page.locator(".card h2:text-is('Latency')").is_visible() == (operator == "ada")
            assert page.locator("dt:text-is('median latency')").count() == (operator == "ada")
            ticks = page.locator(".chart[aria-label^=Takeovers] .tick").all_text_contents()
            assert ticks.count("0") == 2  # both axes begin there: that of steps too
            page.goto(f"{server.url}#/0/episode/{3 if operator == 'ada' else 1}")
            page.locator(".facts dd", has_text=f"{name} 2 steps").wait_for()
            assert page.locator("dt:text-is('longest takeover latency')").count() == (operator == "ada")
        with Store.open(tmp_path / "store") as store:
            store.restore([3])


def test_a_change_while_a_view_opens_is_shown(page: Any, tmp_path: Path) -> None:
    """The view gets an answer from before the change, after it was told of the change; no other change follows."""
    store = make_store(tmp_path / "demos")
    held: list[Any] = []
    with WatchServer([store]) as server:
        page.goto(f"{server.url}#/0/health")
        page.locator("#link.on").wait_for()
        page.route("**/api/0/overview", lambda route: held.append((route, route.fetch())), times=1)
        page.goto(f"{server.url}#/0/overview")
        while not held:
            page.wait_for_timeout(50)
        with Store.open(store) as opened:
            opened.delete([3])
        page.wait_for_timeout(2000)  # the page is told
        route, answer = held[0]
        route.fulfill(response=answer)
        page.locator(".tile", has_text="episodes").first.wait_for()
        wait_for(lambda: tile(page, "episodes") == "11")


def test_a_last_commit_is_shown_though_the_answer_before_it_is_still_kept(
    page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("understudy.dashboard.api.targets.CACHE_S", 5.0)  # of a large store
    store = make_store(tmp_path / "demos")
    with WatchServer([store]) as server:
        page.goto(server.url)
        page.locator("#link.on").wait_for()
        wait_for(lambda: tile(page, "episodes") == "12")
        with Store.open(store) as opened:
            opened.delete([3])
        wait_for(lambda: tile(page, "episodes") == "11")  # nothing else happens to the store


def test_the_view_of_all_runs_follows_each_of_them(page: Any, tmp_path: Path) -> None:
    runs = [Run.create(tmp_path / name, "rlpd", small_config(None)) for name in ("one", "two")]
    found: dict[str, Any] = {"success": 0.5, "low": 0.1, "high": 0.9, "fingerprint": {}, "episode_results": []}
    with WatchServer([run.path for run in runs]) as server:
        page.goto(f"{server.url}#/0/runs")
        page.get_by_text("No evaluation yet.").wait_for()
        with closing(MetricLog(runs[1].metrics)) as log:  # of the run that no other view of this page shows
            log.write("evaluation", step=70, update=60, **found)
        page.locator(".prints tr", has_text="two").get_by_text("at step 70").wait_for()


def test_the_end_of_writing_is_shown(page: Any, tmp_path: Path) -> None:
    store = make_store(tmp_path / "demos")
    with WatchServer([store]) as server:
        with Store.open(store):
            page.goto(server.url)
            page.locator(".title .pill", has_text="being written").wait_for()
        page.locator(".title .pill:text-is('not being written')").wait_for()


def test_a_change_is_shown_though_its_first_request_fails(page: Any, tmp_path: Path) -> None:
    store = make_store(tmp_path / "demos")
    failed: list[Any] = []
    with WatchServer([store]) as server:
        page.goto(server.url)
        page.locator("#link.on").wait_for()
        wait_for(lambda: tile(page, "episodes") == "12")
        page.wait_for_timeout(1500)  # nothing is on its way
        page.route("**/api/0/overview", lambda route: (failed.append(route), route.abort()), times=1)
        with Store.open(store) as opened:
            opened.delete([3])
        while not failed:
            page.wait_for_timeout(50)
        wait_for(lambda: tile(page, "episodes") == "11")


def test_the_value_of_each_step_goes_with_the_film(page: Any, tmp_path: Path) -> None:
    store = make_store(tmp_path / "demos")
    path = write_estimates(store, 2)  # six steps, of which the last three are good
    with WatchServer([store]) as server:
        page.goto(f"{server.url}#/0/episode/2")
        shown = page.locator(".estimates")
        shown.locator(".line").wait_for()
        assert shown.locator(".axis").all_text_contents() == [
            "value (share of the longest failure that is left)",
            "step",
        ]
        assert shown.locator(".legend").inner_text() == "called good"
        mark, now = shown.locator(".mark"), shown.locator(".now")
        assert mark.count() == 1

        def film_is_at_a_good_step() -> bool:
            left, wide, at = (
                float(node.get_attribute(name)) for node, name in ((mark, "x"), (mark, "width"), (now, "x1"))
            )
            return left <= at <= left + wide + 0.01

        for step in range(6):  # the keys move the film, and the cursor with it
            words = shown.locator("header .soft").inner_text()
            assert re.match(rf"-[\d.]+ in step {step}, ", words)
            assert words.endswith("good") == film_is_at_a_good_step() == (step >= 3)
            page.keyboard.press("ArrowRight")
        box = shown.locator(".chart").bounding_box()
        page.mouse.click(box["x"] + 46, box["y"] + 80)  # the left end of the curve moves the film
        wait_for(lambda: page.locator(".counter").inner_text().startswith("0 /"))
        assert shown.locator("header .soft").inner_text().startswith("-1 in step 0, ")
        page.goto(f"{server.url}#/0/episodes")
        page.locator("select[data-filter=value]").select_option("value -0.75 to -0.5")
        wait_for(lambda: page.locator(".episode").evaluate_all("nodes => nodes.map(node => node.dataset.id)") == ["2"])
        page.goto(f"{server.url}#/0/episode/3")  # without estimates
        page.locator("h1", has_text="#3").wait_for()
        assert shown.is_hidden()
        path.write_bytes(b"nothing")
        page.goto(f"{server.url}#/0/episode/2")
        shown.get_by_text(f"cannot be read: {path}: expected estimates of steps").wait_for()
        assert shown.locator(".chart").is_hidden()
        assert page.locator(".cameras canvas").is_visible()


def records_of(store: Path, episode: int) -> EpisodeRecord:
    with Reader(store) as reader:
        return reader.record(episode)


# ---- who may look, and what is shown of nothing


def test_without_the_token_the_page_shows_nothing(browser: Any, tmp_path: Path) -> None:
    Store.open(tmp_path / "secret").close()
    token = "0123456789abcdef0123"
    with WatchServer([tmp_path / "secret"], token=token) as server:
        with open_page(browser) as page:
            page.goto(f"http://127.0.0.1:{server.port}/#/0/episodes")
            page.get_by_text("This page needs a token").wait_for()
            assert "secret" not in page.locator("body").inner_text()
            page.get_by_label("token").fill("wrong")
            page.get_by_role("button", name="Enter").click()
            page.get_by_text("the token is wrong").wait_for()
        with open_page(browser) as page:
            page.goto(server.url)
            page.locator("#target", has_text="secret").wait_for()
            page.locator("#link.on").wait_for()
            assert token not in page.url
            page.reload()  # the cookie is enough
            page.locator("#target", has_text="secret").wait_for()


def test_nothing_there_an_empty_store_and_a_first_episode(page: Any, tmp_path: Path) -> None:
    with WatchServer([tmp_path / "soon"]) as server:
        page.goto(server.url)
        page.get_by_text("Nothing here yet").wait_for()
        for view, words in (
            ("episodes", "There is no store yet"),
            ("replay", "There is no store yet"),
            ("interventions", "No interventions yet"),
            ("runs", "This page shows only stores"),
            ("health", "No process has reported yet"),
        ):
            page.goto(f"{server.url}#/0/{view}")
            page.get_by_text(words).wait_for()
        Store.open(tmp_path / "soon").close()
        page.goto(f"{server.url}#/0/episodes")
        page.get_by_text("The store is empty").wait_for()
        assert main(["record", str(tmp_path / "soon"), "--env", ENV, "--successes", "1"]) == 0
        page.locator(".episode[data-id='1']").wait_for()  # without a reload
        page.goto(f"{server.url}#/0/overview")
        page.locator(".mini", has_text="success").wait_for()
        shown = [title.inner_text() for title in page.locator(".card h2").all() if title.is_visible()]
        assert shown == ["Latest episodes"]  # no empty curves of training
        with Reader(tmp_path / "soon") as reader:
            num_steps = next(reader.episodes()).num_steps
        tiles = dict(
            zip(page.locator(".tile dt").all_inner_texts(), page.locator(".tile dd").all_inner_texts(), strict=True)
        )
        assert "intervention rate" not in tiles
        assert tiles["steps"].split() == [str(num_steps)]
        learner = Health(tmp_path / "soon" / "health", role="learner", name="rlpd").start()
        learner.add(lambda: {"away": {}, "oldest_pending_s": 0.0})
        page.goto(f"{server.url}#/0/health")
        page.locator(".role .pill.good", has_text="running").wait_for()
        learner.progress("learning", step=3)
        learner.close(KeyboardInterrupt())  # Ctrl-C: it has ended, and has not failed
        role = page.locator(".role:not(.unhealthy)", has_text="stopped by Ctrl-C while learning")
        role.wait_for()
        assert role.locator(".bad").count() == 0
        assert not any(word in role.inner_text() for word in ("KeyboardInterrupt", "{}", "away", "oldest"))
        Health(tmp_path / "soon" / "health", role="learner", name="rlpd").start().close()
        assert page.locator(".role .doing", has_text="ended well").inner_text() == "ended well"
        page.goto(f"{server.url}#/0/episode/77")
        page.get_by_text("This episode does not exist").wait_for()
