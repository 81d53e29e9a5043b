"""What is wrong with a checkpoint, a world or a call is said in words."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers")

from tests.unit.policies.openvla.make_checkpoint import (
    KEY,
    SPEC,
    instructions,
    load,
    make_checkpoint,
    observations,
    rngs,
)

from understudy.core import ArraySpec, Spec, SpecError, StepSpec
from understudy.policies import PolicyError, Sampling
from understudy.policies.openvla import OpenVLAConfig, OpenVLAPolicy


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("openvla") / "checkpoint", proprio=True)


@pytest.fixture
def directory(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def edit(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def edit_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Into one file, as small checkpoints have it."""
    weights: dict[str, torch.Tensor] = {}
    for file in directory.glob("model-*.safetensors"):
        weights |= load_file(file)
        file.unlink()
    (directory / "model.safetensors.index.json").unlink()
    change(weights)
    save_file(weights, directory / "model.safetensors")


def test_an_unknown_data_set_lists_those_there_are(original: Path) -> None:
    with pytest.raises(
        PolicyError, match=r"no statistics of 'libero_spatal', it has bridge_orig, libero_.*; did you mean"
    ):
        load(original, unnorm_key="libero_spatal")
    with pytest.raises(PolicyError, match=f"unnorm_key: expected one of bridge_orig, {KEY}, got none"):
        load(original, unnorm_key=None)


def test_the_only_data_set_needs_no_name(directory: Path) -> None:
    edit(directory / "config.json", lambda config: config.pop("norm_stats"))
    assert load(directory, unnorm_key=None).config.unnorm_key == KEY


@pytest.mark.parametrize(
    "name", ["config.json", "preprocessor_config.json", "tokenizer.json", "model-00002-of-00002.safetensors"]
)
def test_a_missing_file_is_named(directory: Path, name: str) -> None:
    (directory / name).unlink()
    with pytest.raises(PolicyError, match=rf"{name}: .*fetch the"):
        load(directory)


def test_missing_weights_are_named(directory: Path) -> None:
    for file in directory.glob("model*"):
        file.unlink()
    with pytest.raises(
        PolicyError, match=r"expected model\.safetensors or model\.safetensors\.index\.json, got neither"
    ):
        load(directory)
    with pytest.raises(PolicyError, match="expected the directory of a checkpoint, got none; fetch it first"):
        load(directory / "nowhere")


def test_broken_files_are_named(original: Path, tmp_path: Path) -> None:
    for name, message in (
        ("config.json", "expected JSON"),
        ("tokenizer.json", "expected a tokenizer"),
        ("model-00001-of-00002.safetensors", "expected weights in safetensors"),
    ):
        directory = Path(shutil.copytree(original, tmp_path / name))
        (directory / name).write_bytes(b"\x00\xff half a file")
        with pytest.raises(PolicyError, match=f"{name}: {message}"):
            load(directory)


def test_weights_that_do_not_fit_are_named(original: Path, tmp_path: Path) -> None:
    name, second = "language_model.model.layers.1.mlp.up_proj.weight", "vision_backbone.fused_featurizer"
    for number, (change, message) in enumerate(
        (
            (lambda weights: weights.pop(name), rf"weights: {name}: expected \[48, 32\], got nothing"),
            (lambda weights: weights.update({name: torch.zeros(3, 3)}), rf"{name}: expected \[48, 32\], got \[3, 3\]"),
            (lambda weights: weights.update({"queries.weight": torch.zeros(3)}), "queries.weight: expected no such"),
            (lambda weights: weights.pop(f"{second}.pos_embed"), "fused_featurizer.pos_embed, got nothing"),
            (lambda weights: weights.pop(f"{second}.blocks.1.norm1.bias"), "blocks.1.norm1.bias: expected"),
        )
    ):
        directory = Path(shutil.copytree(original, tmp_path / str(number)))
        edit_weights(directory, change)
        with pytest.raises(PolicyError, match=message):
            load(directory)


def test_old_rotary_tables_in_the_files_are_left_alone(directory: Path) -> None:
    name = "language_model.model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(directory, lambda weights: weights.update({name: torch.zeros(8)}))
    load(directory)


def test_other_models_are_refused(original: Path, tmp_path: Path) -> None:
    for number, (file, change, message) in enumerate(
        (
            ("config.json", lambda x: x.update(model_type="llava"), "model_type: expected 'openvla', got 'llava'"),
            ("config.json", lambda x: x["text_config"].update(model_type="qwen2"), "expected model_type 'llama'"),
            (
                "config.json",
                lambda x: x.update(timm_model_ids=["vit_tiny", "vit_tiny"]),
                "timm_model_ids: expected one of",
            ),
            ("config.json", lambda x: x.update(timm_model_ids=["a"]), "timm_model_ids: expected 2"),
            (
                "preprocessor_config.json",
                lambda x: x.update(image_resize_strategy="letterbox"),
                "expected 'resize-naive'",
            ),
            ("preprocessor_config.json", lambda x: x.pop("means"), "expected how images are prepared, got KeyError"),
            (
                "dataset_statistics.json",
                lambda x: x[KEY]["action"].pop("q99"),
                "expected q01, q99 and perhaps mask, got KeyError",
            ),
            ("dataset_statistics.json", lambda x: x[KEY].pop("action"), f"norm_stats/{KEY}: expected action"),
        )
    ):
        directory = Path(shutil.copytree(original, tmp_path / str(number)))
        edit(directory / file, change)
        with pytest.raises(PolicyError, match=message):
            load(directory)


