"""The arithmetic of estimates, against numbers that were worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from understudy.algorithms.onpolicy.config import PolicyGradientConfig
from understudy.training.collection.task_start_plan import PlanConfig
from understudy.training.distributed.config import EngineConfig
from understudy.training.gpu_estimate.duration import Assumptions, Cost, Durations, durations, work_of
from understudy.training.gpu_estimate.gpus import GIB, KNOWN, Gpu, Gpus, GpuSpeed, like, parse_gpus
from understudy.training.gpu_estimate.memory import PassBytes, phases, reserve_bytes
from understudy.training.gpu_estimate.network_size import NetworkSize
from understudy.training.onpolicy.config import OnPolicyConfig, TaskEvaluationConfig, WorkersConfig
from understudy.training.runs.config import ConfigError

# A thousand numbers in float32, of which the largest block has 200; all are trained.
SIZE = NetworkSize(
    parameters=1000,
    trained=1000,
    parameter_bytes=4000,
    largest_block=200,
    shard_bytes=4000,
    shard_trained=1000,
    gathered=1000,
)
LEARNING = PassBytes(activations=500, gradients=4000, copies=2000)
ACTING = PassBytes(activations=50, copies=20)
# A trillion FLOPs, a gigabyte and a tenth of one in a second, each at the share that is reached.
GPU = Gpu(name="test", memory=10**9, tflops=2.5, bandwidth_gb_s=1 / 0.7, link_gb_s=0.1 / 0.7, source="a test")


def held(engine: EngineConfig, ranks: int, **options: bool) -> dict[str, dict[str, int]]:
    size = SIZE
    if engine.parallel == "fsdp":
        size = replace(SIZE, shard_bytes=4000 // ranks, shard_trained=1000 // ranks)
    found = phases(size, engine, ranks=ranks, learning=LEARNING, acting=ACTING, reference_bytes=800, **options)
    return {name: {k: v for k, v in one.by_category().items() if v} for name, one in found.items()}


def test_one_process_holds_everything() -> None:
    assert held(EngineConfig(), 1) == {
        "acting": {"parameters": 4000, "optimizer": 8000, "activations": 50, "copies": 20, "reference": 800},
        "learning": {
            "parameters": 4000,
            "gradients": 4000,
            "optimizer": 8000,
            "activations": 500,
            "copies": 2000,
            "reference": 800,
        },
        "optimizer step": {"parameters": 4000, "gradients": 4000, "optimizer": 8000, "reference": 800},
    }


def test_fsdp_holds_a_share_and_what_it_gathers() -> None:
    found = held(EngineConfig(parallel="fsdp", precision="bfloat16"), 4)
    assert found["learning"] == {
        "parameters": 1000,
        "gradients": 1000,
        "optimizer": 2000,
        "activations": 500,
        "copies": 2000,  # as traced
        "reference": 200,
    }
    # All in bfloat16. The buffer of the last block, of 400 bytes, is gone before there are activations.
    assert found["acting"]["copies"] + found["acting"]["activations"] == 2 * 1000 + 400


def test_offloading_and_ddp() -> None:
    found = held(EngineConfig(offload_optimizer=True), 1)
    assert "optimizer" not in found["learning"]
    assert found["optimizer step"]["optimizer"] == 8000  # it comes back for the step
    found = held(EngineConfig(parallel="fsdp", offload_parameters=True), 4)
    assert found["optimizer step"] == {}
    assert held(EngineConfig(parallel="ddp"), 4)["acting"]["gradients"] == 4000  # its buckets stay


def test_a_policy_that_acts_while_another_learns_takes_memory_beside_it() -> None:
    turns, ahead = held(EngineConfig(), 1), held(EngineConfig(), 1, collects_ahead=True)
    assert ahead["learning"] == turns["learning"] | {"activations": 500 + 50, "copies": 2000 + 20 + 4000}
    assert ahead["optimizer step"] == turns["optimizer step"] | {"activations": 50, "copies": 20 + 4000}
    assert ahead["acting"] == turns["acting"] | {"copies": 20 + 4000}
    sharded = EngineConfig(parallel="fsdp")  # on a cluster, others act
    assert held(sharded, 4, collects_ahead=True) == held(sharded, 4)


def test_a_reserve_grows_with_the_gpu_and_with_ranks() -> None:
    assert reserve_bytes(80 * GIB, ranks=1) == 5 * GIB
    assert reserve_bytes(80 * GIB, ranks=8) == 5 * GIB + GIB // 2


def run_config(**algorithm: object) -> OnPolicyConfig:
    options: dict[str, object] = {"ppo_epochs": 2, "ppo_mini_batch_size": 32, "ppo_micro_batch_size": 4, **algorithm}
    return OnPolicyConfig(
        policy="",
        iterations=10,
        plan=PlanConfig(n_samples=8, data_batch_size=16),
        algorithm=PolicyGradientConfig(**options),  # type: ignore[arg-type]
        workers=WorkersConfig(num_parallel_envs=8),
        evaluation=TaskEvaluationConfig(episodes=10),
        eval_every=5,
    )


def test_the_work_of_an_iteration() -> None:
    """16 episodes of ten decisions are 160 rows, five mini batches of 32; two ranks have 16 of each, in 4 pieces."""
    work = work_of(run_config(), ranks=2, block_steps=10, tokens=1, episode_steps=100, accepted=0.5)
    assert (work.episodes, work.decisions, work.rows) == (32, 320, 160)
    assert (work.updates, work.micro_rows, work.micro_batches) == (10, 4, 20)
    assert work.evaluation_decisions == 100
    assert work.accumulates
    large = run_config(ppo_micro_batch_size=16)
    assert not work_of(large, ranks=2, block_steps=10, tokens=1, episode_steps=100, accepted=0.5).accumulates
    whole = run_config(mini_batch_unit="episodes", ppo_mini_batch_size=8)
    assert work_of(whole, ranks=2, block_steps=10, tokens=1, episode_steps=100, accepted=1.0).updates == 4
    tokens = run_config(ppo_micro_batch_size=None, max_tokens=60)
    assert work_of(tokens, ranks=2, block_steps=10, tokens=20, episode_steps=100, accepted=1.0).micro_rows == 3


def test_the_time_of_an_iteration() -> None:
    config = replace(run_config(), engine=EngineConfig(parallel="fsdp", precision="bfloat16"))
    work = work_of(config, ranks=2, block_steps=10, tokens=1, episode_steps=100, accepted=1.0)
    cost = Cost(forward_flops=1e12, backward_flops=2e12, act_flops=1e11, act_passes=1, act_rows=4, block_steps=10)
    found = durations(config, SIZE, cost, work, Gpus(num=2, gpu=GPU), Assumptions(step_ms=100.0, efficiency=0.4))
    # A rank makes 80 decisions for four worlds at once: each takes ten steps, a second, and a pass of 0.4.
    assert found.phases["collection"].seconds == pytest.approx(80 / 4 * 1.4)
    assert found.phases["collection"].bound == "worlds"
    # 20 micro batches of four rows: a trillion FLOPs each in a second, three times as many to learn, for two epochs.
    assert found.phases["log-probs"].seconds == pytest.approx(20 * 4)
    assert found.phases["learning"].seconds == pytest.approx(2 * 20 * 4 * 3, rel=1e-3)
    assert found.phases["publication"].bytes_moved == 1000  # half of a thousand numbers in bfloat16
    # Twice gathered and once reduced, in each of 40 passes.
    assert found.phases["learning"].bytes_moved == 40 * (2 * 1000 + 2000)
    evaluation = 100 / 2 / 4 * 1.4  # on both ranks
    assert found.evaluation_s == pytest.approx(evaluation)
    assert found.run_s == pytest.approx(10 * found.iteration_s + 3 * evaluation)
    assert found.bottleneck == "learning, which waits for FLOPs"


def test_collecting_while_learning_saves_the_shorter_of_both() -> None:
    cost = Cost(forward_flops=1e12, backward_flops=2e12, act_flops=1e11, act_passes=1, act_rows=4, block_steps=10)

    def times(*, step_ms: float, max_lag: int, accepted: float = 1.0) -> Durations:
        config = replace(run_config(recompute_log_probs=False), max_lag=max_lag)
        work = work_of(config, ranks=1, block_steps=10, tokens=1, episode_steps=100, accepted=accepted)
        assume = Assumptions(step_ms=step_ms, accepted=accepted)
        return durations(config, SIZE, cost, work, Gpus(num=1, gpu=GPU), assume)

    for step_ms in (200.0, 10_000.0):
        turns, ahead = times(step_ms=step_ms, max_lag=0), times(step_ms=step_ms, max_lag=1)
        collecting = turns.phases["collection"]
        others = turns.iteration_s - collecting.seconds
        assert ahead.phases == turns.phases
        assert ahead.iteration_s == pytest.approx(max(collecting.seconds, others + collecting.gpu_s))
        assert ahead.iteration_s < turns.iteration_s
    half = times(step_ms=10_000.0, max_lag=1, accepted=0.5)  # the second wave waits for the newest policy
    assert half.iteration_s == pytest.approx(half.phases["collection"].seconds)
    bound = times(step_ms=10.0, max_lag=0)  # if the GPU is always busy, there is nothing to save
    assert times(step_ms=10.0, max_lag=1).iteration_s == bound.iteration_s


def test_log_probs_of_an_older_policy_are_computed_again() -> None:
    cost = Cost(forward_flops=1e12, backward_flops=2e12, act_flops=1e11, act_passes=1, act_rows=4, block_steps=10)
    config = run_config()
    work = work_of(config, ranks=1, block_steps=10, tokens=1, episode_steps=100, accepted=1.0)
    for max_lag in (0, 1):
        found = durations(
            replace(config, max_lag=max_lag), SIZE, cost, work, Gpus(num=1, gpu=GPU), Assumptions(step_ms=1.0)
        )
        assert (found.phases["log-probs"].seconds > 0) == bool(max_lag)


def test_each_assumption_changes_the_time() -> None:
    config = run_config()
    cost = Cost(forward_flops=1e12, backward_flops=2e12, act_flops=1e11, act_passes=1, act_rows=4, block_steps=10)

    def seconds(assume: Assumptions) -> float:
        work = work_of(config, ranks=1, block_steps=10, tokens=1, episode_steps=100, accepted=assume.accepted)
        return durations(config, SIZE, cost, work, Gpus(num=1, gpu=GPU), assume).iteration_s

    plain = seconds(Assumptions())
    for assume in (Assumptions(step_ms=200.0), Assumptions(accepted=0.5), Assumptions(efficiency=0.2)):
        assert seconds(assume) > plain


def test_gpus_are_read() -> None:
    assert parse_gpus("8xA100-80GB") == Gpus(num=8, gpu=KNOWN["A100-80GB"])
    assert parse_gpus("h100-80gb").num == 1
    assert parse_gpus("8xA100-80GB", GpuSpeed(tflops=100)).gpu.tflops == 100
    own = parse_gpus("4x96GB", GpuSpeed(tflops=100, bandwidth_gb_s=1000, link_gb_s=50))
    assert (own.num, own.gpu.memory, own.gpu.link_gb_s) == (4, 96 * GIB, 50)
    assert like("NVIDIA A100-SXM4-80GB", 79 * GIB) == replace(KNOWN["A100-80GB"], memory=79 * GIB)
    assert like("NVIDIA GeForce RTX 4090", 24 * GIB).tflops == 165


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("8xA100-80G", "'A100-80G' is not in the table; did you mean 'A100-80GB'?"),
        ("8xH100", "did you mean 'H100-80GB'"),
        ("8xTPU", "known are A100-40GB"),
        ("0xA100-80GB", "expected NUMBERxKIND such as 8xA100-80GB, got '0xA100-80GB'"),
        ("4x96GB", "give --speed.bandwidth-gb-s, --speed.link-gb-s, --speed.tflops from its data sheet"),
    ],
)
def test_gpus_that_are_not_known(given: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error.replace("?", r"\?")):
        parse_gpus(given)


def test_wrong_assumptions_are_refused() -> None:
    for options in ({"efficiency": 0.0}, {"accepted": 1.5}, {"step_ms": -1.0}, {"episode_steps": 0}):
        with pytest.raises(ConfigError, match="expected"):
            Assumptions(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tflops: expected more than 0, got -1"):
        GpuSpeed(tflops=-1)
