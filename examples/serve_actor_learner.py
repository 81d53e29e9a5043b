"""A server with a token, an actor and a learner: three processes on one machine here, on three machines as well.

python examples/serve_actor_learner.py

For whole runs there are the commands `understudy serve STORE --token-file token`, `understudy actor` and
`understudy learner`.
"""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import understudy as us
from understudy.core.examples import random_steps, small_spec
from understudy.service import Server, ServerConfig
from understudy.web.tokens import new_token


def act(address: str, episodes: int, spool: str) -> None:
    """The actor: takes the newest weights before each episode, and sends its steps. It never waits for the server."""
    spec = small_spec()
    with (
        us.connect(address, token_file="token") as remote,
        remote.parameters() as weights,
        remote.writer("arm-1", spec, spool=spool) as writer,
    ):
        for number in range(episodes):
            newest = weights.wait(timeout_s=60)  # the newest weights; None if the learner has published none by then
            steps, last_observation = random_steps(spec, 20, seed=number)  # your control loop
            writer.begin(task="pick", seed=number)
            for step in steps:
                writer.append(step)
            writer.end(last_observation, success=True)
            print("actor: episode", number, "with version", None if newest is None else newest.version, flush=True)
        writer.wait_delivered(timeout_s=60)


def learn(address: str, updates: int) -> int:
    """The learner: draws batches on the server and publishes its weights."""
    weights = {"w": np.zeros((4, 4), np.float32)}
    version = 0
    with us.connect(address, token_file="token") as remote:
        version = remote.publish(weights)  # so that the actor can begin
        sampler = remote.sampler(us.ONLINE, batch_size=32, seed=0)
        while not sampler.follow():  # the number of steps that can be drawn
            time.sleep(0.05)
        for _ in range(updates):
            batch = sampler.sample()
            weights["w"] += 0.01 * float(batch.reward.mean())  # your update
            version = remote.publish(weights)
        sampler.close()
    print("learner: published version", version)
    return version


def main(store: str = "served", episodes: int = 5, updates: int = 10) -> int:
    token = new_token()
    Path("token").touch(mode=0o600)
    Path("token").write_text(token)  # copy this file to the other machines
    with us.Store.open(store) as opened, Server(opened, ServerConfig(port=0, token=token)) as server:
        actor = subprocess.Popen([sys.executable, __file__, server.address, str(episodes)])
        version = learn(server.address, updates)
        assert actor.wait(timeout=120) == 0
    with us.Reader(store) as reader:
        print("the store has", len(list(reader.episodes())), "episodes")
    return version


if __name__ == "__main__":
    if len(sys.argv) > 1:
        act(sys.argv[1], int(sys.argv[2]), spool="spool/arm-1")
    else:
        main()
