"""What runs on fake CUDA tensors: `python -m tests.fake_cuda.cases OUT.json [NAME ...]`, in a process of its own.

Each case uses the product's own code and returns plain numbers, or the error that ended it. The planted mistakes change
one thing in the product and must end with an error.
"""

# ruff: noqa: E402  # torch is imported after the shim

from __future__ import annotations

from tests.fake_cuda import build

build.load()

import contextlib
import copy
import io
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from tests.fake_cuda.fake_ranks import fake_ranks
from tests.fake_cuda.pretend import Seen, TooLargeError, WrongDtypeError, held_bytes, pretend
from tests.sides import SidesWorld
from tests.unit.policies.openvla.make_checkpoint import KEY, SPEC, instructions, make_checkpoint
from tests.unit.training.onpolicy.making import TINY, learn, make_config, make_learner, make_rollouts, save_policy

from understudy.cli.training.onpolicy import warn_if_too_large
from understudy.policies import Sampling, lora
from understudy.policies.config import LoraConfig
from understudy.policies.openvla import OpenVLAPolicy
from understudy.policies.openvla.network import OpenVLANetwork
from understudy.policies.vla import VLAModel, VLAPolicy
from understudy.training.collection.rollout import Rollout
from understudy.training.distributed.config import EngineConfig
from understudy.training.distributed.engine import Engine, local_shard
from understudy.training.distributed.ranks import single_rank
from understudy.training.onpolicy import run_builder
from understudy.training.onpolicy.policy_gradient_learner import PolicyGradientLearner
from understudy.training.onpolicy.reference_policy import Frozen
from understudy.training.runs.config import ConfigError
from understudy.training.runs.device import choose_device

CASES: dict[str, Callable[[], Any]] = {}
LOW = EngineConfig(precision="bfloat16")


class NotTrainedError(Exception):
    """What should be trained is not."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A policy on the fake device, and episodes in which it has acted before."""

    seen: Seen
    policy: Any
    rollouts: list[Rollout]


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


# ---- the product as it is


@case
def device() -> Any:
    """What `auto` is on a machine with eight GPUs, for a process alone and for ranks of one node."""
    with pretend():
        alone = choose_device("auto")
        with mock.patch.dict(os.environ, {"LOCAL_RANK": "3"}):
            fourth = choose_device("auto", num_ranks=8)
        ninth = ""
        try:
            with mock.patch.dict(os.environ, {"LOCAL_RANK": "8"}):
                choose_device("auto", num_ranks=9)
        except ConfigError as error:
            ninth = str(error)
        return {"alone": str(alone), "fourth": fourth.name, "ninth": ninth, "ranks": str(single_rank().device)}


@case
def warning() -> Any:
    """What `train` says on GPUs of 24 GiB and of one MiB about a small VLA."""
    said: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as place:
        config = make_config(save_policy(Path(place) / "policy.safetensors"))
        for name, memory in (("large", 24 * 2**30), ("small", 2**20)):
            console = Console(file=io.StringIO(), width=500)
            with pretend():
                ranks = single_rank()
            there = SimpleNamespace(total_memory=memory)
            with (
                mock.patch.object(torch.cuda, "get_device_properties", return_value=there),
                mock.patch.object(torch.cuda, "get_device_name", return_value="a fake GPU"),
            ):
                warn_if_too_large(config, ranks, console)
            said[name] = console.file.getvalue()  # type: ignore[attr-defined]
    return said


@case
def small_vla() -> Any:
    with _small() as scene:
        return _train(scene, LOW)


@case
def openvla_lora() -> Any:
    """LoRA over a bfloat16 base, with recomputed activations; eight rows with five prompts."""
    with _openvla(lora=True, value_head=True) as scene:
        found = _train(scene, replace(LOW, gradient_checkpointing=True))
        frozen = {str(one.dtype) for one in scene.policy.model.parameters() if not one.requires_grad}
        return {**found, "frozen": sorted(frozen)}


@case
def openvla_autoregressive() -> Any:
    with _openvla(lora=True, decoding="autoregressive", block_steps=1) as scene:
        return _train(scene, LOW)


