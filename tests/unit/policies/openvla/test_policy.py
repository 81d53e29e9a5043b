"""OpenVLAPolicy over a tiny checkpoint with the files and names of the Hub: the contract, and what each option does."""

from __future__ import annotations

import gc
import json
import re
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers")
pytest.importorskip("peft")

from tests.contracts import block_policy as contract
from tests.docs.pages import DOCS, run_page
from tests.unit.policies.openvla.make_checkpoint import (
    KEY,
    PICTURE,
    SPEC,
    instructions,
    load,
    make_checkpoint,
    observations,
    rngs,
    statistics,
)

from understudy.core import ArraySpec, Spec, StepSpec
from understudy.policies import PolicyError, Sampling
from understudy.policies.config import LoraConfig
from understudy.policies.openvla import OpenVLAConfig, OpenVLAPolicy
from understudy.policies.openvla.inputs import ImagePreprocessor
from understudy.policies.openvla.jpeg_lanczos import compress_and_resize
from understudy.policies.subprocess import Limits, PolicyFactory

CASES: dict[str, dict[str, Any]] = {
    "parallel": {"cameras": ("image",)},
    "two cameras, proprioception, value": {
        "cameras": ("image", "wrist"),
        "use_proprio": ("hand", "grip"),
        "value_head": True,
        "act_rows": 4,
        "block_steps": 3,
    },
    "causal": {"cameras": ("wrist",), "attention": "causal", "center_crop": True, "mirror": True},
    "autoregressive": {"cameras": ("image",), "decoding": "autoregressive", "block_steps": 1, "value_head": True},
    "prompts padded together": {"cameras": ("image",), "act_rows": 4, "pad_prompts_to": 16},
    "autoregressive, many rows": {
        "cameras": ("image",),
        "decoding": "autoregressive",
        "block_steps": 1,
        "act_rows": 3,
    },
}
NUM = 5
PAGE = DOCS / "openvla.md"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("openvla") / "checkpoint", proprio=True)


def log_prob(policy: OpenVLAPolicy, observation: Any, tokens: Any) -> Any:
    said = instructions(len(tokens))
    return policy.evaluate(observation, said, {"tokens": tokens}, sampling=Sampling()).log_prob.detach().numpy()


def some_tokens(policy: OpenVLAPolicy, num: int = 3) -> Any:
    shape = (num, policy.block_steps, policy.log_prob_size)
    return np.random.default_rng(3).integers(0, 256, shape, np.int32)


def with_random_value_head(policy: OpenVLAPolicy) -> OpenVLAPolicy:
    """A new value head gives 0; give it weights."""
    if policy.model.value_head is not None:
        torch.nn.init.normal_(policy.model.value_head.weight, generator=torch.Generator().manual_seed(0))
    return policy


@pytest.mark.parametrize("case", ["parallel", "autoregressive"])
def test_rows_of_one_length_are_weighed_to_the_bit(directory: Path, case: str) -> None:
    policy = load(directory, **CASES[case])
    acted = policy.act(observations(1), instructions(1), rngs=rngs(1), sampling=Sampling())
    again = policy.evaluate(observations(1), instructions(1), acted.replay, sampling=Sampling())
    np.testing.assert_array_equal(again.log_prob.detach().numpy(), acted.log_prob)


@pytest.mark.parametrize("case", CASES)
def test_gradients_reach_every_weight(directory: Path, case: str) -> None:
    policy = with_random_value_head(load(directory, **CASES[case]))
    told = policy.evaluate(
        observations(3), instructions(3), {"tokens": some_tokens(policy)}, sampling=Sampling(temperature=1.3)
    )
    loss = told.log_prob.sum() + told.entropy.sum() + (0 if told.value is None else told.value.sum())
    loss.backward()
    for name, weight in policy.model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.abs().sum() > 0, name


def test_a_module_in_place_of_the_own_one_is_called(directory: Path) -> None:
    policy = load(directory)
    tokens = some_tokens(policy)

    def other(tensors: Any) -> Any:
        logits, value = policy.model(tensors)
        return logits * 0.0, value

    told = policy.evaluate(
        observations(3), instructions(3), {"tokens": tokens}, sampling=Sampling(), module=other
    ).log_prob
    np.testing.assert_allclose(told.detach().numpy(), -np.log(256), rtol=1e-6)


