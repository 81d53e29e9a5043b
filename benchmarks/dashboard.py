"""How fast the page is on a large store, in a real Chromium; and what it costs the process that writes.

    python benchmarks/dashboard.py                        # 10,000 episodes with a camera: 400 MB of disk, some minutes
    python benchmarks/dashboard.py --episodes 2000 --out /tmp/results

The page is served by a process of its own. Each figure is measured inside the browser, from the act to the frame in
which it is done. `rows` is when the cards say what they are, `pictures` when all that can be seen are drawn. Writes
`benchmarks/dashboard.json` below `--out`. The exit code is 1 if the limits do not hold.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from playwright.sync_api import Page, sync_playwright
from rich.console import Console
from rich.progress import track
from rich.table import Table

from understudy.core import ArraySpec, EpisodeInfo, Source, Spec, Step, StepSpec
from understudy.replay import Store, Writer

SPEC = StepSpec(
    observation=Spec({"front": ArraySpec(shape=(64, 64, 3), dtype="uint8")}),
    action=Spec(ArraySpec(shape=(4,), dtype="float32")),
)
FIRST_MS, ACT_MS = 1000.0, 200.0
LAPS = 20
FILTERS = [
    ("success", "yes"),
    ("success", "no"),
    ("success", ""),
    ("source", "human"),
    ("source", ""),
    ("task", "task-3"),
    ("kind", "correction"),
    ("task", ""),
    ("kind", ""),
    ("sort", "longest"),
    ("sort", "newest"),
    ("text", "number 77"),
    ("text", "9"),
    ("text", ""),
]

# Runs in the page: acts, and then looks at each frame until the cards and then the pictures are there.
MEASURE = """async ({ act, value }) => {
  const view = document.querySelector("#view"), count = document.querySelector(".count");
  const before = performance.now();
  if (act === "scroll") view.scrollTop = value * (view.scrollHeight - view.clientHeight);
  else if (act === "text") {
    const field = document.querySelector("input[type=search]");
    field.value = value;
    field.dispatchEvent(new Event("input"));
  } else {
    const field = document.querySelector(`select[data-filter=${act}]`);
    field.value = value;
    field.dispatchEvent(new Event("change"));
  }
  count.dataset.total = act === "scroll" ? count.dataset.total : "";
  const seen = () => [...document.querySelectorAll(".episode")].filter((card) => {
    const box = card.getBoundingClientRect();
    return box.bottom > 0 && box.top < innerHeight;
  });
  const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));
  let rows = null;
  for (;;) {
    await frame();
    const cards = seen(), now = performance.now() - before;
    const named = count.dataset.total !== "" && (cards.length > 0 || count.dataset.total === "0") && cards.every((card) => !card.classList.contains("loading"));
    if (named && rows === null) rows = now;
    if (named && cards.every((card) => card.picture.getAttribute("src") && card.picture.complete && card.picture.naturalWidth)) return [rows, now];
    if (now > 30000) throw new Error("it never came");
  }
}"""  # noqa: E501


def main(*, episodes: int = 10_000, out: Path = Path("docs"), work: Path | None = None) -> int:
    """Measure the page.

    Args:
        episodes: In the store.
        out: Where to put the figures.
        work: Where to build the store, in a new directory that is removed afterwards; by default here.
    """
    console = Console()
    with tempfile.TemporaryDirectory(prefix="dashboard-", dir=work or Path.cwd()) as directory:
        store = Path(directory) / "store"
        _fill(store, episodes)
        figures: dict[str, Any] = {"episodes": episodes, "cores": os.cpu_count(), "load_average": os.getloadavg()[0]}
        with subprocess.Popen(
            [sys.executable, "-m", "understudy", "watch", str(store), "--port", "0"], stdout=subprocess.PIPE, text=True
        ) as server:
            try:
                assert server.stdout is not None
                url = server.stdout.readline().removeprefix("the page: ").strip()
                figures |= _measure(url)
                figures["server_memory_mb"] = _memory_mb(server.pid)
                figures["commit_ms"] = _disturb(store, url)
            finally:
                server.terminate()
                server.wait()
    holds = (
        figures["first"]["rows_ms"] <= FIRST_MS
        and max(figures[act]["rows_ms"]["p95"] for act in ("scroll", "filter")) <= ACT_MS
    )
    target = out / "benchmarks" / "dashboard.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(figures, indent=1) + "\n")
    console.print(_table(figures))
    return 0 if holds else 1


# ---- the store


def _fill(path: Path, num_episodes: int) -> None:
    rng = np.random.default_rng(0)
    with Store.open(path) as store:
        writer = store.writer("fill", SPEC, commit_steps=2000, flush_each_episode=False)
        for number in track(range(num_episodes), "fill", transient=True):
            _live(writer, number, rng)


def _live(writer: Writer, number: int, rng: np.random.Generator) -> None:
    """An episode of two steps, with a picture that no encoder makes small."""
    human = number % 5 == 0
    labels = {"intervention_count": "1", "takeover_latency_ms": f"{number % 90}"} if human else {}
    writer.begin(
        EpisodeInfo(
            task=f"task-{number % 10}",
            instruction=f"do number {number}",
            actor=f"actor-{number % 4}",
            seed=number,
            operator="ada" if human else None,
            labels=labels,
        )
    )
    picture = np.kron(rng.integers(0, 256, (8, 8, 3), np.uint8), np.ones((8, 8, 1), np.uint8))
    for index in range(2):
        source = Source.HUMAN if human and index else Source.POLICY
        writer.append(
            Step(
                observation={"front": picture},
                action=np.zeros(4, np.float32),
                reward=float(index),
                source=source,
                terminated=index == 1,
            )
        )
    writer.end({"front": picture}, success=bool(number % 3))


# ---- in the browser


def _measure(url: str) -> dict[str, Any]:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        first = [_first(browser, url) for _ in range(5)]
        page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
        page.goto(f"{url}#/0/episodes")
        page.locator(".episode img[src]").first.wait_for()
        places = np.random.default_rng(1).random(LAPS).tolist()
        scroll = [page.evaluate(MEASURE, {"act": "scroll", "value": value}) for value in places]
        page.evaluate(MEASURE, {"act": "scroll", "value": 0})
        filters = [page.evaluate(MEASURE, {"act": act, "value": value}) for act, value in FILTERS]
        smooth = _frames(page)
        browser.close()
    return {
        "first": {name: statistics.median(one[name] for one in first) for name in first[0]},
        "scroll": _summary(scroll),
        "filter": _summary(filters),
        "frames": smooth,
    }


def _first(browser: Any, url: str) -> dict[str, float]:
    """A browser that has never seen the page: times since it was asked for."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = context.new_page()
    page.goto(f"{url}#/0/episodes", wait_until="commit")
    found: dict[str, float] = page.evaluate(
        """async () => {
          const said = {};
          for (;;) {
            await new Promise((resolve) => requestAnimationFrame(resolve));
            const paint = performance.getEntriesByName("first-contentful-paint")[0];
            if (paint) said.paint_ms = paint.startTime;
            const cards = [...document.querySelectorAll(".episode[href]")];
            if (cards.length && !said.rows_ms) said.rows_ms = performance.now();
            const drawn = cards.every((card) => card.picture.complete && card.picture.naturalWidth);
            if (cards.length && said.paint_ms && drawn) {
              said.pictures_ms = performance.now();
              return said;
            }
          }
        }"""
    )
    context.close()
    return found


