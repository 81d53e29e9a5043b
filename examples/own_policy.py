"""A policy of your own in plain PyTorch: behaviour cloning of a store's demonstrations, scored on held-out starts.

python examples/own_policy.py
understudy evaluate own_policy:act --env 'toy:press_button?cameras=false&state=task'   # in this folder, afterwards
"""

from pathlib import Path

import torch
from torch import nn

import understudy as us
from understudy.envs.registry import open_world
from understudy.training import record_script
from understudy.training.runs.evaluate import EvaluationConfig, evaluate

ENV = "toy:press_button?cameras=false&state=task"
WEIGHTS = Path("own_policy.pt")


def network(num_inputs: int, num_outputs: int) -> nn.Sequential:
    hidden = [nn.Linear(num_inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(128, num_outputs), nn.Tanh())


def train(store: str, net: nn.Module, updates: int) -> None:
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    with us.Reader(store) as reader:
        sampler = us.Sampler(reader, us.DEMO, batch_size=128, seed=0)
        sampler.follow()  # takes in what was committed since it last looked
        for _ in range(updates):
            batch = sampler.sample()  # numpy arrays, with the names of the fields
            predicted = net(torch.from_numpy(batch.observation["state"]))
            loss = (predicted - torch.from_numpy(batch.action)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        sampler.close()


def act(observation):
    """What `understudy evaluate own_policy:act` calls."""
    state = torch.load(WEIGHTS)
    net = network(state["0.weight"].shape[1], state["4.weight"].shape[0])
    net.load_state_dict(state)
    with torch.no_grad():
        return net(torch.from_numpy(observation["state"])).numpy()


def main(store: str = "press-demos", demos: int = 20, updates: int = 1000, episodes: int = 50) -> None:
    with open_world(ENV) as world:
        record_script(world, store, successes=demos)
        spec = world.step_spec
        net = network(spec.observation.flat["state"].shape[0], spec.action.flat[""].shape[0])
        train(store, net, updates)
        torch.save(net.state_dict(), WEIGHTS)

        def choose(observation):  # an action, and the version of the policy
            with torch.no_grad():
                return net(torch.from_numpy(observation["state"])).numpy(), updates

        print(evaluate(world, choose, EvaluationConfig(episodes=episodes), seed=0).success_rate, "succeed")


if __name__ == "__main__":
    main()
