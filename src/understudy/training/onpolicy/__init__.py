"""On-policy training of VLAs (GRPO, RLOO, REINFORCE++, PPO), supervised fine-tuning and multi-task evaluation."""