# ---- what it sees


def test_each_camera_that_is_named_is_seen_and_no_other(directory: Path) -> None:
    observation = observations(3)
    changed = {**observation, "wrist": 255 - observation["wrist"]}
    for cameras, seen in ((("image",), False), (("image", "wrist"), True)):
        policy = load(directory, cameras=cameras)
        assert policy.config.num_images_in_input == len(cameras)
        tokens = some_tokens(policy)
        same = np.array_equal(log_prob(policy, observation, tokens), log_prob(policy, changed, tokens))
        assert same is not seen
    first, second = (load(directory, cameras=cameras) for cameras in (("image", "wrist"), ("wrist", "image")))
    tokens = some_tokens(first)
    assert not np.allclose(log_prob(first, observation, tokens), log_prob(second, observation, tokens), atol=1e-3)
    swapped = {**observation, "image": observation["wrist"], "wrist": observation["image"]}
    np.testing.assert_array_equal(log_prob(first, observation, tokens), log_prob(second, swapped, tokens))


def test_proprioception_is_scaled_by_its_percentiles_and_clipped(directory: Path) -> None:
    policy = load(directory, use_proprio=("hand", "grip"))
    observation = observations(2)
    observation["hand"] = np.array([[0.5, -2.0, 3.0], [9.0, -9.0, 0.0]], np.float32)
    observation["grip"] = np.array([[0.25, 0.5], [0.0, 0.0]], np.float32)
    given = policy.tensors(observation, instructions(2))["proprio"].numpy()
    np.testing.assert_allclose(given, [[0.5, -1, 0.5, 0, 1], [1, -1, -1, -1, 0]], atol=1e-6)
    tokens = some_tokens(policy, 2)
    before = log_prob(policy, observation, tokens)
    observation["hand"][0, 0] = -0.5
    assert not np.allclose(log_prob(policy, observation, tokens), before, atol=1e-3)
    without = load(directory)
    assert "proprio" not in without.tensors(observation, instructions(2))


def test_pictures_are_mirrored_and_cropped_where_asked(directory: Path) -> None:
    observation = observations(2)
    plain, mirrored, cropped = (load(directory, **options) for options in ({}, {"mirror": True}, {"center_crop": True}))
    flipped = {**observation, "image": observation["image"][:, :, ::-1]}
    said = instructions(2)
    torch.testing.assert_close(
        mirrored.tensors(observation, said)["images"], plain.tensors(flipped, said)["images"], rtol=0, atol=0
    )
    assert not torch.equal(cropped.tensors(observation, said)["images"], plain.tensors(observation, said)["images"])
    bright = {**observation, "image": observation["image"].copy()}
    bright["image"][:, :, 0] = 255  # the outermost column, of which a crop sees nothing once resized to its edge
    small = OpenVLAPolicy.load(directory, spec_of(16), unnorm_key=KEY, cameras=("image",), center_crop=True, version=3)
    one, two = ({"image": np.full((1, 16, 16, 3), 80, np.uint8)} for _ in range(2))
    two["image"][:, 0] = 255
    inner = [small.tensors(x, said[:1])["images"][:, :, 1:] for x in (one, two)]
    assert torch.equal(inner[0], inner[1])


def test_resize_chooses_how_pictures_are_made_smaller(directory: Path) -> None:
    observation, said = observations(1), instructions(1)
    plain, published = (load(directory, resize=resize, mirror=True) for resize in ("processor", "jpeg_lanczos"))
    seen = [policy.tensors(observation, said)["images"][0, 3:6] for policy in (plain, published)]  # from -1 to 1
    assert not torch.equal(seen[0], seen[1])
    expected = compress_and_resize(observation["image"][0][:, ::-1], PICTURE).transpose(2, 0, 1)
    np.testing.assert_allclose(seen[1].numpy(), (expected / 255 - 0.5) / 0.5, atol=1e-6)


def spec_of(size: int) -> StepSpec:
    return StepSpec(observation=Spec({"image": ArraySpec(shape=(size, size, 3), dtype="uint8")}), action=SPEC.action)


