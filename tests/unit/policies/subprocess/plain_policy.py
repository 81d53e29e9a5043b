"""A block policy for an interpreter that has nothing but numpy: bins from a linear layer; it fails when told to."""

from __future__ import annotations

import os
import signal
import sys
import time
import zlib
from typing import Any

import numpy as np

STEPS, SIZE, BINS, FEATURES = 2, 3, 16, 12


class PlainTokens:
    """Rows one by one, so that they do not know of each other."""

    block_steps, log_prob_size = STEPS, SIZE
    replay_spec = {"tokens": ((STEPS, SIZE), "int32")}  # noqa: RUF012
    has_value = True

    def __init__(self, seed: int = 0, has_value: bool = True, sleep_s: float = 0.0, shout: bool = False):
        if "torch" in sys.modules:
            raise RuntimeError("torch was loaded")
        time.sleep(sleep_s)
        if shout:
            print("a last word of the policy", file=sys.stderr)
            os._exit(7)
        self.has_value = has_value
        rng = np.random.default_rng(seed)
        self.weights = {
            "logits": rng.normal(size=(FEATURES, STEPS * SIZE * BINS)).astype(np.float32),
            "value": rng.normal(size=FEATURES).astype(np.float32),
        }

    def act(self, observation: Any, instructions: Any, *, rngs: Any, temperature: float, greedy: bool) -> Any:
        for word in instructions:
            misbehave(word)
        if "type" in instructions:
            return {"action": {"": np.array(["x"])}, "replay": {}, "log_prob": np.zeros(3)}
        tokens, log_prob, value = [], [], []
        for row, rng in enumerate(rngs):
            log_probs, judged = self._judge(observation, instructions[row], row, temperature)
            if greedy:
                drawn = log_probs.argmax(-1)
            else:
                drawn = (np.exp(log_probs).cumsum(-1) <= rng.random((STEPS, SIZE, 1)) * 0.999999).sum(-1)
            tokens.append(drawn)
            log_prob.append(np.take_along_axis(log_probs, drawn[..., None], -1)[..., 0])
            value.append(judged)
        bins = np.array(tokens, np.int32)
        action = (bins / (BINS - 1) * 2 - 1).astype(np.float32)
        found = {"action": action, "replay": {"tokens": bins}, "log_prob": np.array(log_prob, np.float32)}
        if self.has_value:
            found["value"] = np.array(value, np.float32)
        if "nan" in instructions:
            found["log_prob"][0, 0, 0] = np.nan
        if "shape" in instructions:
            found["log_prob"] = found["log_prob"][:, :1]
        if "bounds" in instructions:
            found["action"] = found["action"] + 5
        if "missing" in instructions:
            found["replay"] = {}
        if "more" in instructions:
            found["replay"]["chain"] = bins
        return found

    def evaluate(self, observation: Any, instructions: Any, replay: Any, *, temperature: float) -> Any:
        for word in instructions:
            misbehave(word)
        rows = [self._judge(observation, text, row, temperature) for row, text in enumerate(instructions)]
        log_probs = np.array([row[0] for row in rows], np.float32)
        found = {
            "log_prob": np.take_along_axis(log_probs, replay["tokens"][..., None].astype(int), -1)[..., 0],
            "entropy": -(np.exp(log_probs) * log_probs).sum(-1),
        }
        if self.has_value:
            found["value"] = np.array([row[1] for row in rows], np.float32)
        return found

    def load(self, path: str) -> None:
        with np.load(path) as file:
            self.set_parameters(dict(file))

    def set_parameters(self, parameters: Any) -> None:
        for name, weight in self.weights.items():
            if parameters[name].shape != weight.shape:
                self.weights = {}  # half-way
                raise ValueError(f"{name}: expected {weight.shape}, got {parameters[name].shape}")
        self.weights = parameters

    def _judge(self, observation: Any, text: str, row: int, temperature: float) -> Any:
        said = np.frombuffer(zlib.crc32(text.encode()).to_bytes(4, "little"), np.uint8) / np.float32(255)
        seen = np.concatenate(
            [observation["camera/front"][row].ravel()[:5] / np.float32(255), observation["hand"][row]]
        )
        features = np.concatenate([said, seen]).astype(np.float32)
        logits = (features @ self.weights["logits"]).reshape(STEPS, SIZE, BINS) / np.float32(temperature)
        logits = logits - logits.max(-1, keepdims=True)
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return log_probs.astype(np.float32), features @ self.weights["value"]


class PlainNoise:
    """Blocks that are the noise they are made of."""

    block_steps, log_prob_size = STEPS, 1
    replay_spec: dict[str, Any] = {}  # noqa: RUF012
    has_value = False
    noise_shape = (STEPS, SIZE)

    def act(
        self, observation: Any, instructions: Any, *, rngs: Any, temperature: float, greedy: bool, noise: Any = None
    ) -> Any:
        drawn = np.array([rng.random(self.noise_shape) for rng in rngs]) if noise is None else noise
        log_prob = np.zeros((len(drawn), STEPS, 1), np.float32)
        return {"action": drawn.astype(np.float32), "replay": {}, "log_prob": log_prob}


def misbehave(word: str) -> None:
    if word == "raise":
        raise ValueError("no such joint")
    if word == "interpreter":
        ours = sorted(name for name in sys.modules if name.startswith("understudy"))
        raise RuntimeError(f"{sys.executable} {ours} {sys.path}")
    if word == "torch":
        import torch  # noqa: F401
    if word == "exit":
        print("out of cheese", file=sys.stderr)
        os._exit(3)
    if word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "hang":
        if "HANG_MARKER" in os.environ:
            with open(os.environ["HANG_MARKER"], "w"):  # noqa: PTH123
                pass
        where_it_hangs()
    if word == "noise":
        print("noise " * 300_000)
    if word in ("garbage", "hang up"):
        for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
            try:
                if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):  # noqa: PTH115
                    os.write(int(name), b"\xff" * 100) if word == "garbage" else os.close(int(name))
            except OSError:
                pass
    if word == "hang up":
        where_it_hangs()


def where_it_hangs() -> None:
    while True:
        time.sleep(60)


def not_a_policy() -> Any:
    return object()
