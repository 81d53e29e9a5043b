"""A run that improves a policy from recorded experience: the loop of supervised fine-tuning over other views.

A resumed run ends with the same bits as one that was not killed: a checkpoint holds the algorithm's whole state, the
commits of the stores and the number of the next batch. So it is with the checkpoints of the value model.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.core import StoreError
from understudy.durable import files
from understudy.processes.stop import Stopped, StopRequest
from understudy.replay import Estimates, Reader
from understudy.training.improvement.config import SIMPLE, ImproveConfig, Method, RecapConfig
from understudy.training.improvement.experience import NOTHING, Experience, open_experience
from understudy.training.improvement.values import CHECKPOINTS, ValueStage
from understudy.training.onpolicy.multi_task_evaluation import TaskEvaluationResult
from understudy.training.onpolicy.sft import (
    SFTConfig,
    evaluate_policy,
    imitate,
    newest_state,
    resize_of,
    saved_policy,
)
from understudy.training.runs.config import ConfigError
from understudy.training.runs.device import choose_device
from understudy.training.runs.health import HEALTH, Health
from understudy.training.runs.metrics import MetricLog, read_metrics, rewind
from understudy.training.runs.run import Run
from understudy.training.runs.threads import use_threads
from understudy.training.runs.wilson_interval import SuccessRate

if TYPE_CHECKING:
    from understudy.algorithms.sft import SFT

KIND = "improve"
COMPARE = "compare"  # directory of the runs of other methods
COMPARISON = "comparison.json"
BEFORE = "before"


@dataclass(frozen=True, kw_only=True)
class _Schedule:
    updates: int
    report_every: int
    checkpoint_every: int
    keep_checkpoints: int


def resolved(config: ImproveConfig) -> ImproveConfig:
    """The config with what it leaves open as in the run whose policy is improved."""
    if None not in (config.demos, config.env, config.updates, config.batch_size):
        return config
    run = Run(config.policy)
    if run.kind == "sft":
        before: Any = run.config(SFTConfig)
        demos = str(run.store) if before.demos is None else before.demos
    elif run.kind == KIND:
        before = resolved(run.config(ImproveConfig))
        demos = before.demos
    else:
        raise ConfigError(
            f"policy: expected a run of `understudy sft` or `understudy improve`, got {config.policy}, a run of "
            f"{run.kind}; train one of those first"
        )
    return replace(
        config,
        demos=config.demos or demos,
        env=config.env or before.env,
        updates=config.updates or before.updates,
        batch_size=config.batch_size or before.batch_size,
    )


def run_improve(
    run: Run,
    say: Callable[[str], None],
    *,
    note: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    stop: StopRequest | None = None,
) -> tuple[Any, TaskEvaluationResult]:
    """Improve the policy, from the newest checkpoint if there is one; the policy, metrics and evaluation go to the run.

    `say`, `note`, `progress` and `stop` are as those of `run_sft`.
    """
    config = resolved(run.config(ImproveConfig))
    stop = stop or StopRequest()
    device = choose_device(config.device)
    note(str(use_threads(config.threads, large=True)))
    note(str(device))
    config = replace(config, device=device.name)
    assert config.env is not None
    with run, Health(run.path / HEALTH, role="local", name=run.kind) as health, ExitStack() as undo:
        sft, experience = _open(run, config, health, stop, say, note, progress, undo)
        policy, found = imitate(
            run,
            _schedule(config, config.updates),
            sft,
            experience,
            env=config.env,
            evaluation=config.evaluation,
            health=health,
            stop=stop,
            say=say,
            progress=progress,
        )
    assert found is not None
    return policy, found


def _open(
    run: Run,
    config: ImproveConfig,
    health: Health,
    stop: StopRequest,
    say: Callable[[str], None],
    note: Callable[[str], None],
    progress: Callable[[int, int], None],
    undo: ExitStack,
) -> tuple[SFT, Experience]:
    """The algorithm and its data, new or restored from the newest checkpoint."""
    from understudy.algorithms.sft import SFT
    from understudy.policies.load import load_policy_file

    assert config.demos is not None
    assert config.updates is not None
    assert config.batch_size is not None
    saved, values = newest_state(run.checkpoints), newest_state(run.checkpoints / CHECKPOINTS)
    last = saved or values
    rewind(run.metrics, 0 if last is None else int(last.facts["metrics"]))
    if saved is not None:
        policy: Any = saved_policy(saved, config.device)
    else:
        policy = load_policy_file(Run(config.policy).policy, device=config.device)
        if config.by == "recap":
            policy = _told_what_is_good(policy, config.recap, config.policy)
    readers: dict[Path, Reader] = {}

    def open_reader(store: Path) -> Reader:
        if store not in readers:
            readers[store] = undo.enter_context(Reader(store))
        return readers[store]

    demos, stores = Path(config.demos), [Path(store) for store in config.experience]
    estimates: dict[Path, Estimates] | None = None
    if config.by == "recap":
        with closing(MetricLog(run.metrics)) as log:
            stage = ValueStage(
                run=run,
                config=config.recap,
                schedule=_schedule(config, config.recap.value.updates),
                seed=config.seed,
                device=config.device,
                log=log,
                health=health,
                stop=stop,
            )
            estimates = stage.estimates(policy, list(dict.fromkeys([demos, *stores])), open_reader, say, progress)
    experience = open_experience(
        config.by,
        demos,
        stores,
        open_reader,
        block_steps=policy.block_steps,
        batch_size=config.batch_size,
        seed=config.seed,
        resize=resize_of(policy),
        estimates=estimates,
    )
    undo.callback(experience.close)
    if saved is not None:
        experience.restore(saved.facts["demos"])
    else:
        for part in experience.parts:
            part.steps.follow(None if estimates is None else estimates[part.steps.store].commit)
        if not any(len(part.steps) for part in experience.parts if part.name != "demonstrations"):
            raise StoreError(f"{', '.join(config.experience)}: {NOTHING[config.by]}")
    note(", ".join(f"{name}: {number:,} steps" for name, number in experience.num_steps.items()))
    policy.check_world(experience.spec)
    sft = SFT(config.sft, policy, total_updates=config.updates, seed=config.seed)
    if saved is not None:
        sft.restore(saved.state)
    return sft, experience


def _told_what_is_good(policy: Any, config: RecapConfig, path: str) -> Any:
    if not hasattr(policy, "with_advantage"):
        raise ConfigError(
            f"by: recap needs a flow policy, which can be told what is good, got a {type(policy).__name__} in {path}; "
            f"use --by hg-dagger or filtered-cloning, or train one with `understudy sft --network flow`"
        )
    return policy.with_advantage(config.guidance)


def _schedule(config: ImproveConfig, updates: int | None) -> _Schedule:
    assert updates is not None
    return _Schedule(
        updates=updates,
        report_every=config.report_every,
        checkpoint_every=config.checkpoint_every,
        keep_checkpoints=config.keep_checkpoints,
    )


# ---- comparison


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One policy of a comparison, evaluated on the same starts as the others."""

    method: str  # or BEFORE
    num_steps: int  # that it has learned from
    success: SuccessRate


