"""Report: a run as one HTML file that opens offline, and its figures as files for a paper."""

from __future__ import annotations

import base64
import html
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from understudy import __version__
from understudy.core import UnderstudyError
from understudy.dashboard.api.cluster import lost_shards, summary_line
from understudy.dashboard.report.plots import Plot, draw_all
from understudy.dashboard.report.repeat_command import changed_options, command_of, evaluation_of, options_of
from understudy.dashboard.report.run_data import PracticeEpisode, RunData, read_run
from understudy.dashboard.report.scores import evaluations, headline

EMBED_BYTES = 8 * 2**20  # of videos in the file; the others are listed by path
INCH = 108  # pixels, so that text has the same size in all figures
STYLE = Path(__file__).with_name("report.css")
ALGORITHMS = {
    "rlpd": "RLPD",
    "cloning": "behaviour cloning",
    "sft": "supervised fine-tuning",
    "improve": "improvement from recorded experience",
    "grpo": "GRPO",
    "rloo": "RLOO",
    "reinforce": "REINFORCE++",
    "ppo": "PPO",
}


@dataclass(frozen=True, kw_only=True)
class Report:
    """The files that were written, and what they lack."""

    html: Path
    figures: tuple[Path, ...]
    missing: tuple[str, ...]


def write_report(run: Path, out: Path | None = None) -> Report:
    """Read a run, finished or running, and write its report to a directory; by default `report` in the run."""
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
        _lost(data),
        "<section class='plots'>" + "".join(_plot(plot) for plot in plots) + "</section>" if plots else "",
        evaluations(data),
        _videos(data),
        _repeat(data),
        _config(data),
        _missing(data),
    ]
    made = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{name}</title>"
        f"<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<style>{STYLE.read_text()}</style></head><body><main>{''.join(parts)}</main>"
        f"<footer>Made by Understudy {__version__} at {made} UTC from <code>{html.escape(str(data.path))}</code>. "
        f"The figures are beside this file as SVG, PDF and PNG.</footer></body></html>"
    )


# ---- sections


def _head(data: RunData) -> str:
    facts = {"algorithm": ALGORITHMS.get(data.kind, data.kind), "seed": data.config.get("seed")}
    facts |= _iterations(data) if data.on_policy else _steps(data)
    if data.cluster is not None:
        facts["cluster"] = summary_line(data.cluster)
    doing = "running" if data.is_running else "finished" if data.is_finished else "stopped"
    state = f"<span class='state{' live' if data.is_running else ''}'>{doing}</span>"
    listed = "".join(f"<div><dt>{name}</dt><dd>{html.escape(str(value))}</dd></div>" for name, value in facts.items())
    title = html.escape(data.path.resolve().name)
    return (
        f"<header><h1>{title} {state}</h1><p class='env'><code>{html.escape(data.env)}</code></p>"
        f"{headline(data)}<dl>{listed}</dl></header>"
    )


def _steps(data: RunData) -> dict[str, str]:
    """The progress of an off-policy run."""
    facts = {"updates": f"{data.update:,}", "demonstrations": _demonstrations(data)}
    if data.imitates:
        return facts
    steps = sum(episode.length for episode in data.episodes)
    human = sum(episode.human_steps for episode in data.episodes)
    whole = data.config.get("steps", 0)
    return facts | {
        "practice": f"{data.step:,} of {whole:,} steps, {len(data.episodes):,} episodes",
        "successful practice": _practice(data.episodes, data.helper),
        "intervention rate": f"{100 * human / steps:.1f} % of steps" if steps else "no steps yet",
    }


def _practice(episodes: Sequence[PracticeEpisode], helper: str) -> str:
    """How many episodes succeeded alone, and how many with an intervention: the second says little about the policy."""
    if not episodes:
        return "no episodes yet"
    helped = sum(episode.success and episode.human_steps > 0 for episode in episodes)
    alone = sum(episode.success for episode in episodes) - helped
    share = f"{alone:,} of {len(episodes):,} alone ({100 * alone / len(episodes):.0f} %)"
    if not helped:
        return share
    return f"{share}, {helped:,} with an intervention by {helper} ({100 * helped / len(episodes):.0f} %)"


