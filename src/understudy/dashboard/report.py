"""Report: one HTML file that tells of a run, opens anywhere without a network, and its figures as files for a paper."""

from __future__ import annotations

import base64
import html
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy import __version__
from understudy.core import UnderstudyError
from understudy.dashboard.report_data import Line, RunData, read_run
from understudy.dashboard.report_plots import Plot, draw_all
from understudy.dashboard.report_repeat import changed_options, command_of, options_of
from understudy.training.score import Score

EMBED_BYTES = 8 * 2**20  # of films that go into the file; the others are named
LAST = 8  # evaluations in the table
INCH = 108  # pixels, so that letters have one size in all figures
PAGE = Path(__file__).with_name("report.css")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was written."""

    html: Path
    figures: tuple[Path, ...]
    missing: tuple[str, ...]


def write_report(run: Path, out: Path | None = None) -> Report:
    """Read a run, also one that is at work, and write its report to a directory; by default `report` in the run."""
    data = read_run(run)
    out = out or run / "report"
    try:
        out.mkdir(parents=True, exist_ok=True)
        plots = draw_all(data, out)
        page = out / "report.html"
        page.write_text(_page(data, plots))
    except OSError as error:
        raise UnderstudyError(f"{out}: cannot be written ({error.strerror or error}); choose another --out") from None
    figures = tuple(plot.svg.with_suffix(ending) for plot in plots for ending in (".svg", ".pdf", ".png"))
    return Report(html=page, figures=figures, missing=data.missing)


def _page(data: RunData, plots: list[Plot]) -> str:
    name = html.escape(data.path.resolve().name)
    parts = [
        _head(data),
        _missing(data),
        "<section class='plots'>" + "".join(_plot(plot) for plot in plots) + "</section>" if plots else "",
        _evaluations(data),
        _films(data),
        _repeat(data),
        _config(data),
    ]
    made = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{name}</title>"
        f"<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<style>{PAGE.read_text()}</style></head><body><main>{''.join(parts)}</main>"
        f"<footer>Made by Understudy {__version__} at {made} UTC from <code>{html.escape(str(data.path))}</code>. "
        f"The figures are beside this file as SVG, PDF and PNG.</footer></body></html>"
    )


# ---- sections


def _head(data: RunData) -> str:
    newest = data.evaluations[-1] if data.evaluations else data.later
    if newest is None:
        headline = "<p class='headline none'>not evaluated yet</p>"
    else:
        score = _score(newest)
        low, high = score.interval
        headline = (
            f"<p class='headline'><b>{100 * score.rate:.0f} %</b> of {score.num_episodes} held-out episodes "
            f"<span class='soft'>95 %: {100 * low:.0f} to {100 * high:.0f}</span></p>"
        )
    cloning = data.kind == "cloning"
    facts = {
        "algorithm": {"rlpd": "RLPD", "cloning": "behaviour cloning"}.get(data.kind, data.kind),
        "seed": data.config.get("seed"),
        "updates": f"{data.update:,}",
        "demonstrations": _demonstrations(data),
    }
    if not cloning:
        steps = sum(lived.length for lived in data.episodes)
        human = sum(lived.human_steps for lived in data.episodes)
        whole = data.config.get("steps", 0)
        facts |= {
            "practice": f"{data.step:,} of {whole:,} steps, {len(data.episodes):,} episodes",
            "by the human": f"{100 * human / steps:.1f} % of steps" if steps else "no steps yet",
        }
    state = "<span class='state live'>at work</span>" if data.at_work else "<span class='state'>not at work</span>"
    listed = "".join(f"<div><dt>{name}</dt><dd>{html.escape(str(value))}</dd></div>" for name, value in facts.items())
    title = html.escape(data.path.resolve().name)
    return (
        f"<header><h1>{title} {state}</h1><p class='env'><code>{html.escape(data.env)}</code></p>"
        f"{headline}<dl>{listed}</dl></header>"
    )


def _missing(data: RunData) -> str:
    if not data.missing:
        return ""
    items = "".join(f"<li>{_with_code(text)}</li>" for text in data.missing)
    return f"<section class='missing'><h2>What is not here</h2><ul>{items}</ul></section>"


def _plot(plot: Plot) -> str:
    source = f"data:image/svg+xml;base64,{base64.b64encode(plot.svg.read_bytes()).decode()}"
    wide = " class='wide'" if plot.name == "losses" else ""
    return (
        f"<figure{wide}><h2>{plot.title}</h2><img src='{source}' alt='{html.escape(plot.title)}' "
        f"width='{plot.width * INCH:.0f}'>"
        f"<figcaption>{html.escape(plot.caption)} <code>{plot.name}.svg</code></figcaption></figure>"
    )


def _evaluations(data: RunData) -> str:
    rows = [(f"{line['step']:,}", f"{line['update']:,}", line) for line in data.evaluations[-LAST:][::-1]]
    if data.later is not None:
        rows.insert(0, ("<code>understudy evaluate</code>", "", data.later))
    if not rows:
        return ""
    body = "".join(_evaluation(step, update, line) for step, update, line in rows)
    left = len(data.evaluations) - LAST
    more = f"<p class='soft'>{left} earlier ones are in <code>metrics.jsonl</code>.</p>" if left > 0 else ""
    return (
        "<section><h2>Evaluations</h2><div class='scroll'><table><thead><tr><th>step</th><th>update</th>"
        "<th>success</th><th>95 % interval</th><th>episodes</th><th>starts</th><th>mean length</th><th>policy</th>"
        f"<th>code</th><th>commit</th></tr></thead><tbody>{body}</tbody></table></div>{more}{_failures(data)}"
        f"{_versions(rows[0][2])}</section>"
    )


def _evaluation(step: str, update: str, line: Line) -> str:
    score = _score(line)
    low, high = score.interval
    made_of = line["fingerprint"]
    cells = [
        step, update, f"<b>{100 * score.rate:.0f} %</b>", f"{100 * low:.1f} to {100 * high:.1f} %",
        f"{score.num_episodes:,}", f"{line['starts']:,}", f"{line['mean_steps']:.1f}",
        *(f"<code>{html.escape(str(made_of.get(name) or '-'))}</code>" for name in ("parameters", "code", "commit")),
    ]  # fmt: skip
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _failures(data: RunData) -> str:
    if not data.evaluations:
        return ""
    failed = [trial["start"] for trial in data.evaluations[-1]["trials"] if not trial["success"]]
    if not failed:
        return "<p class='soft'>The last evaluation failed from no start.</p>"
    listed = ", ".join(map(str, failed[:40])) + (f" and {len(failed) - 40} others" if len(failed) > 40 else "")
    return f"<p class='soft'>The last evaluation failed from these starts: {listed}.</p>"


def _versions(line: Line) -> str:
    found = {"understudy": line["fingerprint"]["understudy"], **line["fingerprint"]["versions"]}
    listed = ", ".join(f"{html.escape(str(name))} {html.escape(str(value))}" for name, value in found.items())
    return f"<p class='soft'>Measured on {listed}; config <code>{line['fingerprint']['config']}</code>.</p>"


def _films(data: RunData) -> str:
    if not data.films:
        return ""
    room, shown, named = EMBED_BYTES, [], []
    for path in data.films:
        size = path.stat().st_size
        if size > room:
            named.append(f"<li><code>{html.escape(str(path))}</code></li>")
            continue
        room -= size
        source = f"data:image/gif;base64,{base64.b64encode(path.read_bytes()).decode()}"
        label = html.escape(path.stem)
        shown.append(f"<figure><img src='{source}' alt='{label}'><figcaption>{label}</figcaption></figure>")
    others = f"<p class='soft'>Too large to be in this file:</p><ul>{''.join(named)}</ul>" if named else ""
    return (
        "<section><h2>The worst episodes of the last evaluation</h2>"
        f"<div class='films'>{''.join(shown)}</div>{others}</section>"
    )


def _repeat(data: RunData) -> str:
    commands = [command_of(data.kind, data.config), "understudy evaluate again", "understudy report again"]
    demos = data.config.get("demos") or "again/store"
    number = "the same" if data.demonstrations is None else f"{data.demonstrations[0]:,}"
    first = (
        f"# {number} demonstrations belong in {demos}: copy the store, or record new ones\n"
        if data.demonstrations is None or data.demonstrations[0] else ""
    )  # fmt: skip
    return (
        "<section><h2>How to repeat it</h2>"
        f"<pre>{html.escape(first + chr(10).join(commands))}</pre>"
        "<p class='soft'>On the same code, world and demonstrations and with the same number of CPU threads, a run in "
        "one process comes to the same bits, so <code>policy</code> in the table above is the same; with actors and a "
        "learner of their own it comes close.</p></section>"
    )


def _config(data: RunData) -> str:
    changed = {path for path, _ in changed_options(data.kind, data.config)}
    lines = []
    for path, value in options_of(data.config):
        text = html.escape(f"{path}: {json.dumps(value)}")
        lines.append(f"<b>{text}</b>" if path in changed else text)
    return (
        f"<section><h2>Config</h2><pre class='config'>{chr(10).join(lines)}</pre><p class='soft'>Strong: not "
        "the default. <code>config.json</code> in the run has the same.</p></section>"
    )


# ---- parts


def _demonstrations(data: RunData) -> str:
    if data.demonstrations is None:
        return "not counted"
    episodes, steps = data.demonstrations
    return f"{episodes:,} ({steps:,} steps)" if episodes else "none"


def _score(line: Mapping[str, Any]) -> Score:
    number = int(line["episodes"])
    return Score(num_successes=round(float(line["success"]) * number), num_episodes=number)


def _with_code(text: str) -> str:
    """Text in which `this` is code."""
    pieces = html.escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces))
