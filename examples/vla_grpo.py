"""A vision-language-action policy on the toy table: demonstrations, supervised fine-tuning, then GRPO.

python examples/vla_grpo.py        # three CPU minutes; needs the extra vla

Fine-tuning takes the policy to about half of the held-out starts. Eight iterations of GRPO only show how it works: the
curves of docs/vla.md have more.

The same with commands: `understudy record`, `understudy sft` and `understudy train grpo`, see docs/vla.md.
"""

from dataclasses import replace
from pathlib import Path

from understudy.envs.registry import open_world
from understudy.policies.vla import VLAConfig
from understudy.training import record_script
from understudy.training.onpolicy.config import OnPolicyConfig, TaskEvaluationConfig, WorkersConfig, default_config
from understudy.training.onpolicy.onpolicy_run import OnPolicyProgress, OnPolicyRun
from understudy.training.onpolicy.sft import SFTConfig, run_sft
from understudy.training.runs.run import Run

ENV = "toy:press_button?size=32&state=task"
VLA = VLAConfig(cameras=("front",), use_proprio=("state",), vision_hidden=48, hidden=64, num_bins=64)


def main(
    folder: str = "vla",
    demos: int = 20,
    updates: int = 300,
    iterations: int = 8,
    groups: int = 4,  # in an iteration
    group_size: int = 8,  # rollouts from the same start
    episodes: int = 32,
) -> None:
    place = Path(folder)
    with open_world(ENV) as world:
        record_script(world, place / "demos", successes=demos)
    evaluation = TaskEvaluationConfig(episodes=episodes, sampling="sampled")
    sft = SFTConfig(env=ENV, demos=str(place / "demos"), updates=updates, vla=VLA, evaluate=False)
    run_sft(Run.create(place / "sft", "sft", sft), print)
    grpo: OnPolicyConfig = default_config("grpo", policy=str(place / "sft"))
    grpo = replace(
        grpo,
        env=ENV,
        iterations=iterations,
        eval_every=iterations,
        max_empty=iterations + 1,  # iterations without a group that has both successes and failures
        plan=replace(grpo.plan, n_samples=group_size, data_batch_size=group_size * groups, max_waves=2),
        workers=WorkersConfig(num_parallel_envs=2),
        evaluation=evaluation,
    )

    def show(progress: OnPolicyProgress) -> None:
        if progress.evaluation is not None:
            print(f"after {progress.iteration} iterations:", progress.evaluation)

    with OnPolicyRun(Run.create(place / "grpo", "grpo", grpo), show) as training:
        training.run()


if __name__ == "__main__":
    main()
