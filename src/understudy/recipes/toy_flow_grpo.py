"""GRPO on a toy task, from the flow policy of the recipe toy-flow, which learns from success what it was not shown.

understudy init toy-flow-grpo runs/grpo --policy runs/flow
understudy resume runs/grpo
understudy evaluate runs/grpo --sampled
"""

from understudy.algorithms.onpolicy.config import PolicyGradientConfig
from understudy.training.collection.group_filter import FilterConfig
from understudy.training.collection.task_start_plan import PlanConfig
from understudy.training.distributed.config import EngineConfig
from understudy.training.onpolicy.config import OnPolicyConfig, WorkersConfig

KIND = "grpo"
CONFIG = OnPolicyConfig(
    policy="runs/flow",
    env="toy:pick_red?cameras=false&state=task",
    noise_level=0.5,  # noise in each denoising step: without it there are no log-probs to learn from
    iterations=40,
    eval_every=10,
    max_empty=40,  # at the end nearly all groups succeed, and there is nothing left to learn
    plan=PlanConfig(n_samples=8, data_batch_size=64, max_waves=1),
    filters=FilterConfig(filter_accuracy=True),
    # Failures are the longest episodes: in a mean over log-probs they would outweigh the successes.
    algorithm=PolicyGradientConfig(loss_aggregation="episode-mean", ppo_micro_batch_size=128),
    engine=EngineConfig(learning_rate=2e-4, warmup_updates=20),
    workers=WorkersConfig(num_parallel_envs=8),  # as many as the policy's `act_rows`, so that no row is padding
)