def test_no_code_of_a_checkpoint_is_run(directory: Path, tmp_path: Path) -> None:
    """Neither its modules, which would raise, nor a pickle in the projector's place."""
    load(directory)

    class Evil:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "was here"),))

    file = directory / "proprio_projector--150000_checkpoint.pt"
    torch.save({"fc1.weight": Evil()}, file)
    with pytest.raises(PolicyError, match="expected a dict of tensors"):
        load(directory, use_proprio=("hand", "grip"))
    assert not (tmp_path / "was here").exists()


def test_proprioception_that_is_not_there(directory: Path) -> None:
    with pytest.raises(PolicyError, match="use_proprio: expected fields with numbers, got 'feet'"):
        load(directory, use_proprio=("feet",))
    with pytest.raises(PolicyError, match="use_proprio: the checkpoint was trained on 5 numbers, hand are 3"):
        load(directory, use_proprio=("hand",))
    (directory / "proprio_projector--150000_checkpoint.pt").unlink()
    with pytest.raises(PolicyError, match=r"use_proprio: expected one file proprio_projector--\*\.pt, got none"):
        load(directory, use_proprio=("hand", "grip"))


def test_a_world_with_other_actions_is_refused(original: Path) -> None:
    for action, message in (
        (ArraySpec(shape=(4,), dtype="float32"), "the world takes 4 numbers, the checkpoint gives 7"),
        (ArraySpec(shape=(7,), dtype="int32"), "action: expected float numbers, got int32"),
    ):
        with pytest.raises(PolicyError, match=message):
            OpenVLAPolicy.load(
                original,
                StepSpec(observation=SPEC.observation, action=Spec(action)),
                unnorm_key=KEY,
                cameras=("image",),
            )


def test_options_that_make_no_sense() -> None:
    for options, message in (
        ({"block_steps": 0}, "block_steps: expected a number from 1"),
        ({"act_rows": 0}, "act_rows: expected a number from 1"),
        ({"decoding": "beam"}, "decoding: expected 'parallel' or 'autoregressive', got 'beam'"),
        ({"attention": "sparse"}, "attention: expected"),
        ({"dtype": "int8"}, "dtype: expected"),
        ({"resize": "letterbox"}, "resize: expected 'processor' or 'jpeg_lanczos', got 'letterbox'"),
        ({"normalization": "normal"}, "normalization: expected None or 'bounds_q99' or 'bounds', got 'normal'"),
        ({"decoding": "autoregressive"}, "goes with block_steps=1 and without use_proprio, got 8"),
        (
            {"decoding": "autoregressive", "block_steps": 1, "attention": "causal"},
            "attention: has no effect on decoding 'autoregressive', which is always causal",
        ),
        ({"cameras": ("a", "a")}, "cameras: expected different names"),
        ({"use_proprio": ()}, "use_proprio: expected names"),
        ({"l1_scale": 0.0}, "l1_scale: expected more than 0, got 0.0"),
    ):
        with pytest.raises(PolicyError, match=message):
            OpenVLAConfig(**options)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="temprature"):
        OpenVLAPolicy.load(".", SPEC, temprature=3)


def test_calls_that_make_no_sense(original: Path) -> None:
    policy = load(original)
    seen, said, draws = observations(2), instructions(2), rngs(2)
    with pytest.raises(PolicyError, match="rngs: expected 2 generators, one for each instruction, got 1"):
        policy.act(seen, said, rngs=draws[:1], sampling=Sampling())
    with pytest.raises(PolicyError, match="rngs: expected some generators"):
        policy.act(seen, [], rngs=[], sampling=Sampling())
    with pytest.raises(PolicyError, match="instruction: expected what the robot shall do, got ' '"):
        policy.act(seen, [" ", "b"], rngs=draws, sampling=Sampling())
    with pytest.raises(SpecError, match="observation/image: expected this field, got wrist"):
        policy.act({"wrist": seen["wrist"]}, said, rngs=draws, sampling=Sampling())
    with pytest.raises(SpecError, match=r"observation/image: expected uint8 \[1, H, W, 3\], got float32"):
        policy.act({"image": seen["image"].astype(np.float32)}, said, rngs=draws, sampling=Sampling())
    good = {"tokens": np.zeros((2, 8, 7), np.int32)}
    with pytest.raises(SpecError, match="observation/image: expected 2 rows, one for each instruction, got uint8"):
        policy.evaluate(observations(3), said, good, sampling=Sampling())
    with pytest.raises(PolicyError, match="replay/tokens: expected what act"):
        policy.evaluate(seen, said, {}, sampling=Sampling())
    with pytest.raises(PolicyError, match=r"replay/tokens: expected \[2, 8, 7\], got \[1, 8, 7\]"):
        policy.evaluate(seen, said, {"tokens": good["tokens"][:1]}, sampling=Sampling())
