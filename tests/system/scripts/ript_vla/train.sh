#!/bin/bash
# RLOO in the words of RIPT-VLA: torchrun, the name of its training program, a config of Hydra and options behind it.
set -e

GPUS=$1
CHECKPOINT=$2
OUTPUT=$3
MASTER_PORT=$(python -c "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1]); s.close()")

NCCL_TIMEOUT=108000 torchrun --nproc_per_node="$GPUS" \
  --master_port "$MASTER_PORT" "$(dirname "$0")/train_ript_openvla_oft.py" \
  --config-name=train_rl_sides.yaml \
  exp_name=sides_train \
  variant_name=bz_8 \
  output_prefix="$OUTPUT" \
  algo.model_seed=1 \
  train_dataloader.batch_size=4 \
  training.n_steps=2 \
  training.save_interval=1 \
  algo.env_runner.num_parallel_envs=2 \
  algo.scale_factor=2.0 \
  algo.checkpoint_path="$CHECKPOINT" \
  algo.header_checkpoint=null \
  algo.lora_adaptor_ckpt=null
