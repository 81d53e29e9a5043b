"""The image encoders: each kind gives features, learns, is published and saved; a frozen one is held by its digest."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.algorithms.batches import CAMERAS, random_batch, random_tree, same_tree, small_sac

from understudy.algorithms import SAC, AlgorithmError
from understudy.core import ArraySpec, Spec, StepSpec
from understudy.core import tree as trees
from understudy.policies import ActorConfig, ActorPolicy, EncoderConfig, Inputs, PolicyError, Stats
from understudy.policies.encoders.image_encoder import IMAGE_ENCODERS
from understudy.policies.encoders.observation_encoder import ObservationEncoder

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny vision encoders of transformers with random weights."""
    transformers = pytest.importorskip("transformers")
    size: dict[str, Any] = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "image_size": 16,
        "patch_size": 8,
    }
    text = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    models = {
        "vit": transformers.ViTModel(transformers.ViTConfig(**size)),
        "dinov2": transformers.Dinov2Model(transformers.Dinov2Config(**size)),
        "siglip": transformers.SiglipModel(transformers.SiglipConfig(vision_config=size, text_config=text)),
        "resnet": transformers.ResNetModel(
            transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
        ),
    }
    root = tmp_path_factory.mktemp("checkpoints")
    for name, model in models.items():
        model.save_pretrained(root / name)
    means = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
    (root / "dinov2" / "preprocessor_config.json").write_text(json.dumps(means))
    return {name: root / name for name in models}


def config_of(kind: str, checkpoints: dict[str, Path]) -> EncoderConfig:
    if kind in ("small", "resnet10"):
        return EncoderConfig(kind=kind, latent=6)  # type: ignore[arg-type]
    name, _, mode = kind.partition(" ")
    return EncoderConfig(
        kind="pretrained", pretrained=str(checkpoints[name]), frozen=mode == "frozen", latent=6, spatial_features=2
    )


def sac_of(encoder: EncoderConfig, seed: int = 0) -> SAC:
    return small_sac(CAMERAS, seed=seed, actor=ActorConfig(encoder=encoder, hidden=(16, 16)), shift_pixels=1)


KINDS = ["small", "resnet10", "vit frozen", "dinov2 frozen", "siglip frozen", "siglip trained", "vit trained"]


def test_every_kind_is_in_the_registry() -> None:
    assert set(IMAGE_ENCODERS) == {"small", "resnet10", "pretrained"}
    with pytest.raises(PolicyError, match="kind: expected 'small', 'resnet10' or 'pretrained', got 'vgg'"):
        EncoderConfig(kind="vgg")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [*KINDS, "resnet frozen"])
