"""Tables of evaluation scores: on which episodes, how actions were sampled, and by task."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from understudy.dashboard.report.run_data import Line, RunData
from understudy.training.runs.wilson_interval import SuccessRate

LAST = 8  # evaluations in the table
MAX_STARTS = 40  # listed of those that failed


def headline(data: RunData) -> str:
    """The newest score, and the episodes it was measured on."""
    line = data.evaluations[-1] if data.evaluations else data.later
    if line is None:
        return "<p class='headline none'>not evaluated yet</p>"
    score = score_of(line)
    low, high = score.interval
    what = "held-out" if line.get("protocol", "held-out") == "held-out" else "benchmark"
    chosen = f", {sampling_text(line)}" if "sampling" in line else ""
    when = f"after {line['iteration']:,} iterations; " if data.on_policy and "iteration" in line else ""
    meaning = f"<p class='soft'>{when}{html.escape(str(line['meaning']))}</p>" if "meaning" in line else ""
    return (
        f"<p class='headline'><b>{100 * score.rate:.0f} %</b> of {score.num_episodes} {what} episodes{chosen} "
        f"<span class='soft'>95 %: {100 * low:.0f} to {100 * high:.0f}</span></p>{meaning}"
    )


def sampling_text(line: Line) -> str:
    """How actions were sampled."""
    if line.get("sampling") == "sampled":
        return f"actions sampled at temperature {line.get('temperature', 1.0):g}"
    return "most likely actions" if "sampling" in line else "without action noise"


def evaluations(data: RunData) -> str:
    """The last evaluations, and the tasks of the newest."""
    rows = [(_when(data, line), f"{line['update']:,}", line) for line in data.evaluations[-LAST:][::-1]]
    if data.later is not None:
        rows.insert(0, ("<code>understudy evaluate</code>", "", data.later))
    if not rows:
        return ""
    has_sampling = any("sampling" in line for _, _, line in rows)
    body = "".join(_evaluation(when, update, line, has_sampling=has_sampling) for when, update, line in rows)
    left = len(data.evaluations) - LAST
    more = f"<p class='soft'>{left} earlier ones are in <code>metrics.jsonl</code>.</p>" if left > 0 else ""
    first = "iteration" if data.on_policy else "sampled steps" if data.kind in ("sft", "improve") else "step"
    names = [first, "update", "success", "95 % interval", "episodes", "starts"]
    names += ["split", "actions"] if has_sampling else []
    head = "".join(f"<th>{name}</th>" for name in (*names, "mean length", "policy", "code", "commit"))
    return (
        f"<section><h2>Evaluations</h2><div class='scroll' tabindex='0'><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>{more}{_tasks(data) or _failures(data)}{_versions(rows[0][2])}</section>"
    )


def _when(data: RunData, line: Line) -> str:
    return f"{line['iteration']:,}" if data.on_policy else f"{line['step']:,}"


def _evaluation(when: str, update: str, line: Line, *, has_sampling: bool) -> str:
    score = score_of(line)
    low, high = score.interval
    made_of = line.get("fingerprint", {})
    cells = [
        when,
        update,
        f"<b>{100 * score.rate:.0f} %</b>",
        f"{100 * low:.1f} to {100 * high:.1f} %",
        f"{score.num_episodes:,}",
        f"{line['starts']:,}",
        *(
            [html.escape(str(line.get("split", "eval"))), sampling_text(line).removeprefix("actions ")]
            if has_sampling
            else []
        ),
        f"{line['mean_steps']:.1f}",
        *(f"<code>{html.escape(str(made_of.get(name) or '-'))}</code>" for name in ("parameters", "code", "commit")),
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _tasks(data: RunData) -> str:
    """Each task at the newest evaluation and at the first; empty if evaluations have no tasks."""
    newest = data.evaluations[-1] if data.evaluations else data.later
    tasks: Mapping[str, Line] = {} if newest is None else newest.get("tasks", {})
    if newest is None or not tasks:
        return ""
    first: Mapping[str, Line] = data.evaluations[0].get("tasks", {}) if len(data.evaluations) > 1 else {}
    failed: dict[str, list[str]] = {name: [] for name in tasks}
    for episode in newest["episode_results"]:
        if not episode["success"]:
            failed[episode["task"]].append(str(episode["start"]))
    body = ""
    for name, line in tasks.items():
        low, high = score_of(line).interval
        earlier = [f"{100 * first[name]['success']:.0f} %" if name in first else "-"] if first else []
        cells = [
            html.escape(name),
            f"<b>{100 * line['success']:.0f} %</b>",
            f"{100 * low:.0f} to {100 * high:.0f} %",
            f"{line['episodes']:,}",
            *earlier,
            _listed(failed[name], MAX_STARTS // 4) or "none",
        ]
        body += "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    before = "<th>at the first evaluation</th>" if first else ""
    lost = newest.get("failed_workers", 0)
    workers = f"<p class='soft'>{lost} of these episodes were lost to failed workers, and count as failures.</p>"
    return (
        "<h2 class='below'>By task, at the last evaluation</h2>"
        "<div class='scroll' tabindex='0'><table class='tasks'><thead><tr>"
        f"<th>task</th><th>success</th><th>95 % interval</th><th>episodes</th>{before}<th>starts that failed</th></tr>"
        f"</thead><tbody>{body}</tbody></table></div>{workers if lost else ''}"
    )


def _failures(data: RunData) -> str:
    if not data.evaluations:
        return ""
    failed = [str(episode["start"]) for episode in data.evaluations[-1]["episode_results"] if not episode["success"]]
    if not failed:
        return "<p class='soft'>The last evaluation succeeded from every start.</p>"
    return f"<p class='soft'>The last evaluation failed from these starts: {_listed(failed, MAX_STARTS)}.</p>"


def _listed(starts: list[str], most: int) -> str:
    more = f" and {len(starts) - most} others" if len(starts) > most else ""
    return ", ".join(starts[:most]) + more


def _versions(line: Line) -> str:
    made_of = line.get("fingerprint")
    if made_of is None:
        return ""
    found = {"understudy": made_of["understudy"], **made_of["versions"]}
    listed = ", ".join(f"{html.escape(str(name))} {html.escape(str(value))}" for name, value in found.items())
    return f"<p class='soft'>Measured on {listed}; config <code>{made_of['config']}</code>.</p>"


def score_of(line: Mapping[str, Any]) -> SuccessRate:
    number = int(line["episodes"])
    return SuccessRate(num_successes=round(float(line["success"]) * number), num_episodes=number)