def test_the_only_camera_needs_no_name(directory: Path) -> None:
    assert OpenVLAPolicy.load(directory, spec_of(16), unnorm_key=KEY).config.cameras == ("image",)
    with pytest.raises(PolicyError, match=r"cameras: expected names, since the world has 2 \(image, wrist\)"):
        OpenVLAPolicy.load(directory, SPEC, unnorm_key=KEY)
    with pytest.raises(PolicyError, match="the world has no camera 'front'; it has image, wrist"):
        load(directory, cameras=("front",))
    with pytest.raises(PolicyError, match="the world has no camera 'hand'"):
        load(directory, cameras=("hand",))


# ---- how it decides


def test_parallel_decoding_sees_both_ways_unless_it_is_causal(directory: Path) -> None:
    """The end of the text stands behind the numbers: only who sees both ways notices it."""
    observation = observations(1)
    for attention, noticed in (("bidirectional", True), ("causal", False)):
        policy = load(directory, attention=attention)
        given = policy.tensors(observation, instructions(1))
        logits, _ = policy.model(given)
        last = given["ids"].shape[1] - 1
        assert given["ids"][0, last] == 2
        given["ids"][0, last] = 9
        assert torch.equal(policy.model(given)[0], logits) is not noticed


def test_numbers_are_empty_in_parallel_and_seen_one_by_one(directory: Path) -> None:
    observation = observations(2)
    parallel = load(directory)
    tokens = some_tokens(parallel, 2)
    other = tokens.copy()
    other[:, 0, 0] = 255 - other[:, 0, 0]
    before, after = log_prob(parallel, observation, tokens), log_prob(parallel, observation, other)
    np.testing.assert_array_equal(before[:, 0, 1:], after[:, 0, 1:])
    one_by_one = load(directory, decoding="autoregressive", block_steps=1)
    before, after = (log_prob(one_by_one, observation, x[:, :1]) for x in (tokens, other))
    assert (before[:, 0, 1:] != after[:, 0, 1:]).all()
    assert (before[:, 0, 0] != after[:, 0, 0]).all()  # another choice, from the same distribution


def test_padding_is_not_seen(directory: Path) -> None:
    """A short prompt beside a long one is weighed as it is alone, up to rounding."""
    for options in CASES.values():
        policy = load(directory, **options)
        tokens = some_tokens(policy, 2)
        said = ["pick up the bowl", "pick up the bowl and put it on the plate and open the drawer"]
        both = policy.evaluate(observations(2), said, {"tokens": tokens}, sampling=Sampling()).log_prob
        for row in range(2):
            alone = policy.evaluate(
                contract.rows(observations(2), [row]),
                said[row : row + 1],
                {"tokens": tokens[row : row + 1]},
                sampling=Sampling(),
            ).log_prob
            torch.testing.assert_close(both[row : row + 1], alone, rtol=0, atol=3e-5)


def test_block_steps_is_how_many_actions_there_are(directory: Path) -> None:
    for steps in (1, 5):
        policy = load(directory, block_steps=steps)
        acted = policy.act(observations(2), instructions(2), rngs=rngs(2), sampling=Sampling())
        assert acted.action.shape == (2, steps, 7)


def test_act_rows_is_how_many_rows_a_pass_has(directory: Path) -> None:
    for num_rows in (1, 4):
        policy = load(directory, act_rows=num_rows)
        sizes = []
        policy.model.projector.register_forward_hook(lambda *x, sizes=sizes: sizes.append(len(x[2])))
        policy.act(observations(3), instructions(3), rngs=rngs(3), sampling=Sampling())
        assert set(sizes) == {num_rows}


