"""The cluster's view in a real Chromium, beside a process that writes what a driver writes: 1,000 workers, live."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.chromium import open_page
from tests.unit.dashboard.clusters import break_some, make_status
from tests.waiting import wait_for

from understudy.cluster.status import STATUS_FILE

pytest.importorskip("fastapi")
pytest.importorskip("PIL")
WatchServer: Any = pytest.importorskip("understudy.dashboard.server").WatchServer

pytestmark = pytest.mark.xdist_group("browser")


@contextlib.contextmanager
def driver(run: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.unit.dashboard.clusters", str(run), "--every", "0.3", *more]
    )
    try:
        wait_for((run / STATUS_FILE).exists)
        yield process
    finally:
        process.kill()
        process.wait()


def number(text: str) -> int:
    return int("".join(letter for letter in text if letter.isdigit()) or -1)


def test_a_run_gets_its_cluster_while_somebody_looks(page: Any, tmp_path: Path) -> None:
    run = tmp_path / "press"
    run.mkdir()
    with WatchServer([run]) as server:
        page.goto(server.url)
        page.locator("#link.on").wait_for()
        assert page.locator("#nav a[data-view=cluster]").count() == 0  # one machine needs no such view
        with driver(run, "--healthy") as process:
            page.locator("#nav a[data-view=cluster]").click()
            page.locator(".node").nth(2).wait_for()
            assert page.locator(".title .pill.good").inner_text() == "running"
            assert page.locator(".alarm").count() == 0
            assert page.locator(".node h3").all_inner_texts() == ["gpu-a", "gpu-b", "sim-c"]
            steps = page.locator("[data-shard=shard-0] td.num").first
            before = number(steps.inner_text())
            wait_for(lambda: number(steps.inner_text()) > before)  # nobody has touched the page
            process.kill()
            process.wait()
            page.locator(".alarm.bad", has_text="the driver is gone").wait_for()
            assert f"understudy resume {run} --cluster" in page.locator(".alarm.bad").inner_text()
            page.locator(".title .pill.bad", has_text="killed").wait_for()
        page.goto(f"{server.url}#/0/overview")
        page.locator(".alarm.bad", has_text="the driver is gone").click()  # leads to the cluster
        page.locator(".node").first.wait_for()


def test_a_run_that_has_ended_shows_nothing_that_runs(page: Any, tmp_path: Path) -> None:
    run = tmp_path / "press"
    make_status(run, num_workers=2).write("ended")
    with WatchServer([run]) as server:
        page.goto(f"{server.url}#/0/cluster")
        page.locator(".title .pill", has_text="ended").wait_for()
        page.locator(".node .pill", has_text="ended").first.wait_for()
        shown = page.locator("#view").inner_text()
        filled = page.locator(".use .stack i:first-child").evaluate_all("all => all.map(i => i.style.flexGrow)")
    assert set(filled) == {"0"}
    assert "running" not in shown
    assert "in use\n" not in shown
    assert shown.count("at the end") == 5  # nodes, CPUs, GPUs, learners and rollout workers


def test_a_thousand_workers_fit_and_unfold(page: Any, tmp_path: Path) -> None:
    run = tmp_path / "press"
    with driver(run), WatchServer([run]) as server:
        page.goto(f"{server.url}#/0/cluster")
        page.locator(".alarm.bad", has_text="shard-2 is lost").wait_for()
        assert page.locator(".alarm", has_text="333 workers wait for resources").count() == 1
        assert page.locator(".node.unhealthy h3").inner_text() == "sim-c"
        assert page.locator("#view").evaluate("node => node.querySelectorAll('*').length") < 600
        assert page.locator(".worker").count() == 2  # only the unhealthy ones
        group = page.locator(f"[data-node='{'00' * 28}'] .worker-group[data-group=rollout]")
        assert "334 rollout workers" in group.inner_text()
        assert "1 stuck" in group.inner_text()
        group.locator("summary").first.click()
        first = group.locator(".worker").first
        first.wait_for()
        assert first.get_attribute("data-name") == "rollout-0-9"
        assert group.locator(".worker").count() == 200
        group.get_by_role("button", name="134 more").click()
        wait_for(lambda: group.locator(".worker").count() == 334)
        stack = first.locator(".where")
        stack.locator("summary").click()
        assert "in run_ticket" in stack.locator("pre").inner_text()
        shown = stack.locator("pre").element_handle()
        busy = group.locator(".worker[data-name='rollout-7-124'] .what")
        for _ in range(2):  # a second change means that the first was drawn to its end
            before = busy.inner_text()
            wait_for(lambda before=before: busy.inner_text() != before)
        assert shown.evaluate("node => node.isConnected")  # others change around it, and it can be read
        assert group.locator(".worker").count() == 334
        newest = page.locator(".event").first
        assert newest.get_attribute("data-what") == "stuck"
        newest.locator("summary").click()
        assert "in run_ticket" in newest.locator("pre").inner_text()
        assert page.locator(".event").last.get_attribute("data-what") == "began"


def test_text_from_the_cluster_is_only_text(page: Any, tmp_path: Path) -> None:
    run = tmp_path / "press"
    status = make_status(run, num_workers=4)
    break_some_names(status)
    status.write()
    with WatchServer([run]) as server:
        page.goto(f"{server.url}#/0/cluster")
        page.locator(".worker").first.wait_for()
        assert "<img src=x" in page.locator("#view").inner_text()
        assert page.locator("#view img").count() == 0


def break_some_names(status: Any) -> None:
    evil = "<img src=x onerror=\"document.title='taken'\">"
    role = status.roles[-1]
    status.roles[-1] = type(role)(role="rollout", name=evil, state="stuck", doing=evil, error=evil, stack=evil)


@pytest.mark.parametrize("text", ["{", '{"nodes": [3], "roles": {"a": 1}, "state": []}'])
def test_a_damaged_file_does_not_break_the_page(text: str, page: Any, tmp_path: Path) -> None:
    run = tmp_path / "press"
    run.mkdir()
    (run / STATUS_FILE).write_text(text)
    with WatchServer([run]) as server:
        page.goto(f"{server.url}#/0/cluster")
        page.locator("h1", has_text="Cluster").wait_for()
        wait_for(lambda: "is not valid" in page.content() or "silent" in page.content())
        status = make_status(run, num_workers=4)
        status.write()
        page.locator(".title .pill.good", has_text="running").wait_for()


@pytest.mark.parametrize(("phone", "dark"), [(False, True), (True, False)])
def test_it_fits_a_phone_and_the_dark(phone: bool, dark: bool, browser: Any, tmp_path: Path) -> None:
    run = tmp_path / "press"
    status = make_status(run)
    break_some(status)
    status.write()
    with WatchServer([run]) as server, open_page(browser, phone=phone, dark=dark) as page:
        page.goto(f"{server.url}#/0/cluster")
        page.locator(".worker-group[data-group=rollout] summary").first.click()
        page.locator(".worker-group .worker").first.wait_for()
        page.locator(".event summary").first.click()
        wide = page.evaluate("[document.documentElement.scrollWidth, document.querySelector('#view').scrollWidth]")
        assert max(wide) <= page.viewport_size["width"]
        box = page.locator("#nav a[data-view=cluster]").bounding_box()
        assert box["x"] + box["width"] <= page.viewport_size["width"]
