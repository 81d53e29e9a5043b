"""Report: one HTML file that tells of a run, opens anywhere without a network, and its figures as files for a paper."""

from __future__ import annotations

import base64
import html
import json
import time
from dataclasses import dataclass
from pathlib import Path

from understudy import __version__
from understudy.core import UnderstudyError
from understudy.dashboard.api.cluster import in_a_line
from understudy.dashboard.report.plots import Plot, draw_all
from understudy.dashboard.report.repeat_command import changed_options, command_of, evaluation_of, options_of
from understudy.dashboard.report.run_data import RunData, read_run
from understudy.dashboard.report.scores import evaluations, headline

EMBED_BYTES = 8 * 2**20  # of films that go into the file; the others are named
INCH = 108  # pixels, so that letters have one size in all figures
PAGE = Path(__file__).with_name("report.css")
ALGORITHMS = {
    "rlpd": "RLPD",
    "cloning": "behaviour cloning",
    "sft": "supervised fine-tuning",
    "grpo": "GRPO",
    "rloo": "RLOO",
    "reinforce": "REINFORCE++",
    "ppo": "PPO",
}


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
        evaluations(data),
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
    facts = {"algorithm": ALGORITHMS.get(data.kind, data.kind), "seed": data.config.get("seed")}
    facts |= _iterations(data) if data.on_policy else _steps(data)
    if data.cluster is not None:
        facts["cluster"] = in_a_line(data.cluster)
    state = "<span class='state live'>at work</span>" if data.at_work else "<span class='state'>not at work</span>"
    listed = "".join(f"<div><dt>{name}</dt><dd>{html.escape(str(value))}</dd></div>" for name, value in facts.items())
    title = html.escape(data.path.resolve().name)
    return (
        f"<header><h1>{title} {state}</h1><p class='env'><code>{html.escape(data.env)}</code></p>"
        f"{headline(data)}<dl>{listed}</dl></header>"
    )


def _steps(data: RunData) -> dict[str, str]:
    """How far a run is that learns from demonstrations, and from practice if it lives any."""
    facts = {"updates": f"{data.update:,}", "demonstrations": _demonstrations(data)}
    if data.imitates:
        return facts
    steps = sum(lived.length for lived in data.episodes)
    human = sum(lived.human_steps for lived in data.episodes)
    whole = data.config.get("steps", 0)
    return facts | {
        "practice": f"{data.step:,} of {whole:,} steps, {len(data.episodes):,} episodes",
        "by the human": f"{100 * human / steps:.1f} % of steps" if steps else "no steps yet",
    }


def _iterations(data: RunData) -> dict[str, str]:
    """How far an on-policy run is, and what came of its groups."""
    practice = data.practice
    lived, won = (sum(task["recent"][name] for task in practice["tasks"]) for name in ("episodes", "successes"))
    share = f"{won:,} of {lived:,} ({100 * won / max(lived, 1):.0f} %)"
    dropped = ", ".join(f"{number:,} {reason}" for reason, number in practice["dropped"].items())
    return {
        "iterations": f"{practice['iterations']:,} of {data.config['iterations']:,}",
        "updates": f"{data.update:,}",
        "practice": f"{data.step:,} steps, {len(data.episodes):,} episodes",
        f"succeeded in the last {practice['recent']} iterations": share,
        "groups": f"{practice['kept']:,} kept; dropped: {dropped or 'none'}",
        "began as": Path(data.config["policy"]).name,
    }


def _missing(data: RunData) -> str:
    if not data.missing:
        return ""
    items = "".join(f"<li>{_with_code(text)}</li>" for text in data.missing)
    return f"<section class='missing'><h2>What is not here</h2><ul>{items}</ul></section>"


def _plot(plot: Plot) -> str:
    source = f"data:image/svg+xml;base64,{base64.b64encode(plot.svg.read_bytes()).decode()}"
    wide = " class='wide'" if plot.name in ("losses", "by_task") else ""
    return (
        f"<figure{wide}><h2>{plot.title}</h2><img src='{source}' alt='{html.escape(plot.title)}' "
        f"width='{plot.width * INCH:.0f}'>"
        f"<figcaption>{html.escape(plot.caption)} <code>{plot.name}.svg</code></figcaption></figure>"
    )


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
    commands = [command_of(data.kind, data.config), evaluation_of(data.kind, data.config), "understudy report again"]
    return (
        "<section><h2>How to repeat it</h2>"
        f"<pre>{html.escape(_before(data) + chr(10).join(commands))}</pre><p class='soft'>{_same(data)}</p></section>"
    )


def _before(data: RunData) -> str:
    """What must be there first, as a comment."""
    if data.on_policy:
        return "# --policy must be the policy that it began with: a file, or the run that made it\n"
    if data.demonstrations is not None and not data.demonstrations[0]:
        return ""
    demos = data.config.get("demos") or "again/store"
    number = "the same" if data.demonstrations is None else f"{data.demonstrations[0]:,}"
    return f"# {number} demonstrations belong in {demos}: copy the store, or record new ones\n"


def _same(data: RunData) -> str:
    same = "comes to the same bits, so <code>policy</code> in the table above is the same"
    if data.on_policy:
        return (
            f"On the same code and world, from the same policy and with the same number of CPU threads, a run in one "
            f"process {same}, however many workers it has; on several ranks it comes close."
        )
    others = "" if data.imitates else "; with actors and a learner of their own it comes close"
    return (
        f"On the same code, world and demonstrations and with the same number of CPU threads, a run in one process "
        f"{same}{others}."
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


def _with_code(text: str) -> str:
    """Text in which `this` is code."""
    pieces = html.escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces))
