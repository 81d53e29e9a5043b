"""Learners and actors of the trainer as processes of their own, over a toy world in which every frame says its name.

trainer_process.py learner DIRECTORY PORT             obeys a line at a time, and answers each with a line of JSON
trainer_process.py actor PORT WORLD FIRST NUM [SPOOL] inserts NUM transitions from FIRST on, and tells what came of it
trainer_process.py hil-serl-learner DIRECTORY PORT    } the two halves of HIL-SERL's train_rlpd.py, with a toy
trainer_process.py hil-serl-actor PORT                } environment and a toy agent
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

from understudy.compat import (
    MemoryEfficientReplayBufferDataStore,
    QueuedDataStore,
    TrainerClient,
    TrainerServer,
    make_trainer_config,
)
from understudy.core import ArraySpec

OBSERVATIONS = {
    "image": ArraySpec(shape=(1, 8, 8, 3), dtype="uint8"),
    "state": ArraySpec(shape=(1, 2), dtype="float32"),
}
ACTIONS = ArraySpec(shape=(2,), dtype="float32")
EPISODE_STEPS = 20


def observation(world, time):
    image = np.empty((1, 8, 8, 3), np.uint8)
    image[...] = time % 256, time // 256, world
    return {"image": image, "state": np.array([[world, time]], np.float32)}


def transition(world, time, done=None):
    done = time % EPISODE_STEPS == EPISODE_STEPS - 1 if done is None else done
    return {
        "observations": observation(world, time),
        "actions": np.array([world, time], np.float32),
        "next_observations": observation(world, time + 1),
        "rewards": float(done),
        "masks": 1.0 - done,
        "dones": done,
    }


def make_buffer(path, capacity=20_000, **options):
    return MemoryEfficientReplayBufferDataStore(OBSERVATIONS, ACTIONS, capacity, ("image",), path=path, **options)


def seen(batch):
    """World and time of each transition of a batch, all of whose fields must agree that it is a true pair."""
    found = []
    for name in ("observations", "next_observations"):
        image, state = batch[name]["image"].astype(int), batch[name]["state"][:, 0]
        assert (image == image[:, :, :1, :1]).all()
        times = image[:, 0, 0, 0, 0] + 256 * image[:, 0, 0, 0, 1]
        assert np.array_equal(np.stack([image[:, 0, 0, 0, 2], times], 1), state)
        found.append(state.astype(int))
    assert np.array_equal(found[1], found[0] + [0, 1]), "a pair that nobody inserted"
    assert np.array_equal(found[0], batch["actions"])
    return {tuple(pair) for pair in found[0].tolist()}


def sweep(buffer, num_batches=40):
    """What is in a small buffer: enough batches to have met every transition."""
    return set().union(*(seen(buffer.sample(256)) for _ in range(num_batches)))


def weights(number):
    return {"modules_actor": {"kernel": np.full((32, 4), number, np.float32)}, "bias": np.float32(number)}


# ---- a learner that obeys


def learner(directory, port):
    directory = Path(directory)
    replay, demo = make_buffer(directory / "replay"), make_buffer(directory / "demo")
    server = TrainerServer(
        make_trainer_config(int(port), int(port) + 1), request_callback=lambda kind, payload: payload
    )
    server.register_data_store("actor_env", replay)
    server.register_data_store("actor_env_intvn", demo)
    server.start(threaded=True)
    tell("ready")
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "publish":
            tell(server.publish_network(weights(int(arguments[0]))))
        elif command == "count":
            tell([len(replay), len(demo), replay.latest_data_id(), demo.latest_data_id()])
        elif command == "sweep":
            tell(sorted(sweep(replay)))
    replay.close()
    demo.close()


def actor(port, world, first, num, timeout_ms, spool=None):
    """Waits to be told to begin, and at the end to be killed."""
    queue = QueuedDataStore(50_000)
    client = TrainerClient(
        "actor_env",
        "127.0.0.1",
        make_trainer_config(int(port), int(port) + 1),
        data_stores={"actor_env": queue},
        wait_for_server=True,
        timeout_ms=int(timeout_ms),
        spool=spool,
    )
    tell("ready")
    sys.stdin.readline()
    for number in range(int(first), int(first) + int(num)):
        queue.insert(transition(int(world), number))
        if (number + 1) % 100 == 0:
            client.update()
    tell({"updated": client.update(), "waiting": client.num_waiting})
    sys.stdin.readline()


# ---- the loop of HIL-SERL, in its shape and with its names

TRAINING_STARTS, STEPS_PER_UPDATE, BATCH_SIZE, MAX_STEPS = 40, 5, 64, 300


class ToyEnv:
    """Episodes of 25 steps or of 40 with a time limit; a person takes over for some steps in the middle."""

    world = 7

    def __init__(self):
        self.time = 0

    def reset(self):
        self.time += 10  # what is seen now does not follow what was seen last
        self.left = 25
        return observation(self.world, self.time), {}

    def step(self, action):
        info = {"succeed": np.bool_(False), "left": False}
        if 8 <= self.left < 15:
            info["intervene_action"] = np.array([self.world, self.time], np.float32)
        self.time += 1
        self.left -= 1
        done, truncated = self.left == 0 and self.time % 2 == 0, self.left == 0
        if done or truncated:
            info["episode"] = {"r": np.array([1.5]), "l": np.int64(25)}
            info["succeed"] = np.bool_(done)
        return observation(self.world, self.time), float(done), done, truncated, info


def hil_serl_actor(port):
    data_store, intvn_data_store = QueuedDataStore(50_000), QueuedDataStore(50_000)
    client = TrainerClient(
        "actor_env",
        "127.0.0.1",
        make_trainer_config(int(port), int(port) + 1),
        data_stores={"actor_env": data_store, "actor_env_intvn": intvn_data_store},
        wait_for_server=True,
        timeout_ms=30_000,
    )
    agent = {"params": None, "updates": 0}

    def update_params(params):
        assert params["bias"] == params["modules_actor"]["kernel"][0, 0]
        agent.update(params=params, updates=agent["updates"] + 1)

    client.recv_network_callback(update_params)
    env = ToyEnv()
    obs, _ = env.reset()
    num_intervened, updated, answers = 0, [], []
    for step in range(MAX_STEPS):
        actions = np.array([env.world, env.time], np.float32)
        next_obs, reward, done, truncated, info = env.step(actions)
        intervened = "intervene_action" in info
        if intervened:
            actions = info.pop("intervene_action")
        data = {
            "observations": obs,
            "actions": actions,
            "next_observations": next_obs,
            "rewards": reward,
            "masks": 1.0 - done,
            "dones": done,
        }
        data_store.insert(data)
        if intervened:
            intvn_data_store.insert(data)
            num_intervened += 1
        obs = next_obs
        time.sleep(0.002)
        if done or truncated:
            answers.append(client.request("send-stats", {"environment": info}))
            updated.append(client.update())
            obs, _ = env.reset()
        if step % 100 == 0:
            client.request("send-stats", {"timer": {"total": np.float32(0.1)}})
    updated.append(client.update())
    newest = client.request("get-version", {})["version"]
    while client.policy_version < newest:  # the learner may go on to publish
        time.sleep(0.01)
    client.stop()  # so that version and params belong together
    tell(
        {
            "intervened": num_intervened,
            "updated": updated,
            "answers": answers,
            "dropped": data_store.num_dropped,
            "version": client.policy_version,
            "params": float(agent["params"]["bias"]),
            "updates": agent["updates"],
        }
    )
    client.stop()


def hil_serl_learner(directory, port):
    directory = Path(directory)
    replay_buffer, demo_buffer = make_buffer(directory / "replay"), make_buffer(directory / "demo")
    for number in range(30):  # the demonstrations that a run starts with
        demo_buffer.insert(transition(1, number))
    version, stats = 0, []

    def stats_callback(type, payload):
        if type == "get-version":
            return {"version": version}
        assert type == "send-stats", f"Invalid request type: {type}"
        stats.append(payload)
        return {}

    config = make_trainer_config(int(port), int(port) + 1)
    config = type(config)(config.port_number, config.broadcast_port, ["send-stats", "get-version"])
    server = TrainerServer(config, request_callback=stats_callback)
    server.register_data_store("actor_env", replay_buffer)
    server.register_data_store("actor_env_intvn", demo_buffer)
    server.start(threaded=True)
    tell("ready")
    while len(replay_buffer) < TRAINING_STARTS:
        time.sleep(0.02)
    version = server.publish_network(weights(0))
    sample_args = {"batch_size": BATCH_SIZE // 2, "pack_obs_and_next_obs": False}
    replay_iterator = replay_buffer.get_iterator(sample_args=sample_args)
    demo_iterator = demo_buffer.get_iterator(sample_args=sample_args)
    met, step = set(), 0
    while len(replay_buffer) < MAX_STEPS or step < 60:
        batch, demo_batch = next(replay_iterator), next(demo_iterator)
        met |= seen(batch) | seen(demo_batch)
        step += 1
        if step % STEPS_PER_UPDATE == 0:
            version = server.publish_network(weights(step))
        time.sleep(0.005)
    sys.stdin.readline()
    tell(
        {
            "replay": len(replay_buffer),
            "demo": len(demo_buffer),
            "version": version,
            "step": step,
            "stats": stats,
            "replay_pairs": sorted(sweep(replay_buffer)),
            "demo_pairs": sorted(sweep(demo_buffer)),
            "met": len(met),
        }
    )
    replay_iterator.close()
    demo_iterator.close()
    server.stop()
    replay_buffer.close()
    demo_buffer.close()


def tell(what):
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    roles = {
        "learner": learner,
        "actor": actor,
        "hil-serl-actor": hil_serl_actor,
        "hil-serl-learner": hil_serl_learner,
    }
    roles[sys.argv[1]](*sys.argv[2:])