def _iterations(data: RunData) -> dict[str, str]:
    """The progress of an on-policy run, and its rollout groups."""
    groups = data.rollout_groups
    episodes, successes = (sum(task["recent"][name] for task in groups["tasks"]) for name in ("episodes", "successes"))
    share = f"{successes:,} of {episodes:,} ({100 * successes / max(episodes, 1):.0f} %)"
    dropped = ", ".join(f"{number:,} {reason}" for reason, number in groups["dropped"].items())
    return {
        "iterations": f"{groups['iterations']:,} of {data.config['iterations']:,}",
        "updates": f"{data.update:,}",
        "rollouts": f"{data.step:,} steps, {len(data.episodes):,} episodes",
        f"success in the last {groups['recent']} iterations": share,
        "groups": f"{groups['kept']:,} kept; dropped: {dropped or 'none'}",
        "initial policy": Path(data.config["policy"]).name,
    }


def _lost(data: RunData) -> str:
    """A warning: steps that the run had collected do not exist any more."""
    lost = lost_shards(data.cluster) if data.cluster else []
    return f"<section class='lost'><h2>Lost data</h2><ul>{_items(lost)}</ul></section>" if lost else ""


def _missing(data: RunData) -> str:
    """A footnote: what a reader may look for, and why it is not here."""
    lost = set(lost_shards(data.cluster)) if data.cluster else set()
    missing = [text for text in data.missing if text not in lost]
    return f"<div class='missing'><h2>Not in this report</h2><ul>{_items(missing)}</ul></div>" if missing else ""


def _items(texts: Sequence[str]) -> str:
    return "".join(f"<li>{_with_code(text)}</li>" for text in texts)


def _plot(plot: Plot) -> str:
    source = f"data:image/svg+xml;base64,{base64.b64encode(plot.svg.read_bytes()).decode()}"
    wide = " class='wide'" if plot.name in ("losses", "by_task") else ""
    return (
        f"<figure{wide}><h2>{plot.title}</h2><img src='{source}' alt='{html.escape(plot.title)}' "
        f"width='{plot.width * INCH:.0f}'>"
        f"<figcaption>{html.escape(plot.caption)} <code>{plot.name}.svg</code></figcaption></figure>"
    )


def _videos(data: RunData) -> str:
    if not data.videos:
        return ""
    bytes_left, shown, listed = EMBED_BYTES, [], []
    for path in data.videos:
        size = path.stat().st_size
        if size > bytes_left:
            listed.append(f"<li><code>{html.escape(str(path))}</code></li>")
            continue
        bytes_left -= size
        source = f"data:image/gif;base64,{base64.b64encode(path.read_bytes()).decode()}"
        label = html.escape(path.stem)
        shown.append(f"<figure><img src='{source}' alt='{label}'><figcaption>{label}</figcaption></figure>")
    others = f"<p class='soft'>Too large to embed in this file:</p><ul>{''.join(listed)}</ul>" if listed else ""
    return (
        "<section><h2>Worst episodes of the last evaluation</h2>"
        f"<div class='videos'>{''.join(shown)}</div>{others}</section>"
    )


def _repeat(data: RunData) -> str:
    commands = [command_of(data.kind, data.config), evaluation_of(data.kind, data.config), "understudy report again"]
    return (
        "<section><h2>How to repeat this run</h2>"
        f"<pre>{html.escape(_before(data) + chr(10).join(commands))}</pre><p class='soft'>{_same(data)}</p></section>"
    )


def _before(data: RunData) -> str:
    """What the commands need, as a comment."""
    if data.on_policy:
        return "# --policy must be the same initial policy: a file, or the run that trained it\n"
    if data.demonstrations is not None and not data.demonstrations[0]:
        return ""
    demos = data.config.get("demos") or "again/store"
    number = "the same" if data.demonstrations is None else f"{data.demonstrations[0]:,}"
    return f"# put {number} demonstrations into {demos} first: copy the store, or record new ones\n"


def _same(data: RunData) -> str:
    same = "gives the same bits, so <code>policy</code> in the table above is the same"
    if data.on_policy:
        return (
            f"On the same code and world, from the same policy and with the same number of CPU threads, a run in one "
            f"process {same}, for any number of workers; on several ranks the result is close but not equal."
        )
    others = "" if data.imitates else "; with separate actors and learner the result is close but not equal"
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
        f"<section><h2>Config</h2><pre class='config'>{chr(10).join(lines)}</pre><p class='soft'>Bold: not "
        "the default. The same config is in the run's <code>config.json</code>.</p></section>"
    )


# ---- parts


def _demonstrations(data: RunData) -> str:
    if data.demonstrations is None:
        return "not counted"
    episodes, steps = data.demonstrations
    return f"{episodes:,} ({steps:,} steps)" if episodes else "none"


def _with_code(text: str) -> str:
    """HTML in which text between backticks is code."""
    pieces = html.escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if index % 2 else piece for index, piece in enumerate(pieces))
