"""VLAPolicy: its options, what it looks at, its file and what it refuses. Tiny networks, 32 x 32 pictures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from safetensors import safe_open
from torch import Tensor, nn

from understudy.core import ArraySpec, Spec, SpecError, StepSpec, Tree
from understudy.core import tree as trees
from understudy.policies import Acted, ActorPolicy, PolicyError, Sampling, Stats
from understudy.policies.vla import VLAConfig, VLAModel, VLAPolicy
from understudy.training.distributed.ranks import Ranks
from understudy.training.distributed.single_process import SingleProcess

PICTURE = ArraySpec(shape=(32, 32, 3), dtype="uint8")
SPEC = StepSpec(
    observation=Spec({"front": PICTURE, "wrist": PICTURE, "state": ArraySpec(shape=(3,), dtype="float32")}),
    action=Spec(ArraySpec(shape=(2,), dtype="float32", low=(-1.0, 0.0), high=(1.0, 4.0))),
)
INSTRUCTIONS = ("open the red door", "close the red door", "press it")
TINY = VLAConfig(
    cameras=("front",),
    use_proprio=("state",),
    block_steps=3,
    num_bins=16,
    vision_hidden=16,
    vision_layers=1,
    vision_heads=2,
    hidden=16,
    layers=1,
    heads=2,
    max_words=6,
    act_rows=4,
)
SAMPLED, GREEDY = Sampling(), Sampling(greedy=True)


def policy_of(config: VLAConfig = TINY, spec: StepSpec = SPEC, *, seed: int = 0, shaken: float = 0.2) -> VLAPolicy:
    """Shaken, since new networks say nearly the same of everything."""
    policy = VLAPolicy.new(config, spec, INSTRUCTIONS, seed=seed)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight += shaken * torch.randn(weight.shape, generator=generator)
    return policy


def observations(num: int, seed: int = 0, spec: StepSpec = SPEC) -> Tree:
    rng = np.random.default_rng(seed)

    def make(leaf: ArraySpec) -> Any:
        shape = (num, *leaf.fixed_shape)
        if leaf.dtype == "uint8":
            return rng.integers(0, 256, shape, np.uint8)
        return rng.normal(size=shape).astype(np.float32)

    return trees.map_leaves(make, spec.observation.tree)


def told(num: int) -> list[str]:
    return [INSTRUCTIONS[number % len(INSTRUCTIONS)] for number in range(num)]


def act(policy: VLAPolicy, observation: Tree, instructions: list[str], sampling: Sampling = SAMPLED) -> Acted:
    rngs = [np.random.default_rng([5, number]) for number in range(len(instructions))]
    return policy.act(observation, instructions, rngs=rngs, sampling=sampling)


def logits(policy: VLAPolicy, observation: Tree, instructions: list[str]) -> Tensor:
    with torch.no_grad():
        found: Tensor = policy.model(policy.tensors(observation, instructions))[0]
    return found


# ---- options


@pytest.mark.parametrize(
    "change",
    [
        {"cameras": ("wrist",)},
        {"cameras": ("front", "wrist")},
        {"use_proprio": None},
        {"block_steps": 2},
        {"num_bins": 8},
        {"patch": 4},
        {"shuffle": 4},
        {"vision_hidden": 8},
        {"vision_layers": 2},
        {"vision_heads": 4},
        {"hidden": 8},
        {"layers": 2},
        {"heads": 4},
        {"mlp_ratio": 3},
        {"max_words": 7},
        {"value_head": True},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_every_option_changes_what_is_said_and_survives_a_file(change: dict[str, Any], tmp_path: Path) -> None:
    plain, changed = policy_of(), policy_of(replace(TINY, **change))
    first, second = (act(policy, observations(4), told(4)) for policy in (plain, changed))
    same = np.array_equal(first.log_prob, second.log_prob) and (first.value is None) == (second.value is None)
    assert not same
    changed.save(tmp_path / "it.safetensors")
    again = VLAPolicy.load(tmp_path / "it.safetensors")
    assert again.config == changed.config
    assert trees.equal(act(again, observations(4), told(4)).replay, second.replay)


def test_it_computes_in_the_precision_of_the_engine_that_trains_it() -> None:
    policy = policy_of()
    weights = policy.model.state_dict()
    exact = policy.forward(policy.tensors(observations(4), told(4)))[0]
    low = SingleProcess(policy.model, Ranks(0, 1), "bfloat16").forward(policy.tensors(observations(4), told(4)))[0]
    assert low.dtype == torch.float32
    assert not torch.equal(low, exact)
    torch.testing.assert_close(low, exact, rtol=0.05, atol=0.05)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_the_shape_of_what_it_gives() -> None:
    policy = policy_of(replace(TINY, value_head=True))
    acted = act(policy, observations(5), told(5))
    assert acted.action.shape == (5, 3, 2)
    assert acted.action.dtype == np.float32
    assert acted.replay["tokens"].dtype == np.int32
    assert acted.log_prob.shape == (5, 3, 2)
    assert acted.value is not None
    assert acted.value.shape == (5,)
    assert (policy.block_steps, policy.log_prob_size, policy.has_value) == (3, 2, True)
    spec = policy.replay_spec.flat["tokens"]
    assert all(spec.fits(row) for row in acted.replay["tokens"])
    assert policy_of().has_value is False
    assert act(policy_of(), observations(1), told(1)).value is None
    assert policy.config.num_images_in_input == 1


def test_without_names_it_takes_every_camera() -> None:
    policy = VLAPolicy.new(replace(TINY, cameras=None), SPEC, INSTRUCTIONS, seed=0)
    assert policy.config.cameras == ("front", "wrist")
    assert policy.config.num_images_in_input == 2


def test_a_forward_pass_has_always_as_many_rows() -> None:
    for rows, num, wanted in ((4, 1, [4]), (4, 4, [4]), (4, 9, [4, 4, 4]), (6, 9, [6, 6])):
        policy = policy_of(replace(TINY, act_rows=rows))
        seen: list[int] = []
        policy.model.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(len(inputs[0]["words"])))
        assert len(act(policy, observations(num), told(num)).action) == num
        assert seen == wanted


def test_tokens_are_bins_of_the_actions_bounds() -> None:
    acted = act(policy_of(), observations(40), told(40))
    tokens = acted.replay["tokens"]
    assert (tokens.min(), tokens.max()) == (0, 15)
    unit = tokens / 15
    np.testing.assert_allclose(acted.action, np.stack([2 * unit[..., 0] - 1, 4 * unit[..., 1]], -1), atol=1e-6)


def test_about_half_a_million_parameters_by_default() -> None:
    picture = ArraySpec(shape=(64, 64, 3), dtype="uint8")
    spec = StepSpec(observation=Spec({"front": picture}), action=SPEC.action)
    policy = VLAPolicy.new(VLAConfig(), spec, INSTRUCTIONS, seed=0)
    assert 500_000 < sum(weight.numel() for weight in policy.model.parameters()) < 700_000


# ---- what it looks at


def test_it_sees_its_cameras_and_state_and_nothing_else() -> None:
    seen = observations(2)
    for config, fields in (
        (TINY, {"front", "state"}),
        (replace(TINY, cameras=("wrist",), use_proprio=None), {"wrist"}),
    ):
        policy = policy_of(config)
        before = logits(policy, seen, told(2))
        for name in ("front", "wrist", "state"):
            other = {**seen, name: observations(2, seed=1)[name]}
            assert torch.equal(before, logits(policy, other, told(2))) is (name not in fields), name


def test_cameras_are_told_apart() -> None:
    policy = policy_of(replace(TINY, cameras=("front", "wrist")))
    seen = observations(2)
    swapped = {**seen, "front": seen["wrist"], "wrist": seen["front"]}
    assert not torch.allclose(logits(policy, seen, told(2)), logits(policy, swapped, told(2)))


def test_it_is_told_in_words() -> None:
    policy = policy_of()
    seen = {name: np.repeat(array[:1], 5, 0) for name, array in observations(1).items()}
    texts = ["open the red door", "close the red door", "open the blue door", "Open the GREEN door.", "open the door"]
    said = logits(policy, seen, texts)
    assert torch.equal(said[2], said[3])  # blue and green are both unknown
    assert len({tuple(row.flatten().tolist()) for row in said}) == 4


def test_padding_behind_an_instruction_is_not_looked_at() -> None:
    policy = policy_of(replace(TINY, value_head=True))
    tensors = policy.tensors(observations(3), told(3))
    with torch.no_grad():
        before = policy.model(tensors)
        policy.model.text.embed_tokens.weight[0] += 1.0
        after = policy.model(tensors)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


def test_actions_of_a_block_see_each_other_both_ways_and_the_value_sees_none_of_them() -> None:
    policy = policy_of(replace(TINY, value_head=True))
    tensors = policy.tensors(observations(2), told(2))
    with torch.no_grad():
        said, value = policy.model(tensors)
        for place in (0, 5):
            policy.model.queries[place] += torch.randn(16, generator=torch.Generator().manual_seed(place))
            other, same = policy.model(tensors)
            changed = (other != said).flatten(1, 2).any(dim=-1)  # [B, H x A]
            assert changed.all()
            assert torch.equal(same, value)
            said = other


def test_numbers_are_seen_through_the_statistics() -> None:
    seen = observations(2)
    stats = Stats(mean={"state": np.float32([1, 2, 3])}, std={"state": np.float32([2, 2, 4])})
    one = VLAPolicy.new(TINY, SPEC, INSTRUCTIONS, stats, seed=0)
    two = VLAPolicy.new(TINY, SPEC, INSTRUCTIONS, seed=0)
    scaled = {**seen, "state": (seen["state"] - stats.mean["state"]) / stats.std["state"]}
    assert torch.equal(logits(one, seen, told(2)), logits(two, scaled, told(2)))
    assert not torch.equal(logits(one, seen, told(2)), logits(two, seen, told(2)))


# ---- drawing


def test_temperature_and_greed() -> None:
    policy, seen = policy_of(), observations(6)
    best = logits(policy, seen, told(6)).argmax(dim=-1).numpy()
    assert np.array_equal(act(policy, seen, told(6), GREEDY).replay["tokens"], best)
    assert np.array_equal(act(policy, seen, told(6), Sampling(temperature=1e-3)).replay["tokens"], best)
    assert not np.array_equal(act(policy, seen, told(6)).replay["tokens"], best)


def test_a_row_takes_as_many_random_numbers_as_it_has_tokens_and_greed_takes_none() -> None:
    policy, seen = policy_of(), observations(2)
    for sampling, used in ((SAMPLED, 6), (GREEDY, 0)):
        rngs = [np.random.default_rng(number) for number in range(2)]
        policy.act(seen, told(2), rngs=rngs, sampling=sampling)
        for number, rng in enumerate(rngs):
            like = np.random.default_rng(number)
            like.random(used)
            assert rng.random() == like.random()


# ---- the file and other weights


def test_the_file_is_plain_safetensors_and_equal_policies_are_equal_files(tmp_path: Path) -> None:
    policy = policy_of()
    policy.version = 7
    policy.save(tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", framework="np") as file:
        said = json.loads(file.metadata()["understudy"])
        assert set(said) == {"format", "kind", "version", "config", "words", "observation", "action", "check"}
        assert (said["kind"], said["version"]) == ("vla", 7)
        assert said["words"] == ["close", "door", "it", "open", "press", "red", "the"]
        assert "weights/text/layers/0/mlp/up_proj/weight" in file.keys()  # noqa: SIM118
        assert "stats/std/observation/state" in file.keys()  # noqa: SIM118
    again = VLAPolicy.load(tmp_path / "a.safetensors", SPEC)
    again.save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    first, second = (act(one, observations(9), told(9)) for one in (policy, again))
    assert np.array_equal(first.log_prob, second.log_prob)
    assert second.version == 7
    with pytest.raises(PolicyError, match="expected a policy, got a vla; load it as that"):
        ActorPolicy.load(tmp_path / "a.safetensors")


def test_newer_parameters_give_another_policy() -> None:
    old, new = policy_of(), policy_of(seed=3)
    before = old.parameters()
    made = old.with_parameters(new.parameters(), version=4)
    assert made.version == 4
    assert trees.equal(made.parameters(), new.parameters())
    assert trees.equal(old.parameters(), before)
    with torch.no_grad():
        made.model.queries += 1.0
    assert trees.equal(old.parameters(), before)  # nothing is shared between policies
    with torch.no_grad():
        old.model.queries += 1.0
    assert not trees.equal(old.parameters(), before)  # and nothing with what was taken earlier
    assert not trees.equal(made.parameters(), new.parameters())
    wrong = trees.unflatten(
        {f"weights/{name}": array for name, array in trees.flatten(before["weights"]).items() if name != "queries"}
        | trees.flatten(before["stats"], "stats")
    )
    with pytest.raises(PolicyError, match=r"weights/queries: expected shape \[6, 16\], got nothing"):
        old.with_parameters(wrong, version=5)


def test_new_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = VLAPolicy.new(TINY, SPEC, INSTRUCTIONS, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert trees.equal(one.parameters(), VLAPolicy.new(TINY, SPEC, INSTRUCTIONS, seed=3).parameters())
    assert not trees.equal(one.parameters(), VLAPolicy.new(TINY, SPEC, INSTRUCTIONS, seed=4).parameters())


# ---- gradients


def test_every_weight_has_a_part_in_what_is_evaluated() -> None:
    """So that those who share gradients between processes wait for none that never comes."""
    policy = policy_of(replace(TINY, cameras=("front", "wrist"), value_head=True))
    tokens = act(policy, observations(4), told(4)).replay
    found = policy.evaluate(observations(4), told(4), tokens, sampling=SAMPLED)
    assert found.value is not None
    (found.log_prob.sum() + found.value.sum()).backward()
    assert [name for name, weight in policy.model.named_parameters() if weight.grad is None] == []


def test_what_the_model_returns_is_no_view() -> None:
    """FSDP2 hangs its hooks on it, and they are lost where a view is changed in place."""
    policy = policy_of(replace(TINY, value_head=True))
    assert not any(part._is_view() for part in policy.model(policy.tensors(observations(2), told(2))))


def test_another_module_can_stand_in_for_the_model() -> None:
    class Sure(nn.Module):
        def __init__(self, model: VLAModel):
            super().__init__()
            self.model = model

        def forward(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
            said, value = self.model(tensors)
            sure = torch.zeros_like(said)
            sure[..., 2] = 100.0
            return said + sure, value

    policy = policy_of()
    two = {"tokens": np.full((3, 3, 2), 2, np.int32)}
    found = policy.evaluate(observations(3), told(3), two, sampling=SAMPLED, module=Sure(policy.model))
    assert found.log_prob.exp().min() > 0.99
    assert policy.evaluate(observations(3), told(3), two, sampling=SAMPLED).log_prob.exp().min() < 0.9


def test_gradients_can_be_had_with_less_memory() -> None:
    policy = policy_of(replace(TINY, layers=2, vision_layers=2))
    tokens = act(policy, observations(4), told(4)).replay

    def gradients() -> tuple[list[Tensor], int]:
        kept: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            kept.append(tensor.numel())
            return tensor

        policy.model.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = policy.evaluate(observations(4), told(4), tokens, sampling=SAMPLED).log_prob.sum()
            num = sum(kept)
            loss.backward()
        return [weight.grad.clone() for weight in policy.model.parameters() if weight.grad is not None], num

    plain, much = gradients()
    policy.model.checkpoint_gradients(True)
    again, little = gradients()
    assert all(torch.allclose(one, two, atol=1e-6) for one, two in zip(plain, again, strict=True))
    assert little < 0.6 * much
    assert np.array_equal(act(policy, observations(4), told(4)).replay["tokens"], tokens["tokens"])
    policy.model.checkpoint_gradients(False)
    assert gradients()[1] == much


# ---- what is refused


def other(**fields: ArraySpec) -> StepSpec:
    return StepSpec(observation=Spec({**SPEC.observation.tree, **fields}), action=SPEC.action)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: VLAConfig(hidden=0), "hidden: expected a number from 1, got 0"),
        (lambda: VLAConfig(act_rows=0), "act_rows: expected a number from 1, got 0"),
        (lambda: VLAConfig(num_bins=1), "num_bins: expected a number from 2, got 1"),
        (lambda: VLAConfig(cameras=()), "cameras: expected one to three different names"),
        (lambda: VLAConfig(cameras=("a", "a")), "cameras: expected one to three different names"),
        (lambda: VLAConfig(use_proprio=()), "use_proprio: expected names of state fields, got none"),
        (lambda: VLAConfig(heads=3), r"heads: expected a divisor of hidden \(128\), got 3"),
        (lambda: VLAConfig(hidden=6, heads=2), "heads: expected an even size of each, got 6 / 2"),
        (lambda: VLAConfig(dtype="float16"), "dtype: expected 'float32' or 'bfloat16', got 'float16'"),  # type: ignore[arg-type]
        (lambda: policy_of(replace(TINY, cameras=("frond",))), "no field 'frond'; did you mean 'front'?"),
        (lambda: policy_of(replace(TINY, cameras=("state",), use_proprio=None)), "cameras: expected fields with imag"),
        (lambda: policy_of(replace(TINY, use_proprio=("wrist",))), "use_proprio: expected fields with numbers, got 'w"),
        (lambda: policy_of(replace(TINY, patch=12)), r"multiple of patch x shuffle \(24\), got 32"),
        (
            lambda: policy_of(
                replace(TINY, cameras=("front", "wrist")), other(wrist=ArraySpec(shape=(16, 16, 3), dtype="uint8"))
            ),
            r"cameras: expected square images of one size in three colours, got front uint8 \[32, 32, 3\]",
        ),
        (
            lambda: policy_of(
                replace(TINY, cameras=None),
                StepSpec(observation=Spec({"state": ArraySpec(shape=(3,), dtype="float32")}), action=SPEC.action),
            ),
            "cameras: expected a world with one to three, got 0",
        ),
        (lambda: act(policy_of(), observations(2), ["open it for me please my friend"] * 2), "expected 1 to 6 words"),
        (lambda: act(policy_of(), observations(0), []), "instructions: expected at least one, got none"),
        (
            lambda: policy_of().act(observations(2), told(2), rngs=[], sampling=SAMPLED),
            "rngs: expected 2 generators, one for each instruction, got 0",
        ),
        (lambda: act(policy_of(), observations(3), told(2)), "instructions: expected 3, one for each observation,"),
        (
            lambda: policy_of().evaluate(observations(2), told(2), {}, sampling=SAMPLED),
            r"replay/tokens: expected what act\(\) recorded, got nothing; store it",
        ),
        (
            lambda: policy_of().evaluate(observations(2), told(2), {"tokens": np.zeros((2, 3, 1))}, sampling=SAMPLED),
            r"replay/tokens: expected \[2, 3, 2\], got \[2, 3, 1\]",
        ),
        (
            lambda: policy_of().check_world(other(front=ArraySpec(shape=(64, 64, 3), dtype="uint8"))),
            r"observation/front: the policy was made for uint8 \[32, 32, 3\], the world has uint8 \[64, 64, 3\]",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, said: str) -> None:
    with pytest.raises((PolicyError, SpecError), match=said):
        make()


def test_a_world_may_show_more() -> None:
    policy_of().check_world(other(more=ArraySpec(shape=(9,), dtype="float32")))
