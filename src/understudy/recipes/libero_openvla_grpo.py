"""GRPO on LIBERO-Long from an OpenVLA-OFT checkpoint, on eight GPUs, with the sizes that SimpleVLA-RL publishes.

understudy plan libero-openvla-grpo --gpus 8xA800-80GB --network openvla-7b
understudy env setup libero
understudy init libero-openvla-grpo runs/grpo --policy path/to/openvla-oft-libero10   # your checkpoint
understudy resume runs/grpo --ranks 8
"""

from understudy.algorithms.onpolicy.config import PolicyGradientConfig
from understudy.policies.openvla.config import OpenVLAConfig
from understudy.policies.protocol import Sampling
from understudy.training.collection.group_filter import FilterConfig
from understudy.training.collection.task_start_plan import PlanConfig
from understudy.training.distributed.config import EngineConfig
from understudy.training.onpolicy.config import OnPolicyConfig, TaskEvaluationConfig, WorkersConfig

KIND = "grpo"
CONFIG = OnPolicyConfig(
    policy="path/to/openvla-oft-libero10",
    env="libero:libero_10?stock=true",
    openvla=OpenVLAConfig(cameras=("agentview",), block_steps=8, center_crop=True, libero_gripper=True),
    iterations=100,
    eval_every=20,
    sampling=Sampling(temperature=1.6),
    plan=PlanConfig(n_samples=8, data_batch_size=64 * 8),  # there it counts starts, here episodes
    filters=FilterConfig(filter_accuracy=True, accuracy_lower_bound=0.1, accuracy_upper_bound=0.9),
    algorithm=PolicyGradientConfig(
        mini_batch_unit="episodes",
        ppo_mini_batch_size=128,
        ppo_micro_batch_size=8,
        ppo_epochs=1,
        loss_aggregation="episode-mean",
    ),
    engine=EngineConfig(parallel="fsdp", precision="bfloat16", learning_rate=5e-6, gradient_checkpointing=True),
    workers=WorkersConfig(num_parallel_envs=64),  # eight on each rank
    evaluation=TaskEvaluationConfig(episodes=100, sampling="sampled"),
)
