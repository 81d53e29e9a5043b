"""Small random policies of lerobot, made by lerobot's own classes; runs in an interpreter that has lerobot.

python make_policies.py OUT KIND...

They fit the toy world. ACT, diffusion policy and SmolVLA come from their configs alone; the vision-language model
of SmolVLA is a small one of transformers, in OUT/vlm. The sizes of pi0 and pi0.5 are written into lerobot's code, so
`small_pi` replaces them.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

SIDE, STATE, ACTION, CHUNK = 64, 20, 4, 6
CAMERAS = ("front", "wrist")
PALIGEMMA = "google/paligemma-3b-pt-224"  # the name of pi0's tokenizer in lerobot


def features() -> dict[str, Any]:
    from lerobot.configs.types import FeatureType, PolicyFeature

    image = PolicyFeature(type=FeatureType.VISUAL, shape=(3, SIDE, SIDE))
    return {
        "input_features": {
            **{f"observation.images.{camera}": image for camera in CAMERAS},
            "observation.state": PolicyFeature(type=FeatureType.STATE, shape=(STATE,)),
        },
        "output_features": {"action": PolicyFeature(type=FeatureType.ACTION, shape=(ACTION,))},
    }


def statistics() -> dict[str, dict[str, torch.Tensor]]:
    """Those of a data set, with another scale for each number."""

    def of(scale: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            "mean": 0.1 * scale,
            "std": scale,
            "min": -scale,
            "max": 2 * scale,
            "q01": -0.9 * scale,
            "q99": 1.9 * scale,
        }

    return {
        **{f"observation.images.{camera}": of(torch.full((3, 1, 1), 0.5)) for camera in CAMERAS},
        "observation.state": of(torch.linspace(0.5, 2.0, STATE)),
        "action": of(torch.linspace(0.5, 2.0, ACTION)),
    }


def make_tokenizer(directory: Path) -> None:
    """One token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<s>", "</s>", "<unk>", "<image>", "<fake_token_around_image>", "<global-img>"]
    special += ["<end_of_utterance>"]
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate([*special, *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
    ).save_pretrained(directory)


def make_vlm(directory: Path) -> None:
    """The config and the processor of a small SmolVLM."""
    from transformers import AutoTokenizer, SmolVLMConfig, SmolVLMImageProcessor, SmolVLMProcessor
    from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

    make_tokenizer(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": len(tokenizer),
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": 16,
    }
    SmolVLMConfig(text_config=text, vision_config=vision, scale_factor=2).save_pretrained(directory)
    SmolVLMProcessor(SmolVLMImageProcessor(), tokenizer, SmolVLMVideoProcessor()).save_pretrained(directory)


def small_pi() -> None:
    """Replace the sizes of PaliGemma and of the action expert, which lerobot has no option for."""
    from lerobot.policies.pi0 import modeling_pi0
    from lerobot.policies.pi05 import modeling_pi05

    for module in (modeling_pi0, modeling_pi05):
        vlm, expert = module.PaliGemmaForConditionalGenerationWithPiGemma, module.PiGemmaForCausalLM
        size = module.GemmaConfig(width=32, depth=2, mlp_dim=64, num_heads=2, num_kv_heads=1, head_dim=16)

        def small_vlm(config: Any, vlm: Any = vlm) -> Any:
            config.text_config.vocab_size = 300
            small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
            for name, value in {**small, "projection_dim": 32}.items():
                setattr(config.vision_config, name, value)
            return vlm(config=config)

        def small_expert(config: Any, expert: Any = expert) -> Any:
            config.vocab_size = 300
            return expert(config=config)

        module.get_gemma_config = lambda variant, size=size: size
        module.PaliGemmaForConditionalGenerationWithPiGemma = small_vlm
        module.PiGemmaForCausalLM = small_expert


def config_of(kind: str, vlm: Path) -> Any:
    given: dict[str, Any] = {**features(), "device": "cpu"}
    if kind == "act":
        from lerobot.policies.act.configuration_act import ACTConfig

        small = {"dim_model": 32, "n_heads": 2, "dim_feedforward": 64, "n_encoder_layers": 1, "n_vae_encoder_layers": 1}
        return ACTConfig(
            **given, **small, chunk_size=CHUNK, n_action_steps=4, latent_dim=8, pretrained_backbone_weights=None
        )
    if kind.startswith("diffusion"):
        from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig

        return DiffusionConfig(
            **given,
            noise_scheduler_type="DDIM" if kind == "diffusion_ddim" else "DDPM",
            horizon=8,
            n_obs_steps=2,
            n_action_steps=4,
            down_dims=(32, 64),
            n_groups=4,
            diffusion_step_embed_dim=16,
            spatial_softmax_num_keypoints=4,
            num_inference_steps=3,
            pretrained_backbone_weights=None,
        )
    sizes: dict[str, Any] = {"chunk_size": CHUNK, "n_action_steps": 4, "max_state_dim": 24, "max_action_dim": 5}
    if kind == "smolvla":
        from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig

        sizes |= {"vlm_model_name": str(vlm), "load_vlm_weights": False, "resize_imgs_with_padding": (SIDE, SIDE)}
        return SmolVLAConfig(**given, **sizes, num_steps=3, num_vlm_layers=2)
    if kind == "pi0":
        from lerobot.policies.pi0.configuration_pi0 import PI0Config

        return PI0Config(**given, **sizes, num_inference_steps=3)
    from lerobot.policies.pi05.configuration_pi05 import PI05Config

    return PI05Config(**given, **sizes, num_inference_steps=3)


def make(kind: str, out: Path) -> None:
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors

    config = config_of(kind, out / "vlm")
    torch.manual_seed(0)
    policy = get_policy_class(config.type)(config)
    processors = make_pre_post_processors(config, dataset_stats=statistics())
    for part in (policy, *processors):
        part.save_pretrained(out / kind)
    if kind == "smolvla":
        for part in (adapted(policy, out / kind), config, *processors):
            part.save_pretrained(out / "smolvla_lora")


def adapted(policy: Any, path: Path) -> Any:
    """A policy with a random LoRA adapter, as lerobot's training makes one."""
    from lerobot.configs.default import PeftConfig

    policy.config.pretrained_path = path
    found = policy.wrap_with_peft(peft_cli_overrides=asdict(PeftConfig(r=4)))
    for name, weight in found.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    return found


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    make_vlm(out / "vlm")
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained
    AutoTokenizer.from_pretrained = lambda name, **options: found(out / "vlm" if name == PALIGEMMA else name, **options)
    small_pi()
    for kind in sys.argv[2:]:
        make(kind, out)
        print(kind, flush=True)


if __name__ == "__main__":
    main()
