"""A learner of your own with torch's DataLoader: workers draw the batches, and a stopped run draws the next ones.

python examples/own_learner.py
"""

import json
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import understudy as us
from understudy.envs.registry import open_world
from understudy.training import BatchDataset, record_script

ENV = "toy:press_button?cameras=false&state=task"


def main(folder: str = "own-learner", demos: int = 10, epochs: int = 3, batches: int = 100, workers: int = 2) -> float:
    place = Path(folder)
    with open_world(ENV) as world:
        record_script(world, place / "store", successes=demos)
    net = nn.Sequential(nn.LazyLinear(64), nn.ReLU(), nn.Linear(64, 1))  # how far is the episode? a value of your own
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    open_sampler = partial(us.Sampler, place / "store", us.DEMO, batch_size=64, seed=0)  # each worker calls it
    dataset = BatchDataset(open_sampler, num_batches=batches)
    loader = DataLoader(dataset, batch_size=None, num_workers=workers)
    losses = []
    for epoch in range(epochs):
        for batch in loader:  # tensors: batch["observation"], batch["action"], batch["reward"], ...
            loss = (net(batch["observation"]["state"])[:, 0] - batch["reward"]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        position = {"state": dataset.state, "start": dataset.next_start}
        (place / "position.json").write_text(json.dumps(position))  # with it, a stopped run draws the next batches
        print(f"epoch {epoch}: loss {losses[-1]:.4f}")
    resumed = json.loads((place / "position.json").read_text())
    again = BatchDataset(open_sampler, num_batches=1, **resumed)
    print("a resumed run continues with batch", again.next_start, "whose shape is", next(iter(again))["action"].shape)
    return losses[-1]


if __name__ == "__main__":
    main()
