"""On-policy update rules: GRPO, RLOO, REINFORCE++ and PPO."""