def test_features_are_finite_and_depend_on_each_camera(kind: str, checkpoints: dict[str, Path]) -> None:
    stats = Stats.none(Inputs(CAMERAS.observation))
    encoder = ObservationEncoder(config_of(kind, checkpoints), CAMERAS.observation, stats, CPU)
    encoder.init_parameters(torch.Generator().manual_seed(0))
    observation = random_tree(CAMERAS.observation, 3, np.random.default_rng(0))
    features = encoder(encoder.inputs.tensors(observation, CPU)).detach()
    assert features.shape == (3, encoder.size) == (3, 6 + 6 + 5)
    assert features.isfinite().all()
    for number, camera in enumerate(("front", "wrist")):
        other = {**observation, camera: 255 - observation[camera]}
        changed = (encoder(encoder.inputs.tensors(other, CPU)).detach() != features).view(3, -1)[:, :12]
        assert changed[:, 6 * number : 6 * number + 6].any()
        assert not changed[:, 6 - 6 * number : 12 - 6 * number].any()


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_resumes_and_is_published(kind: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    encoder = config_of(kind, checkpoints)
    first = sac_of(encoder)
    before = first.parameters()
    first.update(random_batch(CAMERAS, size=4, seed=0))
    state = first.state()
    metrics = first.update(random_batch(CAMERAS, size=4, seed=1))
    second = sac_of(encoder, seed=1)
    second.restore(state)
    assert second.update(random_batch(CAMERAS, size=4, seed=1)) == metrics
    assert same_tree(first.parameters(), second.parameters())
    changed = [
        name
        for (name, old), (_, new) in zip(trees.leaves(before), trees.leaves(first.parameters()), strict=True)
        if not np.array_equal(old, new)
    ]
    assert any(name.startswith("weights/encoder/front/") for name in changed)
    assert any(name.startswith("weights/encoder/backbone/") for name in changed) == kind.endswith("trained")
    policy = first.policy(version=3)
    policy.save(tmp_path / "it.safetensors")
    loaded = ActorPolicy.load(tmp_path / "it.safetensors", CAMERAS)
    observation = random_tree(CAMERAS.observation, 3, np.random.default_rng(0))
    acted, again = (one.act(observation, rng=np.random.default_rng(1)) for one in (policy, loaded))
    assert np.array_equal(acted.action, again.action)


def test_a_frozen_encoder_is_published_as_a_digest_and_loaded_once(checkpoints: dict[str, Path]) -> None:
    sac = sac_of(config_of("siglip frozen", checkpoints))
    names = [name for name, _ in trees.leaves(sac.parameters()["weights"])]
    assert [name for name in names if "encoder" in name] == [
        f"encoder/{camera}/{part}" for camera in ("front", "wrist") for part in ("maps", "latent/weight", "latent/bias")
    ]
    digest = sac.description()["encoder_digest"]
    assert len(digest) == 64
    assert sac.state()["encoder_digest"] == digest
    assert not any("backbone" in name for name in sac.state())
    images, other = sac.actor.encoder.images, sac.policy().actor.encoder.images
    assert images is not None
    assert other is not None
    assert images._shared[0] is other._shared[0]  # type: ignore[index]


def test_another_frozen_encoder_is_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(checkpoints["vit"], tmp_path / "encoder")
    encoder = EncoderConfig(kind="pretrained", pretrained=str(tmp_path / "encoder"), latent=6)
    sac = sac_of(encoder)
    sac.policy().save(tmp_path / "it.safetensors")
    state = sac.state()
    from safetensors.torch import load_file, save_file

    path = tmp_path / "encoder" / "model.safetensors"
    weights = load_file(path)
    save_file({name: weight + 0.1 for name, weight in weights.items()}, path, {"format": "pt"})
    with pytest.raises(PolicyError, match=r"the policy was trained with a frozen encoder of digest .*copy the same"):
        ActorPolicy.load(tmp_path / "it.safetensors")
    other = sac_of(encoder)
    before = other.state()
    with pytest.raises(AlgorithmError, match="encoder_digest: the state was saved with the frozen encoder"):
        other.restore(state)
    assert all(np.array_equal(value, before[name]) for name, value in other.state().items())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "pretrained"}, "pretrained: the kind 'pretrained' needs a directory, got none"),
        ({"pretrained": "x"}, "pretrained: has no effect on the kind 'small'; leave it out, or set kind to"),
        ({"kind": "resnet10", "frozen": False}, "frozen: has no effect on the kind 'resnet10'"),
        ({"kind": "resnet10", "filters": (4,)}, "filters: has no effect on the kind 'resnet10'"),
        ({"spatial_features": 3}, "spatial_features: has no effect on the kind 'small'"),
        ({"kind": "resnet10", "spatial_features": 0}, "spatial_features: expected a positive number, got 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        EncoderConfig(**options)


def test_a_directory_without_a_checkpoint_is_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"expected a directory with config.json and safetensors, got .*nowhere"):
        sac_of(EncoderConfig(kind="pretrained", pretrained=str(tmp_path / "nowhere")))
    shutil.copytree(checkpoints["vit"], tmp_path / "odd")
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "nobody_knows"}')
    with pytest.raises(PolicyError, match="odd: expected a checkpoint of a vision encoder, got"):
        sac_of(EncoderConfig(kind="pretrained", pretrained=str(tmp_path / "odd")))
    (tmp_path / "dinov2").symlink_to(checkpoints["dinov2"])
    depth = Spec({"depth": ArraySpec(shape=(16, 16, 2), dtype="uint8")})
    spec = StepSpec(observation=depth, action=CAMERAS.action)
    with pytest.raises(PolicyError, match="observation/depth: expected 1 or 3 channels for a pretrained encoder"):
        small_sac(spec, actor=ActorConfig(encoder=config_of("dinov2 frozen", checkpoints), hidden=(4,)))


def test_without_transformers_the_error_says_what_to_install(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(checkpoints["vit"], tmp_path / "vit")  # at another path: nothing is loaded yet
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        PolicyError, match=r"encoder/pretrained: needs transformers .*pip install 'understudy-robotics\[vla\]'"
    ):
        sac_of(EncoderConfig(kind="pretrained", pretrained=str(tmp_path / "vit")))


def test_resnet10_has_the_shapes_of_hil_serl() -> None:
    spec = Spec({"front": ArraySpec(shape=(128, 128, 3), dtype="uint8")})
    config = EncoderConfig(kind="resnet10", latent=256)
    encoder = ObservationEncoder(config, spec, Stats.none(Inputs(spec)), CPU)
    shapes = {name.removeprefix("images.cameras.0."): list(w.shape) for name, w in encoder.named_parameters()}
    assert shapes["conv.weight"] == [64, 3, 7, 7]
    assert shapes["blocks.3.conv_1.weight"] == [512, 512, 3, 3]
    assert shapes["head.maps"] == [512, 16, 8]  # 4 x 4 positions are left of 128 x 128 pixels
    assert shapes["head.latent.weight"] == [256, 4096]
