"""Store and sampler: record episodes, read them back, and draw batches as RLPD does.

python examples/store_and_sampler.py
"""

import numpy as np

import understudy as us

SPEC = us.StepSpec(
    observation=us.Spec(
        {"wrist": us.ArraySpec(shape=(64, 64, 3), dtype="uint8"), "state": us.ArraySpec(shape=(6,), dtype="float32")}
    ),
    action=us.Spec(us.ArraySpec(shape=(6,), dtype="float32", low=-1, high=1)),
)


def observe(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {"wrist": rng.integers(0, 256, (64, 64, 3), np.uint8), "state": rng.normal(size=6).astype(np.float32)}


def main(store: str = "example-store", episodes: int = 10, steps: int = 50) -> None:
    rng = np.random.default_rng(0)
    with us.Store.open(store) as opened:
        writer = opened.writer("arm-1", SPEC)
        for number in range(episodes):
            human = number % 2 == 0  # every second episode is a demonstration
            writer.begin(task="pick", kind="demonstration" if human else "practice", operator="ada" if human else None)
            for t in range(steps):
                step = us.Step(
                    observation=observe(rng),
                    action=rng.uniform(-1, 1, 6).astype(np.float32),
                    reward=float(t == steps - 1),
                    terminated=t == steps - 1,
                    source=us.Source.HUMAN if human else us.Source.POLICY,
                )
                writer.append(step)
            writer.end(observe(rng), success=True)  # returns when the disk has it
    with us.Reader(store) as reader:  # in any process, also while another one writes
        for record in reader.episodes("kind = 'demonstration'"):
            print(f"episode {record.id}: {record.num_steps} steps by {record.info.operator}")
        samplers = {view.name: us.Sampler(reader, view, batch_size=64, seed=1) for view in (us.DEMO, us.ONLINE)}
        mixture = us.Mixture(samplers, {"demo": 1, "online": 1}, batch_size=64)
        with us.Prefetch(mixture) as batches:
            batch = next(batches)
            print(
                "cameras",
                batch.observation["wrist"].shape,
                "by humans",
                float((batch.source == us.Source.HUMAN).mean()),
            )
            position = batches.state()  # small JSON: another process that restores it continues with the next batch
            print("position", position)


if __name__ == "__main__":
    main()
