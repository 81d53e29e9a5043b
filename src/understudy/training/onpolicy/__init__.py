"""On policy: rehearse in groups, compare, and learn from the difference (GRPO, RLOO, REINFORCE++, PPO)."""

from understudy.training.onpolicy.config import OnPolicyConfig
from understudy.training.onpolicy.run import OnPolicyRun, Progress

__all__ = ["OnPolicyConfig", "OnPolicyRun", "Progress"]