def run_comparison(
    run: Run,
    say: Callable[[str], None],
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    stop: StopRequest | None = None,
) -> list[Compared]:
    """Train by each simple method too, and evaluate the policy before; all of it goes to the run, that has finished.

    A method that has finished before is not trained again.
    """
    config = resolved(run.config(ImproveConfig))
    stop = stop or StopRequest()
    rows = [_before(run, config, stop, say)]
    for method in (*SIMPLE, *(("recap",) if config.by == "recap" else ())):
        done = _finished(run if method == config.by else _method_run(run, config, method))
        if done is None:
            other = _method_run(run, config, method)
            try:
                run_improve(other, _prefixed(say, method), progress=progress, stop=stop)
            except Stopped as stopped:
                stopped.sentence = f"stopped and saved; `understudy resume {run.path}` continues the comparison"
                raise
            except StoreError as error:  # there is nothing of this kind to learn from
                say(f"{method}: left out: {error}")
                continue
            done = _finished(other)
        assert done is not None
        rows.append(Compared(method=method, num_steps=done["step"], success=_rate(done)))
    content = [{**asdict(row), "interval": row.success.interval} for row in rows]
    files.write_durably(run.path / COMPARISON, json.dumps(content, indent=1).encode())
    return rows


def _before(run: Run, config: ImproveConfig, stop: StopRequest, say: Callable[[str], None]) -> Compared:
    """The policy that is improved, on the same starts."""
    from understudy.policies.load import load_policy_file

    assert config.env is not None
    policy = load_policy_file(Run(config.policy).policy, device=choose_device(config.device).name)
    with Health(run.path / HEALTH, role="local", name=COMPARE) as health:
        found, _ = evaluate_policy(run, policy, config.env, config.evaluation, health, stop, _prefixed(say, BEFORE))
    return Compared(method=BEFORE, num_steps=0, success=found.success_rate)


def _prefixed(say: Callable[[str], None], prefix: str) -> Callable[[str], None]:
    return lambda text: say(f"{prefix}: {text}")


def _method_run(run: Run, config: ImproveConfig, method: Method) -> Run:
    """The run of another method inside this one."""
    path = run.path / COMPARE / method
    if Run.is_at(path):
        return Run(path)
    return Run.create(path, KIND, replace(config, by=method, compare=False, recap=RecapConfig()))


def _finished(run: Run) -> dict[str, Any] | None:
    """The evaluation of a run that has finished."""
    found = list(read_metrics(run.metrics, "evaluation")) if run.metrics.exists() else []
    return found[-1] if found else None


def _rate(evaluation: dict[str, Any]) -> SuccessRate:
    number = int(evaluation["episodes"])
    return SuccessRate(num_successes=round(evaluation["success"] * number), num_episodes=number)