@case
def openvla_full() -> Any:
    """Full fine-tuning of a bfloat16 checkpoint."""
    with _openvla(lora=False) as scene:
        return _train(scene, LOW)


@case
def reference() -> Any:
    """What the policy that KL is measured from takes beside the one that is trained with an adapter."""
    with _openvla(lora=True) as scene:
        learner = make_learner(scene.policy, engine=LOW, ranks=single_rank())
        own = held_bytes()
        config = SimpleNamespace(lora=SimpleNamespace(rank=2))
        unused: Any = None
        learner.reference = run_builder._reference(unused, config, learner, unused, unused)  # type: ignore[arg-type]
        more = held_bytes() - own
        if more > own / 10:
            raise TooLargeError(
                f"the reference takes {more / own:.1f} times the memory of the policy and its optimizer"
            )
        return {"share": more / own}


@case
def fsdp() -> Any:
    """What the first of eight ranks holds of a network that is sharded, before it acts and behind."""
    with _small() as scene, fake_ranks(8) as ranks:
        before = held_bytes()
        engine = Engine(scene.policy.model, replace(LOW, parallel="fsdp"), ranks)
        scene.policy.forward = engine.forward
        shards = sum(local_shard(value).nbytes for value in engine.tensors().values())
        held = held_bytes()
        if held > 1.1 * shards:
            raise TooLargeError(f"the rank holds {held / shards:.1f} times its shards")
        with engine.unsharded(), torch.no_grad():
            _act(scene.policy, scene.rollouts)
            gathered = held_bytes()
        left = held_bytes()
        if left > 1.1 * held:
            raise TooLargeError(f"the rank holds {left / held:.1f} times its shards after it has acted")
        return {"whole": before, "shards": held, "gathered": gathered, "left": left}


# ---- planted mistakes


def _mistake(name: str, plant: Callable[[], Any], run: Callable[[], Any]) -> None:
    def planted() -> Any:
        with plant():
            return run()

    CASES[f"mistake: {name}"] = planted


def _words_on_the_host() -> Any:
    plain = VLAPolicy.tensors

    def tensors(self: VLAPolicy, *args: Any) -> Any:
        found = plain(self, *args)
        return {**found, "words": torch.zeros(found["words"].shape, dtype=torch.int64)}

    return mock.patch.object(VLAPolicy, "tensors", tensors)


