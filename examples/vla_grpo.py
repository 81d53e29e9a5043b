"""A vision-language-action policy on the toy table: demonstrations, supervised fine-tuning, then GRPO.

python examples/vla_grpo.py        # three minutes on two cores; needs the extra vla

An episode has 16 steps, in which the scripted expert succeeds from three of four held-out starts and the fine-tuned
policy from about half. GRPO learns from the success of the policy's own episodes to be quicker, and ends at 85 to 93 %
(docs/vla.md).

The options are those of the recipes toy-vla and toy-vla-grpo, which do the same with commands (`understudy recipes`).
"""

from dataclasses import replace
from pathlib import Path

from understudy.envs.registry import open_world
from understudy.recipes.toy_vla import CONFIG as SFT
from understudy.recipes.toy_vla_grpo import CONFIG as GRPO
from understudy.training import record_script
from understudy.training.onpolicy.onpolicy_run import OnPolicyProgress, OnPolicyRun
from understudy.training.onpolicy.sft import run_sft
from understudy.training.runs.run import Run


def main(
    folder: str = "vla",
    demos: int = 50,
    updates: int = SFT.updates,  # of fine-tuning
    iterations: int = GRPO.iterations,
    groups: int = GRPO.plan.num_groups,  # in an iteration
    group_size: int = GRPO.plan.n_samples,  # rollouts from the same start
    episodes: int = GRPO.evaluation.episodes,
    seed: int = 0,
) -> None:
    place = Path(folder)
    with open_world(SFT.env) as world:
        record_script(world, place / "demos", successes=demos, seed=seed)
    sft = replace(SFT, demos=str(place / "demos"), updates=updates, seed=seed)
    run_sft(Run.create(place / "sft", "sft", sft), print)
    grpo = replace(
        GRPO,
        policy=str(place / "sft"),
        iterations=iterations,
        plan=replace(GRPO.plan, n_samples=group_size, data_batch_size=group_size * groups),
        evaluation=replace(GRPO.evaluation, episodes=episodes),
        seed=seed,
    )

    def show(progress: OnPolicyProgress) -> None:
        if progress.report is not None:
            print(progress.report)
        if progress.evaluation is not None:
            print(f"after {progress.iteration} iterations:", progress.evaluation)

    with OnPolicyRun(Run.create(place / "grpo", "grpo", grpo), show) as training:
        training.run()


if __name__ == "__main__":
    main()
