"""A training script in the calls of HIL-SERL: an actor and a learner, a person who takes over, two buffers.

    hil_serl_train.py --learner --port 5588 --demo_path demos.pkl --checkpoint_path DIR
    hil_serl_train.py --actor --port 5588

It knows nothing of Understudy. The environment is a point that has to reach a goal; the policy is a matrix, learned by
regression on demonstrations and takeovers.
"""

import argparse
import json
import pickle as pkl
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
from agentlace.data.data_store import QueuedDataStore
from agentlace.trainer import TrainerClient, TrainerServer
from serl_launcher.data.data_store import MemoryEfficientReplayBufferDataStore
from serl_launcher.utils.launcher import make_trainer_config
from serl_launcher.utils.train_utils import concat_batches

BATCH_SIZE = 64
TRAINING_STARTS = 40
STEPS_PER_UPDATE = 5
EPISODES_ALONE = 10
MAX_STEPS = 20


class PointEnv(gym.Env):
    """The state is the position, the goal and the time; a person takes over when the point did not come nearer, or when
    there is just time enough to bring it to the goal."""

    observation_space = gym.spaces.Dict({"state": gym.spaces.Box(-1, 1, (1, 5), np.float32)})
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def reset(self, **kwargs):
        self.position, self.goal = self.rng.uniform(-1, 1, (2, 2)).astype(np.float32)
        self.count, self.lost = 0, 0
        return self.observe(), {}

    def observe(self):
        return {"state": np.array([[*self.position, *self.goal, self.count / MAX_STEPS]], np.float32)}

    def step(self, action):
        info = {}
        if self.lost >= 3 or self.count >= MAX_STEPS - 8:  # the person moves towards the goal
            action = expert(self.observe())
            info["intervene_action"] = action
        before = np.linalg.norm(self.goal - self.position)
        self.position = np.clip(self.position + 0.3 * np.clip(action, -1, 1), -1, 1).astype(np.float32)
        after = np.linalg.norm(self.goal - self.position)
        self.lost = self.lost + 1 if after > 0.95 * before else self.lost
        self.count += 1
        done = bool(after < 0.15)
        info["succeed"] = done
        return self.observe(), float(done), done, self.count >= MAX_STEPS, info


def expert(obs):
    position, goal = np.split(obs["state"][0, :4], 2)
    return np.clip((goal - position) / 0.3, -1, 1).astype(np.float32)


def act(params, obs):
    return np.clip(obs["state"][0] @ params["kernel"], -1, 1).astype(np.float32)


def actor(port):
    data_store, intvn_data_store = QueuedDataStore(50_000), QueuedDataStore(50_000)
    client = TrainerClient(
        "actor_env",
        "localhost",
        make_trainer_config(port, port + 1),
        data_stores={"actor_env": data_store, "actor_env_intvn": intvn_data_store},
        wait_for_server=True,
        timeout_ms=30_000,
    )
    agent = {"params": {"kernel": np.zeros((5, 2), np.float32)}}
    client.recv_network_callback(lambda params: agent.update(params=params))
    env = PointEnv(seed=1)
    results = []
    # until ten episodes in a row need no takeover: how many that takes depends on the learner's share of the machine
    while len(results) < EPISODES_ALONE or any(taken_over for _, taken_over in results[-EPISODES_ALONE:]):
        obs, _ = env.reset()
        done = truncated = False
        intervention_steps = 0
        while not (done or truncated):
            actions = act(agent["params"], obs)
            next_obs, reward, done, truncated, info = env.step(actions)
            info.pop("left", None)
            transition = {
                "observations": obs,
                "actions": info.get("intervene_action", actions),
                "next_observations": next_obs,
                "rewards": reward,
                "masks": 1.0 - done,
                "dones": done,
            }
            data_store.insert(transition)
            if "intervene_action" in info:
                intvn_data_store.insert(transition)
                intervention_steps += 1
            obs = next_obs
            time.sleep(0.002)
        client.update()
        client.request("send-stats", {"environment": {"episode": len(results), "succeed": info["succeed"]}})
        results.append([bool(info["succeed"]), intervention_steps])
    while not client.update():
        time.sleep(0.1)
    client.request("send-stats", {"environment": {"ended": True}})
    client.stop()
    print(json.dumps(results))


def learner(port, demo_path, checkpoint_path):
    env = PointEnv(seed=0)
    replay_buffer, demo_buffer = (
        MemoryEfficientReplayBufferDataStore(env.observation_space, env.action_space, capacity=5000, image_keys=[])
        for _ in range(2)
    )
    with Path(demo_path).open("rb") as f:
        for transition in pkl.load(f):
            demo_buffer.insert(transition)
    print(json.dumps({"replay": len(replay_buffer), "demo": len(demo_buffer)}), flush=True)
    stats = []

    def stats_callback(type, payload):
        assert type == "send-stats", f"Invalid request type: {type}"
        stats.append(payload["environment"])
        return {}

    server = TrainerServer(make_trainer_config(port, port + 1), request_callback=stats_callback)
    server.register_data_store("actor_env", replay_buffer)
    server.register_data_store("actor_env_intvn", demo_buffer)
    server.start(threaded=True)
    params = {"kernel": np.zeros((5, 2), np.float32)}
    server.publish_network(params)
    while len(replay_buffer) < TRAINING_STARTS:
        time.sleep(0.05)
    sample_args = {"batch_size": BATCH_SIZE // 2, "pack_obs_and_next_obs": True}
    replay_iterator = replay_buffer.get_iterator(sample_args=sample_args)
    demo_iterator = demo_buffer.get_iterator(sample_args=sample_args)
    step = 0
    while {"ended": True} not in stats:
        batch = concat_batches(next(replay_iterator), next(demo_iterator), axis=0)
        good = slice(BATCH_SIZE // 2, None)  # imitate the half that is demonstrations and takeovers
        states, actions = batch["observations"]["state"][good, 0], batch["actions"][good]
        gradient = states.T @ (np.tanh(states @ params["kernel"]) - actions) / len(states)
        params = {"kernel": params["kernel"] - np.float32(0.5) * gradient}
        step += 1
        if step % STEPS_PER_UPDATE == 0:
            server.publish_network(params)
        if step % 20 == 0:
            np.save(Path(checkpoint_path) / "params.npy", params["kernel"])
        time.sleep(0.005)
    server.stop()
    print(json.dumps({"replay": len(replay_buffer), "demo": len(demo_buffer), "step": step}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--actor", action="store_true")
    parser.add_argument("--learner", action="store_true")
    parser.add_argument("--port", type=int, default=5588)
    parser.add_argument("--demo_path")
    parser.add_argument("--checkpoint_path")
    args = parser.parse_args()
    if args.learner:
        learner(args.port, args.demo_path, args.checkpoint_path)
    elif args.actor:
        actor(args.port)