def _another_gpu() -> Any:
    """The policy makes its inputs on another device than that of its network."""
    plain = VLAPolicy.act

    def act(self: VLAPolicy, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == "cuda":  # and not in what it did before
            self.device = torch.device("cuda:1")
        return plain(self, *args, **kwargs)

    return mock.patch.object(VLAPolicy, "act", act)


def _mixed_linear() -> Any:
    return mock.patch("understudy.policies.openvla.network._like", lambda hidden, head: hidden)


def _without_autocast() -> Any:
    """A head of float32 over hidden states of bfloat16."""
    with _openvla(lora=True, value_head=True) as scene:
        return _train(scene, EngineConfig())


def _reads_a_number() -> Any:
    plain = Engine.backward

    def backward(self: Engine, loss: Any, *, last: bool) -> None:
        loss.item()
        plain(self, loss, last=last)

    return mock.patch.object(Engine, "backward", backward)


def _copies_to_the_host() -> Any:
    plain = PolicyGradientLearner._evaluate

    def evaluate(self: PolicyGradientLearner, *args: Any) -> Any:
        evaluated = plain(self, *args)
        evaluated.log_prob.detach().cpu()
        return evaluated

    return mock.patch.object(PolicyGradientLearner, "_evaluate", evaluate)


def _dense_mask() -> Any:
    plain = OpenVLANetwork._visible
    return mock.patch.object(OpenVLANetwork, "_visible", lambda self, is_token: plain(is_token).contiguous())


def _low_adapter() -> Any:
    """Adapters of the dtype of their base, which the engine would mend: it is kept from it."""
    plain = torch.optim.AdamW.__init__

    def init(self: Any, parameters: Any, **options: Any) -> None:
        given = list(parameters)
        for parameter in given:
            parameter.data = parameter.data.bfloat16()
        plain(self, given, **options)

    return mock.patch.object(torch.optim.AdamW, "__init__", init)


def _precision_of_its_own() -> Any:
    """The network switches the engine's autocast off."""
    return mock.patch.object(VLAModel, "_precision", return_value=torch.autocast("cuda", enabled=False))


def _frozen_adapter() -> Any:
    """What is trained is chosen by its name, and the adapter has another one."""
    plain = lora._freeze

    def freeze(module: Any, keep: Any) -> None:
        plain(module, keep)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_("lora_" not in name and parameter.requires_grad)

    return mock.patch.object(lora, "_freeze", freeze)


def _whole_vocabulary() -> Any:
    """Logits become float32 before those of the bins are taken, as causal language models did for years."""
    plain = OpenVLANetwork.forward

    def forward(self: OpenVLANetwork, *args: Any) -> Any:
        head = self.language_model.lm_head.register_forward_hook(lambda module, inputs, logits: logits.float())
        try:
            return plain(self, *args)
        finally:
            head.remove()

    return mock.patch.object(OpenVLANetwork, "forward", forward)


def _second_network() -> Any:
    """The reference is a float32 copy of a network that has an adapter to switch off."""

    def copied(policy: Any) -> Any:
        other = copy.copy(policy)
        other.model = copy.deepcopy(policy.model)
        for part in other.model.modules():
            for name, value in part._parameters.items():
                if value is not None:
                    part._parameters[name] = torch.nn.Parameter(value.detach().float())
        return Frozen(other, LOW, single_rank())

    return mock.patch.object(run_builder, "AdapterOff", copied)


def _unsharded_copy() -> Any:
    """An average of the weights is kept beside them, which begins with all of them on each rank."""
    plain = Engine._start_optimizer

    def start(self: Engine) -> None:
        plain(self)
        self.average = {name: value.detach().full_tensor() for name, value in self._trainable.items()}  # type: ignore[attr-defined]

    return mock.patch.object(Engine, "_start_optimizer", start)


_mistake("words on the host", _words_on_the_host, small_vla)
_mistake("inputs on another GPU", _another_gpu, small_vla)
_mistake("a head of another dtype", _mixed_linear, _without_autocast)
_mistake("bfloat16 switched off", _precision_of_its_own, small_vla)
_mistake("trained weights of bfloat16", _low_adapter, small_vla)
_mistake("a number read in each micro batch", _reads_a_number, small_vla)
_mistake("a copy to the host in each micro batch", _copies_to_the_host, small_vla)
_mistake("a dense mask", _dense_mask, openvla_full)
_mistake("a frozen adapter", _frozen_adapter, openvla_lora)
_mistake("float32 logits of the whole vocabulary", _whole_vocabulary, openvla_full)
_mistake("a second network as the reference", _second_network, reference)
_mistake("an unsharded copy of the weights", _unsharded_copy, fsdp)


# ---- how


@contextlib.contextmanager
def _small() -> Iterator[Scene]:
    world = SidesWorld(tasks=2)
    told = [task.instruction for task in world.suite.tasks]
    policy = VLAPolicy.new(TINY, world.step_spec, told, seed=0)
    rollouts = make_rollouts(policy, world.step_spec, told[:1], blocks=1)
    with pretend() as seen:
        there = VLAPolicy(policy.config, policy.spec, policy.words, policy.stats, policy.model, device="cuda:0")
        yield Scene(seen=seen, policy=there, rollouts=rollouts)


@contextlib.contextmanager
def _openvla(*, lora: bool, **options: Any) -> Iterator[Scene]:
    given = {"unnorm_key": KEY, "cameras": ("image",), "block_steps": 2, "dtype": "bfloat16", **options}
    with tempfile.TemporaryDirectory() as place:
        policy = OpenVLAPolicy.load(make_checkpoint(Path(place) / "checkpoint"), SPEC, **given)
        rollouts = make_rollouts(policy, SPEC, instructions(1), blocks=1)
        if lora:
            _add_lora(policy.model)
        with pretend() as seen:
            seen.dense_masks = False
            seen.vocabulary = policy.model.language_model.lm_head.out_features
            policy.device = torch.device("cuda:0")
            policy.model.to(policy.device)
            yield Scene(seen=seen, policy=policy, rollouts=rollouts)


def _add_lora(model: Any) -> None:
    lora.add_lora(model, LoraConfig(rank=2))


def _train(scene: Scene, config: EngineConfig) -> dict[str, Any]:
    """Act, then learn from one batch in two micro batches; returns what was seen."""
    seen, policy = scene.seen, scene.policy
    learner = make_learner(policy, engine=config, ranks=single_rank(), ppo_epochs=1, ppo_micro_batch_size=1)
    trainable = {name.split("/", 1)[1] for name in learner.engine.tensors() if name.endswith("/exp_avg")}
    forgotten = [name for name, _ in policy.model.named_parameters() if "lora_" in name]
    forgotten = [name for name in forgotten if f"{name}/exp_avg" not in trainable]
    if forgotten:
        raise NotTrainedError(f"{len(forgotten)} weights of the adapter are not in the optimizer: {forgotten[0]}, ...")
    passes = 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal passes
        passes += 1
        return learner.engine.forward(*args, **kwargs)

    policy.forward = forward
    _act(policy, scene.rollouts)
    acting_passes, acting_syncs = passes, seen.num_syncs
    with _no_sync_in_micro_batches(seen, learner):
        learn(learner, scene.rollouts)
    trained = {value.dtype for value in policy.model.parameters() if value.requires_grad}
    trained |= {value.dtype for name, value in learner.engine.tensors().items() if "exp_avg" in name}
    if trained - {torch.float32}:
        raise WrongDtypeError(f"trained in {', '.join(map(str, trained))}; small updates round to nothing")
    wanted = {torch.bfloat16} if config.precision == "bfloat16" else {torch.bfloat16, torch.float32}
    if seen.products.keys() - wanted:
        raise WrongDtypeError(f"matrix products in {', '.join(map(str, seen.products))}; the engine's is bfloat16")
    return {
        "acting passes": acting_passes,
        "learning syncs": seen.num_syncs - acting_syncs,
        "updates": learner.engine.num_updates,
        "kernels": dict(seen.kernels),
        "products": {str(dtype): count for dtype, count in seen.products.items()},
        "trained": sorted(map(str, trained)),
        "fused steps": seen.num_fused_steps,
    }


def _act(policy: Any, rollouts: list[Rollout]) -> None:
    """On eight rows, with five prompts if the policy takes them in one pass."""
    leaves = policy.spec.observation.flat.items()
    told = [f"{rollouts[0].episode.info.instruction}{' now' * (row % 5)}" for row in range(8)]  # type: ignore[union-attr]
    several = isinstance(policy, OpenVLAPolicy) and policy.config.decoding == "parallel"
    policy.act(
        {path: np.zeros((8, *leaf.fixed_shape), leaf.dtype) for path, leaf in leaves},
        told if several else told[:1] * 8,
        rngs=[np.random.default_rng(row) for row in range(8)],
        sampling=Sampling(),
    )


@contextlib.contextmanager
def _no_sync_in_micro_batches(seen: Seen, learner: PolicyGradientLearner) -> Iterator[None]:
    """From the evaluation of a micro batch to the end of its backward pass, the host must be ahead of the device."""
    evaluate, backward = learner._evaluate, learner.engine.backward

    def evaluated(*args: Any) -> Any:
        with seen.no_sync():
            return evaluate(*args)

    def backwarded(loss: Any, *, last: bool) -> None:
        with seen.no_sync():
            backward(loss, last=last)

    learner._evaluate = evaluated  # type: ignore[method-assign]
    learner.engine.backward = backwarded  # type: ignore[method-assign]
    yield


def main(out: str, *names: str) -> None:
    found: dict[str, Any] = {}
    for name in names or CASES:
        try:
            found[name] = CASES[name]()
        except Exception as error:  # noqa: BLE001  # reported
            where = [frame for frame in traceback.extract_tb(error.__traceback__) if "/understudy/" in frame.filename]
            at = f"{Path(where[-1].filename).name}:{where[-1].lineno}" if where else ""
            found[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}", "at": at}
            if "mistake" not in name:
                traceback.print_exc()
    Path(out).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