def _frames(page: Page) -> dict[str, float]:
    """The time between frames while the list is moved on steadily by half a screen a frame's time."""
    gaps = page.evaluate(
        """async () => {
          const view = document.querySelector("#view"), gaps = [];
          let last = await new Promise((resolve) => requestAnimationFrame(resolve));
          for (let at = 0; at < 120; at++) {
            view.scrollTop += 120;
            const now = await new Promise((resolve) => requestAnimationFrame(resolve));
            gaps.push(now - last);
            last = now;
          }
          return gaps;
        }"""
    )
    return {"p50": float(np.percentile(gaps, 50)), "p95": float(np.percentile(gaps, 95)), "max": max(gaps)}


def _summary(laps: list[list[float]]) -> dict[str, dict[str, float]]:
    return {
        name: {"p50": float(np.percentile(some, 50)), "p95": float(np.percentile(some, 95)), "max": max(some)}
        for name, some in zip(("rows_ms", "pictures_ms"), zip(*laps, strict=True), strict=True)
    }


# ---- what it costs


def _memory_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def _disturb(store: Path, url: str) -> dict[str, float]:
    """The time of a commit with nobody looking, and with an open page; laps in turn, so that noise falls on both."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    times: dict[str, list[float]] = {"alone": [], "watched": []}
    rng = np.random.default_rng(2)
    with sync_playwright() as playwright, Store.open(store) as opened:
        writer = opened.writer("disturbed", SPEC)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for _ in range(4):
            for name in times:
                page = browser.new_page()
                page.goto(f"{url}#/0/overview" if name == "watched" else "about:blank")
                page.wait_for_timeout(1500)
                until = time.monotonic() + 4
                while time.monotonic() < until:
                    began = time.perf_counter()
                    _live(writer, 1, rng)
                    times[name].append((time.perf_counter() - began) * 1e3)
                    page.wait_for_timeout(50)
                page.close()
        browser.close()
    return {
        f"{name}_{word}": float(np.percentile(some, share))
        for name, some in times.items()
        for word, share in (("p50", 50), ("p95", 95))
    }


def _table(figures: dict[str, Any]) -> Table:
    table = Table(title=f"the page on {figures['episodes']:,} episodes, in ms")
    for name in ("act", "rows p50", "rows p95", "pictures p50", "pictures p95", "limit (rows)"):
        table.add_column(name, justify="left" if name == "act" else "right")
    first = figures["first"]
    table.add_row(
        "first view (cold)", f"{first['rows_ms']:.0f}", "", f"{first['pictures_ms']:.0f}", "", f"{FIRST_MS:.0f}"
    )
    for act in ("scroll", "filter"):
        figure = [figures[act][what][share] for what in ("rows_ms", "pictures_ms") for share in ("p50", "p95")]
        table.add_row(act, *(f"{value:.0f}" for value in figure), f"{ACT_MS:.0f}")
    frames, commit = figures["frames"], figures["commit_ms"]
    table.caption = (
        f"first paint {first['paint_ms']:.0f} ms; frames while scrolling p50 {frames['p50']:.0f}, p95 "
        f"{frames['p95']:.0f} ms; "
        f"server {figures['server_memory_mb']:.0f} MB; a commit alone {commit['alone_p50']:.1f} (p95 "
        f"{commit['alone_p95']:.1f}), watched {commit['watched_p50']:.1f} (p95 {commit['watched_p95']:.1f}) ms; load "
        f"average {figures['load_average']:.1f} on {figures['cores']} cores"
    )
    return table


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
