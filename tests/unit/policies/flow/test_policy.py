"""FlowPolicy: its options, what it looks at, how it draws, its file and what it refuses. Tiny networks."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from understudy.core import ArraySpec, Spec, SpecError, StepSpec, Tree
from understudy.core import tree as trees
from understudy.policies import Acted, EncoderConfig, PolicyError, Sampling, Stats
from understudy.policies.flow import FlowConfig, FlowPolicy, flow_matching

torch.set_num_threads(1)

PICTURE = ArraySpec(shape=(16, 16, 3), dtype="uint8")
SPEC = StepSpec(
    observation=Spec({"front": PICTURE, "wrist": PICTURE, "state": ArraySpec(shape=(3,), dtype="float32")}),
    action=Spec(ArraySpec(shape=(2,), dtype="float32", low=(-1.0, 0.0), high=(1.0, 4.0))),
)
INSTRUCTIONS = ("open the red door", "close the red door", "press it")
TINY = FlowConfig(
    encoder=EncoderConfig(inputs=("front", "state"), filters=(4, 4), latent=6),
    block_steps=3,
    hidden=16,
    layers=2,
    word_size=5,
    max_words=6,
    num_inference_steps=4,
    act_rows=4,
)
NOISY = replace(TINY, noise_level=0.5)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "value head": {"value_head": True},
    "noise in each step": {"noise_level": 0.5},
    "noise in each step, value head": {"noise_level": 0.5, "value_head": True},
    "learned noise": {"noise_bounds": (0.1, 0.4)},
    "learned noise, value head": {"noise_bounds": (0.1, 0.4), "value_head": True},
    "told what is good": {"advantage": True},
    "guided, noise in each step": {"advantage": True, "guidance": 1.5, "noise_level": 0.5},
    "guided, learned noise": {"advantage": True, "guidance": 1.5, "noise_bounds": (0.1, 0.4)},
}
SAMPLED, GREEDY = Sampling(), Sampling(greedy=True)


def policy_of(config: FlowConfig = TINY, spec: StepSpec = SPEC, *, seed: int = 0, shaken: float = 0.2) -> FlowPolicy:
    """Shaken, since new networks say nearly the same of everything."""
    policy = FlowPolicy.new(config, spec, INSTRUCTIONS, seed=seed)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight += shaken * torch.randn(weight.shape, generator=generator)
    return policy


def observations(num: int, seed: int = 0) -> Tree:
    rng = np.random.default_rng(seed)

    def make(leaf: ArraySpec) -> Any:
        shape = (num, *leaf.fixed_shape)
        if leaf.dtype == "uint8":
            return rng.integers(0, 256, shape, np.uint8)
        return rng.normal(size=shape).astype(np.float32)

    return trees.map_leaves(make, SPEC.observation.tree)


def told(num: int) -> list[str]:
    return [INSTRUCTIONS[number % len(INSTRUCTIONS)] for number in range(num)]


def act(policy: FlowPolicy, num: int = 4, sampling: Sampling = SAMPLED, *, seed: int = 5, **options: Any) -> Acted:
    rngs = [np.random.default_rng([seed, number]) for number in range(num)]
    return policy.act(observations(num), told(num), rngs=rngs, sampling=sampling, **options)


# ---- options


@pytest.mark.parametrize(
    "change",
    [
        {"encoder": replace(TINY.encoder, inputs=("wrist", "state"))},
        {"encoder": replace(TINY.encoder, inputs=("state",))},
        {"encoder": replace(TINY.encoder, inputs=None)},
        {"encoder": EncoderConfig(inputs=("front",), kind="resnet10", latent=6)},
        {"block_steps": 2},
        {"hidden": 8},
        {"layers": 1},
        {"word_size": 4},
        {"max_words": 7},
        {"num_inference_steps": 2},
        {"noise_level": 0.3},
        {"noise_bounds": (0.1, 0.4)},
        {"value_head": True},
        {"advantage": True},
        {"act_rows": 3},
    ],
    ids=str,
)
def test_every_option_changes_something_and_survives_a_file(change: dict[str, Any], tmp_path: Path) -> None:
    plain, changed = policy_of(), policy_of(replace(TINY, **change))
    (name,) = change
    if name == "max_words":
        with pytest.raises(PolicyError, match="expected 1 to 6 words, got 7"):
            plain.words.encode(["one two three four five six seven"])
        assert changed.words.encode(["one two three four five six seven"]).shape == (1, 7)
    elif name == "act_rows":
        rows: list[int] = []
        for policy in (plain, changed):
            policy.model.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0]["noisy"])))
            act(policy, 5)
        assert rows == [4] * 4 * 2 + [3] * 4 * 2
    else:
        first, second = act(plain), act(changed)
        same = np.array_equal(first.replay["chain"], second.replay["chain"])
        assert not same or (first.value is None) != (second.value is None)
    changed.save(tmp_path / "it.safetensors")
    again = FlowPolicy.load(tmp_path / "it.safetensors", SPEC)
    assert again.config == changed.config
    assert trees.equal(act(again).replay, act(changed).replay)


def test_about_half_a_million_parameters_by_default() -> None:
    spec = StepSpec(observation=Spec({"state": ArraySpec(shape=(20,), dtype="float32")}), action=SPEC.action)
    policy = FlowPolicy.new(FlowConfig(), spec, INSTRUCTIONS, seed=0)
    assert 500_000 < sum(weight.numel() for weight in policy.model.parameters()) < 700_000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden": 0}, "hidden: expected a number from 1, got 0"),
        ({"num_inference_steps": 0}, "num_inference_steps: expected a number from 1, got 0"),
        ({"noise_level": -0.1}, "noise_level: expected a number from 0 to 1, got -0.1"),
        ({"noise_level": 1.5}, "noise_level: expected a number from 0 to 1, got 1.5; pi_RL uses 0.5"),
        ({"noise_bounds": (0.0, 0.1)}, "noise_bounds: expected a lower and a higher number above 0, got 0.0 and 0.1"),
        ({"noise_bounds": (0.2, 0.1)}, "noise_bounds: expected a lower and a higher number above 0, got 0.2 and 0.1"),
        ({"noise_bounds": (0.1, 0.2), "noise_level": 0.5}, "noise_level: has no effect with noise_bounds"),
    ],
)
def test_options_that_make_no_sense_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        replace(TINY, **change)


# ---- what it looks at


def test_it_sees_its_inputs_through_the_statistics_and_nothing_else() -> None:
    policy, seen = policy_of(), observations(2)

    def chain(of: FlowPolicy, observation: Tree) -> Any:
        return of.act(observation, told(2), rngs=[np.random.default_rng(0)] * 2, sampling=GREEDY).replay["chain"]

    before = chain(policy, seen)
    for name in ("front", "wrist", "state"):
        other = {**seen, name: observations(2, seed=1)[name]}
        assert np.array_equal(before, chain(policy, other)) is (name == "wrist"), name
    stats = Stats(mean={"state": np.float32([1, 2, 3])}, std={"state": np.float32([2, 2, 4])})
    scaled = {**seen, "state": (seen["state"] - stats.mean["state"]) / stats.std["state"]}
    wanted = chain(policy, scaled)
    assert np.array_equal(chain(policy.with_stats(stats), seen), wanted)
    assert not np.array_equal(wanted, before)


def test_padding_behind_an_instruction_is_not_looked_at() -> None:
    policy = policy_of()
    before = act(policy).replay["chain"]
    with torch.no_grad():
        policy.model.words.weight[0] += 1.0
    assert np.array_equal(act(policy).replay["chain"], before)
    with torch.no_grad():
        policy.model.words.weight[2:] += 1.0
    assert not np.array_equal(act(policy).replay["chain"], before)


# ---- drawing


def test_a_chain_is_the_euler_steps_from_its_noise_to_the_block() -> None:
    policy = policy_of()
    acted = act(policy)
    chain = acted.replay["chain"]
    rng = np.random.default_rng([5, 2])
    assert np.array_equal(chain[2, 0], rng.standard_normal((3, 2), np.float32))
    tensors = policy.tensors(observations(4), told(4))
    for step in range(4):
        given = {**tensors, "noisy": torch.tensor(chain[:, step]).flatten(1), "time": torch.full((4,), step / 4)}
        with torch.no_grad():
            velocity = policy.model(given)[0].view(4, 3, 2).numpy()
        np.testing.assert_allclose(chain[:, step + 1], chain[:, step] + velocity / 4, atol=1e-6)
    clipped = np.clip(chain[:, -1], -1, 1)
    np.testing.assert_allclose(acted.action, clipped * [1, 2] + [0, 2], atol=1e-6)


def test_noise_can_be_given_and_greedy_begins_at_none() -> None:
    """And both draw nothing that the chain does not need."""
    for config, used in ((TINY, 0), (NOISY, 4 * 6)):
        policy = policy_of(config)
        noise = np.random.default_rng(0).normal(size=(2, 3, 2)).astype(np.float32)
        rngs = [np.random.default_rng(number) for number in range(2)]
        acted = policy.act(observations(2), told(2), rngs=rngs, sampling=SAMPLED, noise=noise)
        assert np.array_equal(acted.replay["chain"][:, 0], noise)
        like = np.random.default_rng(1)
        like.standard_normal(used, np.float32)
        assert rngs[1].bit_generator.state == like.bit_generator.state
        greedy, plain = act(policy, sampling=GREEDY), act(policy_of(), sampling=GREEDY)
        assert not greedy.replay["chain"][:, 0].any()
        assert np.array_equal(greedy.replay["chain"], plain.replay["chain"])  # without noise, whatever its level
        for wrong in (noise[:1], noise.swapaxes(1, 2), np.full_like(noise, np.nan)):
            with pytest.raises(PolicyError, match=r"noise: expected finite numbers \[2, 3, 2\], a row for each"):
                policy.act(observations(2), told(2), rngs=rngs, sampling=SAMPLED, noise=wrong)


def test_rows_can_be_many_in_one_pass() -> None:
    policy = policy_of(TINY)
    wide = policy.with_act_rows(2 * policy.config.act_rows)
    assert policy.noise_shape == wide.noise_shape == (3, 2)
    assert wide.config.act_rows == 2 * policy.config.act_rows
    np.testing.assert_allclose(act(wide).action, act(policy).action, atol=1e-6)


def test_the_temperature_multiplies_what_is_drawn() -> None:
    policy = policy_of(NOISY)
    chain = {heat: act(policy, sampling=Sampling(temperature=heat)).replay["chain"] for heat in (1.0, 0.5, 1e-6)}
    np.testing.assert_allclose(chain[0.5][:, 0], 0.5 * chain[1.0][:, 0], rtol=1e-6)
    assert np.abs(chain[1e-6][:, 0]).max() < 1e-4
    assert np.abs(chain[1e-6] - chain[1.0]).max() > 0.1


def test_without_noise_in_the_steps_the_log_prob_is_that_of_the_noise_and_cannot_be_learned_from() -> None:
    policy = policy_of()
    acted = act(policy)
    noise = acted.replay["chain"][:, 0].astype(np.float64)
    wanted = (-0.5 * noise**2 - 0.5 * np.log(2 * np.pi)).sum(axis=-1)[..., None]
    np.testing.assert_allclose(acted.log_prob, wanted, rtol=1e-5)
    assert policy.why_no_policy_gradient is not None
    assert "noise_level" in policy.why_no_policy_gradient
    noisy = policy.with_noise_level(0.5)
    assert noisy.why_no_policy_gradient is None
    assert (policy.log_prob_size, noisy.log_prob_size) == (1, 4)
    assert noisy.model is policy.model


def test_learned_noise_is_within_its_bounds_and_the_log_prob_that_of_the_step() -> None:
    policy = policy_of(replace(TINY, noise_bounds=(0.1, 0.4)))
    acted = act(policy)
    chain = acted.replay["chain"].astype(np.float64)
    tensors = policy.tensors(observations(4), told(4))
    stds = []
    for step in range(4):
        given = {**tensors, "noisy": torch.tensor(acted.replay["chain"][:, step]).flatten(1)}
        with torch.no_grad():
            velocity, _, _, found = policy.model({**given, "time": torch.full((4,), step / 4)})
        assert found is not None
        mean = chain[:, step] + velocity.view(4, 3, 2).numpy() / 4
        std = found.view(4, 3, 2).numpy().astype(np.float64)
        stds.append(std)
        away = (chain[:, step + 1] - mean) / std
        wanted = (-0.5 * away**2 - np.log(std) - 0.5 * np.log(2 * np.pi)).sum(axis=-1)
        np.testing.assert_allclose(acted.log_prob[..., step], wanted, rtol=1e-4, atol=1e-4)
    assert 0.1 < np.min(stds) < np.max(stds) < 0.4
    assert np.std(stds) > 0.01  # it depends on what is seen, and on the step
    evaluated = policy.evaluate(observations(4), told(4), acted.replay, sampling=SAMPLED)
    entropy = (0.5 + 0.5 * np.log(2 * np.pi) + np.log(np.stack(stds, axis=-1))).sum(axis=2)
    np.testing.assert_allclose(evaluated.entropy.detach().numpy(), entropy, rtol=1e-4)
    assert evaluated.entropy.requires_grad  # unlike that of noise of a fixed size


def test_a_network_for_the_noise_is_added_and_kept() -> None:
    policy = policy_of()
    first, again = (policy.with_noise_bounds((0.08, 0.16), seed=3) for _ in range(2))
    assert trees.equal(first.parameters(), again.parameters())  # policy and reference begin alike
    assert not trees.equal(first.parameters(), policy.with_noise_bounds((0.08, 0.16), seed=4).parameters())
    assert np.array_equal(act(first, sampling=GREEDY).action, act(policy, sampling=GREEDY).action)
    assert (first.log_prob_size, first.why_no_policy_gradient) == (4, None)
    with torch.no_grad():
        for weight in first.model.noise.parameters():
            weight += 1.0
    wider = first.with_noise_bounds((0.08, 0.5), seed=9)
    assert trees.equal(wider.parameters(), first.parameters())
    assert not np.array_equal(act(wider).replay["chain"], act(first).replay["chain"])
    with pytest.raises(PolicyError, match="noise_level: has no effect with noise_bounds"):
        first.with_noise_level(0.5)
    assert policy_of(NOISY).with_noise_bounds((0.08, 0.16), seed=0).config.noise_level == 0


@pytest.mark.parametrize("noise", [{"noise_level": 0.5}, {"noise_bounds": (0.1, 0.4)}])
def test_log_probs_have_gradients_for_every_weight(noise: dict[str, Any]) -> None:
    """So that those who share gradients between processes wait for none that never comes."""
    policy = policy_of(replace(TINY, **noise, value_head=True))
    acted = act(policy)
    found = policy.evaluate(observations(4), told(4), acted.replay, sampling=SAMPLED)
    assert found.value is not None
    np.testing.assert_allclose(found.log_prob.detach().numpy(), acted.log_prob, atol=3e-5)
    (found.log_prob.sum() + found.value.sum()).backward()
    assert [name for name, weight in policy.model.named_parameters() if weight.grad is None] == []
    parts = [part for part in (found.value, *policy.model(_given(policy))) if part is not None]
    assert not any(part._is_view() for part in parts)  # FSDP2 hooks


def _given(policy: FlowPolicy) -> dict[str, torch.Tensor]:
    return {**policy.tensors(observations(2), told(2)), "noisy": torch.zeros(2, 6), "time": torch.zeros(2)}


def test_what_was_not_recorded_is_named() -> None:
    policy = policy_of(NOISY)
    for replay, said in (({}, "got nothing"), ({"chain": np.zeros((4, 4, 3, 2))}, r"got \[4, 4, 3, 2\]")):
        with pytest.raises(PolicyError, match=r"replay/chain: expected \[4, 5, 3, 2\], " + said):
            policy.evaluate(observations(4), told(4), replay, sampling=SAMPLED)
    with pytest.raises(PolicyError, match="rngs: expected 4 generators, one for each instruction, got 0"):
        policy.act(observations(4), told(4), rngs=[], sampling=SAMPLED)
    with pytest.raises(SpecError, match="instructions: expected 4, one for each observation, got 3"):
        policy.act(observations(4), told(3), rngs=[np.random.default_rng(0)] * 3, sampling=SAMPLED)


def test_it_needs_no_transformers() -> None:
    modules = ("policies.flow.policy", "policies.load", "algorithms.sft.sft", "training.onpolicy.sft")
    code = "; ".join(f"import understudy.{module}" for module in modules)
    subprocess.run([sys.executable, "-c", f"{code}; import sys; assert 'transformers' not in sys.modules"], check=True)


# ---- the file and other weights


def test_the_file_is_plain_safetensors_and_equal_policies_are_equal_files(tmp_path: Path) -> None:
    policy = policy_of()
    policy.version = 7
    policy.save(tmp_path / "a.safetensors")
    with safe_open(tmp_path / "a.safetensors", framework="np") as file:
        said = json.loads(file.metadata()["understudy"])
        assert set(said) == {"format", "kind", "version", "config", "words", "observation", "action", "check"}
        assert (said["kind"], said["version"]) == ("flow", 7)
        assert {"weights/velocity/weight", "stats/std/observation/state"} <= set(file.keys())
    again = FlowPolicy.load(tmp_path / "a.safetensors", SPEC)
    again.save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_newer_parameters_and_a_value_head_give_another_policy() -> None:
    old, new = policy_of(), policy_of(seed=3)
    before = old.parameters()
    made = old.with_parameters(new.parameters(), version=4)
    assert made.version == 4
    assert trees.equal(made.parameters(), new.parameters())
    with torch.no_grad():
        made.model.velocity.weight += 1.0
    assert trees.equal(old.parameters(), before)  # nothing is shared between policies
    valued = old.with_value_head(seed=0)
    assert valued.has_value
    assert np.array_equal(act(valued).replay["chain"], act(old).replay["chain"])
    assert not np.array_equal(act(valued).value, act(old.with_value_head(seed=1)).value)
    assert trees.equal(valued.with_value_head(seed=9).parameters(), valued.parameters())
    with pytest.raises(PolicyError, match=r"weights/value/0/weight: expected shape \[16, 14\], got nothing"):
        valued.with_parameters(before, version=5)


def test_a_frozen_encoder_is_in_the_file_as_a_digest_and_shared_by_all_copies(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    size: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    vit = transformers.ViTModel(transformers.ViTConfig(**size, image_size=16, patch_size=8))
    vit.save_pretrained(tmp_path / "vit")
    encoder = EncoderConfig(inputs=("front",), kind="pretrained", pretrained=str(tmp_path / "vit"), latent=6)
    policy = policy_of(replace(TINY, encoder=encoder))
    policy.save(tmp_path / "it.safetensors")
    assert len(policy.description()["encoder_digest"]) == 64
    assert not any("backbone" in name for name in trees.flatten(policy.parameters()))
    copied = policy.with_parameters(policy.parameters(), version=1)
    mine, theirs = (one.model.encoder.images for one in (policy, copied))
    assert mine is not None
    assert theirs is not None
    assert mine is not theirs
    assert mine._shared[0] is theirs._shared[0]  # type: ignore[index]
    assert trees.equal(act(FlowPolicy.load(tmp_path / "it.safetensors")).replay, act(policy).replay)
    with torch.no_grad():
        for weight in vit.parameters():
            weight += 0.1
    vit.save_pretrained(tmp_path / "vit")
    with pytest.raises(PolicyError, match="the policy was trained with a frozen encoder of digest"):
        FlowPolicy.load(tmp_path / "it.safetensors")
    trained = policy_of(replace(TINY, encoder=replace(encoder, frozen=False)))
    copied = trained.with_parameters(trained.parameters(), version=1)
    mine, theirs = (one.model.encoder.images for one in (trained, copied))
    assert mine._shared[0] is not theirs._shared[0]  # type: ignore[index,union-attr]
    assert theirs._shared[0] is theirs.backbone  # type: ignore[index,union-attr]


def test_new_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = FlowPolicy.new(TINY, SPEC, INSTRUCTIONS, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    assert trees.equal(one.parameters(), FlowPolicy.new(TINY, SPEC, INSTRUCTIONS, seed=3).parameters())
    assert not trees.equal(one.parameters(), FlowPolicy.new(TINY, SPEC, INSTRUCTIONS, seed=4).parameters())
    assert all(np.isfinite(array).all() for array in trees.flatten(one.parameters()).values())


def test_the_loss_is_flow_matching_and_the_error_that_of_greedy_blocks() -> None:
    policy = policy_of()
    action = torch.rand(4, 3, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    weight = torch.ones(4, 3)
    weight[0, 1:] = 0.0
    tensors = policy.tensors(observations(4), told(4))
    found = policy.imitation_loss(tensors, action, weight, generator=torch.Generator().manual_seed(2))
    generator = torch.Generator().manual_seed(2)
    noise, time = torch.randn(4, 3, 2, generator=generator), torch.rand(4, generator=generator)
    noisy = flow_matching.interpolated(noise, action, time).flatten(1)
    velocity = policy.model({**tensors, "noisy": noisy, "time": time})[0].view(4, 3, 2)
    squares = (velocity - (action - noise)).square().mean(dim=-1)
    assert found.loss.item() == pytest.approx((squares * weight).sum().item() / 10, rel=1e-5)
    greedy = act(policy, sampling=GREEDY).replay["chain"][:, -1].clip(-1, 1)
    away = np.abs(greedy - action.numpy()).mean(axis=-1)
    assert found.report()["error"].item() == pytest.approx((away * weight.numpy()).sum() / 10, rel=1e-5)


# ---- told what is good


def test_guidance_moves_the_velocity_from_without_knowing_to_good_and_beyond() -> None:
    config = replace(TINY, advantage=True, num_inference_steps=1)
    noise = np.zeros((4, 3, 2), np.float32)

    def first_velocity(guidance: float) -> Any:
        policy = policy_of(replace(config, guidance=guidance))
        chain = act(policy, noise=noise).replay["chain"]
        return chain[:, 1] - chain[:, 0]

    plain, good = first_velocity(0.0), first_velocity(1.0)
    assert np.abs(good - plain).max() > 1e-3
    np.testing.assert_allclose(first_velocity(1.5), plain + 1.5 * (good - plain), atol=1e-5)


def test_a_policy_that_can_be_told_acts_as_before_until_it_has_learned() -> None:
    before = policy_of()
    told_of = before.with_advantage(1.5)
    assert told_of.config == replace(TINY, advantage=True, guidance=1.5)
    np.testing.assert_allclose(act(told_of).replay["chain"], act(before).replay["chain"], atol=1e-6)
    with torch.no_grad():
        told_of.model.advantage.weight += torch.linspace(0, 3, 48).sin().view(3, 16)  # type: ignore[union-attr]
    again = told_of.with_advantage(2.0)  # keeps what it has learned
    assert np.abs(act(again).action - act(told_of).action).max() > 1e-3
    assert torch.equal(again.model.advantage.weight, told_of.model.advantage.weight)  # type: ignore[union-attr]


def test_good_and_bad_blocks_teach_it_to_tell_them_apart() -> None:
    """Everywhere the good block is 0.5 and the bad one -0.5, so nothing but what it is told can tell."""
    policy = policy_of(replace(TINY, advantage=True), shaken=0.02)
    adam = torch.optim.Adam(policy.model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(0)
    good = torch.arange(32) % 2 == 0
    action = torch.where(good, 0.5, -0.5)[:, None, None].expand(32, 3, 2)
    for number in range(150):
        tensors = policy.tensors(observations(32, seed=number), told(32))
        found = policy.imitation_loss(
            tensors, action, torch.ones(32, 3), generator=generator, good=good, advantage_dropout=0.2
        )
        adam.zero_grad()
        found.loss.backward()
        adam.step()
    reached = act(policy, 8, GREEDY).replay["chain"][:, -1].mean()
    assert reached == pytest.approx(0.5, abs=0.15)
    unaware = policy.with_advantage(0.0)
    assert abs(act(unaware, 8, GREEDY).replay["chain"][:, -1].mean()) < 0.25


def test_what_it_is_told_is_dropped_as_often_as_asked() -> None:
    policy = policy_of(replace(TINY, advantage=True))
    tensors = policy.tensors(observations(400), told(400))
    seen: list[torch.Tensor] = []
    policy.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]["advantage"]))
    good = torch.arange(400) < 100

    def counts(**options: Any) -> list[int]:
        seen.clear()
        generator = torch.Generator().manual_seed(0)
        policy.imitation_loss(tensors, torch.zeros(400, 3, 2), torch.ones(400, 3), generator=generator, **options)
        return torch.bincount(seen[0], minlength=3).tolist()

    assert counts(good=good) == [0, 300, 100]
    assert counts() == [0, 0, 400]  # demonstrations are good
    unknown, bad, known_good = counts(good=good, advantage_dropout=0.25)
    assert 70 < unknown < 130
    assert bad + known_good == 400 - unknown


def test_a_plain_policy_has_the_file_that_it_had_before_there_was_guidance() -> None:
    assert {"advantage", "guidance"} & set(policy_of().description()["config"]) == set()
    described = policy_of(replace(TINY, advantage=True, guidance=2.0)).description()["config"]
    assert (described["advantage"], described["guidance"]) == (True, 2.0)
    with pytest.raises(PolicyError, match="guidance: has no effect on a policy without advantage, got"):
        replace(TINY, guidance=2.0)
    with pytest.raises(PolicyError, match="guidance: expected a number from 0, got -1"):
        replace(TINY, advantage=True, guidance=-1)