def test_rows_of_different_prompts_share_a_pass(directory: Path) -> None:
    """A prompt is padded to the same length whoever is beside it, so that other rows change no bit of a row."""
    said = [f"pick up the bowl{' and the plate' * (row % 4)}" for row in range(8)]
    passes, log_probs = [], []
    for multiple in (1, 64):
        policy = load(directory, act_rows=4, pad_prompts_to=multiple)
        sizes: list[int] = []
        policy.model.projector.register_forward_hook(lambda *x, sizes=sizes: sizes.append(len(x[2])))
        together = policy.act(observations(8), said, rngs=rngs(8), sampling=Sampling())
        passes.append(len(sizes))
        alone = policy.act(contract.rows(observations(8), [5]), said[5:6], rngs=rngs(8)[5:6], sampling=Sampling())
        np.testing.assert_array_equal(alone.log_prob[0], together.log_prob[5])
        log_probs.append(log_prob(policy, observations(8), some_tokens(policy, 8)))
    assert passes == [4, 2]
    np.testing.assert_allclose(log_probs[0], log_probs[1], rtol=0, atol=3e-5)
    assert policy.num_tokens(said[0]) == policy.num_tokens(said[3])


def test_attention_has_a_mask_where_there_is_padding_that_could_be_seen(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest kernels take none, and a dense one has a byte for each two tokens of each row."""
    masks: list[torch.Tensor | None] = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        masks.append(kwargs.get("attn_mask"))
        return plain(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attention)
    short, long = "pick up the bowl", "pick up the bowl and put it on the plate and open the drawer"
    for options, said, wanted in (
        ({}, [short, short], False),
        ({}, [short, long], True),
        ({"attention": "causal"}, [short, long], False),
        ({"decoding": "autoregressive", "block_steps": 1}, [short, long], False),
    ):
        policy = load(directory, **options)
        masks.clear()
        policy.evaluate(observations(2), said, {"tokens": some_tokens(policy, 2)}, sampling=Sampling())
        found = [mask for mask in masks if mask is not None]
        assert bool(found) is wanted, options
        for mask in found:
            assert mask.untyped_storage().nbytes() == 2 * mask.shape[-1]  # and not its square


def test_images_are_prepared_once_for_many_evaluations(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load(directory, cameras=("image", "wrist"), use_proprio=("hand", "grip"))
    tokens = some_tokens(policy, 3)
    expected = log_prob(policy, observations(3), tokens)
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        prepared = policy.prepared(observations(3))
        with monkeypatch.context() as strict:
            strict.setattr(ImagePreprocessor, "resized", None)  # raises if it is called
            np.testing.assert_array_equal(log_prob(policy, prepared, tokens), expected)


def test_bfloat16_weights(directory: Path) -> None:
    policy = load(directory, dtype="bfloat16", value_head=True)
    assert {weight.dtype for weight in policy.model.parameters()} == {torch.bfloat16}
    whole = load(directory, value_head=True)
    tokens = some_tokens(policy)
    near, exact = (log_prob(x, observations(3), tokens) for x in (policy, whole))
    assert 0 < np.abs(near - exact).max() < 0.5
    contract.check_shapes(policy, observations(3), instructions(3), SPEC.action)


# ---- actions


def test_bins_are_openvlas(directory: Path) -> None:
    """By the formula of its own code, on token ids: the highest id is the lowest number, two ids mean the highest."""
    policy = load(directory)
    ids = np.array([319, 318, 200, 65, 64])
    bins = 319 - ids
    edges = np.linspace(-1, 1, 256)
    centres = (edges[:-1] + edges[1:]) / 2
    unit = centres[np.clip(320 - ids - 1, 0, 254)]
    stats = statistics()["action"]
    low, high = np.array(stats["q01"]), np.array(stats["q99"])
    for number in range(7):
        block = np.full((5, 8, 7), 128)
        block[:, 0, number] = bins
        action = policy.actions.action(block)
        expected = 0.5 * (unit + 1) * (high[number] - low[number] + 1e-8) + low[number] if number < 6 else unit
        np.testing.assert_allclose(action[:, 0, number], np.clip(expected, -1, 1), rtol=1e-6)


def test_demonstrated_actions_come_back_from_their_bins(directory: Path) -> None:
    policy = load(directory)
    action = policy.actions.action(some_tokens(policy, 4))
    inside = policy.tokens_of(action)
    np.testing.assert_allclose(policy.actions.action(inside), action, atol=1e-6)
    assert inside.dtype == np.int32
    stats = statistics()["action"]
    lowest = policy.tokens_of(np.array(stats["q01"], np.float32)[None, None])
    assert (lowest[..., :6] <= 1).all()
    assert (policy.tokens_of(np.full((1, 1, 7), 5.0)) == 255).all()
    assert (policy.tokens_of(np.full((1, 1, 7), -5.0)) == 0).all()


def test_the_gripper_of_libero(directory: Path) -> None:
    policy = load(directory, libero_gripper=True)
    block = np.full((1, 2, 7), 128)
    block[0, :, -1] = [250, 130]  # 0.96 is open, 0.02 is closed
    action = policy.actions.action(block)
    np.testing.assert_array_equal(action[0, :, -1], [-1.0, 1.0])
    again = policy.actions.action(policy.tokens_of(action))
    np.testing.assert_array_equal(again[0, :, -1], [-1.0, 1.0])
    assert load(directory).actions.action(block)[0, 0, -1] == pytest.approx(0.9647, abs=1e-3)


def test_each_data_set_has_its_own_scale(directory: Path) -> None:
    block = np.full((1, 1, 7), 30)
    wide, narrow = (load(directory, unnorm_key=key).actions.action(block) for key in (KEY, "bridge_orig"))
    np.testing.assert_allclose(narrow[..., :6], 0.5 * wide[..., :6], rtol=1e-5)
    assert load(directory, unnorm_key="libero_spatial").config.unnorm_key == KEY


def with_bounds(directory: Path, copy: Path, *, percentiles: bool) -> Path:
    """A copy of the checkpoint whose statistics have lowest and highest numbers, with or without percentiles."""
    shutil.copytree(directory, copy)
    stats = statistics()
    stats["action"] |= {"min": [-0.2] * 7, "max": [0.6] * 7}
    stats["proprio"] |= {"min": [-2.0, 0.0, 0.0, 0.0, 0.0], "max": [2.0, 4.0, 1.0, 1.0, 0.0]}
    if not percentiles:
        for part in ("action", "proprio"):
            del stats[part]["q01"], stats[part]["q99"]
    (copy / "dataset_statistics.json").write_text(json.dumps({KEY: stats}))
    return copy


@pytest.mark.parametrize(
    ("percentiles", "normalization", "by_bounds"),
    [(True, None, False), (True, "bounds_q99", False), (True, "bounds", True), (False, None, True)],
)
def test_the_statistics_or_the_option_say_what_scales(
    directory: Path, tmp_path: Path, percentiles: bool, normalization: Any, by_bounds: bool
) -> None:
    """By hand: bins 0, 127 and 255 have the centres -254/255, 0 and 254/255; lowest -0.2 and highest 0.6 make that
    0.2 - 0.4 * 254/255, 0.2 and 0.2 + 0.4 * 254/255. The first number's percentiles are -0.1 and 0.1."""
    copy = with_bounds(directory, tmp_path / "copy", percentiles=percentiles)
    policy = load(copy, normalization=normalization, use_proprio=("hand", "grip"))
    block = np.full((1, 8, 7), 127)
    block[0, :3, 0] = [0, 127, 255]
    found = policy.actions.action(block)[0, :3, 0]
    by_hand = [-0.1984313725, 0.2, 0.5984313725] if by_bounds else [-0.0996078431, 0.0, 0.0996078431]
    np.testing.assert_allclose(found, by_hand, atol=1e-7)
    np.testing.assert_array_equal(policy.tokens_of(policy.actions.action(block))[0, :3, 0], [0, 127, 254])
    assert policy.actions.action(block)[0, 0, -1] == pytest.approx(0.0, abs=1e-7)  # the mask leaves the gripper alone
    observation = observations(1)
    observation["hand"] = np.array([[0.5, 1.0, 3.0]], np.float32)
    observation["grip"] = np.array([[0.25, 0.0]], np.float32)
    given = policy.tensors(observation, instructions(1))["proprio"].numpy()
    np.testing.assert_allclose(given, [[0.25, -0.5, 1, -0.5, -1]] if by_bounds else [[0.5, 0.5, 0.5, 0, 0]], atol=1e-6)


# ---- keeping


@pytest.mark.parametrize("case", ["two cameras, proprioception, value", "autoregressive"])
def test_a_saved_policy_acts_the_same(directory: Path, tmp_path: Path, case: str) -> None:
    policy = with_random_value_head(load(directory, **CASES[case]))
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight += 0.01
    policy.save(tmp_path / "saved")
    again = load(tmp_path / "saved", **CASES[case])
    assert_same(policy, again)
    assert_same(policy, OpenVLAPolicy.load(tmp_path / "saved", SPEC, policy.config))
    names = {file.name for file in (tmp_path / "saved").iterdir()}
    assert names >= {
        "config.json",
        "tokenizer.json",
        "dataset_statistics.json",
        "model.safetensors",
        "value_head.safetensors",
    }
    assert not list(tmp_path.glob("*.new"))


def test_a_saved_checkpoint_is_whole(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others find all the weights they know, the ones that are not used here too; large ones in shards."""
    monkeypatch.setattr("understudy.policies.openvla.loading.SHARD_BYTES", 100_000)
    load(directory).save(tmp_path / "saved")
    files = sorted((tmp_path / "saved").glob("model-*.safetensors"))
    assert len(files) > 2
    before, after = (
        {name: weight for file in place.glob("model-*.safetensors") for name, weight in load_file(file).items()}
        for place in (directory, tmp_path / "saved")
    )
    assert before.keys() == after.keys()
    for name, weight in before.items():
        assert torch.equal(weight, after[name]), name
    assert_same(load(directory), load(tmp_path / "saved"))


def test_save_writes_over_nothing(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    load(directory).save(tmp_path / "there")
    with pytest.raises(PolicyError, match="expected a new or empty directory, got files in it"):
        load(directory).save(tmp_path / "there")


def test_parameters_are_what_is_trained_and_all_else_is_shared(directory: Path) -> None:
    policy = load(directory, value_head=True)
    for name, weight in policy.model.named_parameters():
        weight.requires_grad_(name.startswith(("projector.", "value_head.")))
    published = policy.parameters()
    assert {name.partition(".")[0] for name in published} == {"projector", "value_head"}
    assert all(array.dtype == np.float32 for array in published.values())
    before = log_prob(policy, observations(3), some_tokens(policy))
    newer = policy.with_parameters({name: array + 0.05 for name, array in published.items()}, version=4)
    assert newer.version == 4
    assert not np.allclose(log_prob(newer, observations(3), some_tokens(policy)), before, atol=1e-3)
    np.testing.assert_array_equal(log_prob(policy, observations(3), some_tokens(policy)), before)
    shared = newer.model.language_model.lm_head.weight
    assert shared.data_ptr() == policy.model.language_model.lm_head.weight.data_ptr()
    with pytest.raises(PolicyError, match=r"projector\.fc1\.bias: expected \[320\], got \[3\]"):
        policy.with_parameters({**published, "projector.fc1.bias": np.zeros(3)}, version=5)
    with pytest.raises(PolicyError, match="other: expected no such weight"):
        policy.with_parameters({**published, "other": np.zeros(3)}, version=5)
    gc.collect()


def assert_same(policy: OpenVLAPolicy, other: OpenVLAPolicy) -> None:
    mine, theirs = (
        one.act(observations(4), instructions(4), rngs=rngs(4), sampling=Sampling()) for one in (policy, other)
    )
    np.testing.assert_array_equal(mine.replay["tokens"], theirs.replay["tokens"])
    np.testing.assert_array_equal(mine.log_prob, theirs.log_prob)
    if mine.value is not None:
        np.testing.assert_array_equal(mine.value, theirs.value)


def test_the_code_of_the_page_runs(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "openvla-oft-libero").symlink_to(directory)
    assert run_page(PAGE) == 1
    assert capsys.readouterr().out.splitlines() == ["(2, 8, 7) (2, 8, 7)", "True", "True"]


@pytest.mark.parametrize("config", [OpenVLAConfig, LoraConfig, PolicyFactory, Limits])
def test_the_page_lists_every_option(config: type) -> None:
    rows = [row.split("|")[1] for row in PAGE.read_text().splitlines() if row.startswith("| `")]
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {field.name for field in fields(config)} - listed == set()


def test_a_config_survives_json() -> None:
    for options in CASES.values():
        config = OpenVLAConfig(**options)
        assert OpenVLAConfig.from_json(config.to_json()) == config
