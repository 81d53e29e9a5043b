"""Training scripts of SimpleVLA-RL and RIPT-VLA: what they start is an `understudy train` with the same meaning.

    options = parse_overrides(["data.n_samples=8", "algorithm.adv_estimator=rloo"])
    command = simplevla_rl.translate(options, count_tasks=...)
    command.words  # ["train", "rloo", ...]

`programs.py` finds the call that trains among all programs that a shell script starts.
"""
