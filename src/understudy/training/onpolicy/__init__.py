"""On policy: rehearse in groups, compare, and learn from the difference (GRPO, RLOO, REINFORCE++, PPO)."""
