"""The two transformers of a small VLA compute what transformers' own classes compute from the same weights."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from understudy.policies.vla.transformer import TextTransformer, VisionTransformer, rotate, rotation_of


def make_vision() -> VisionTransformer:
    torch.manual_seed(0)
    return VisionTransformer(image_size=32, patch=8, width=24, layers=2, heads=4, mlp_width=48)


def make_text() -> TextTransformer:
    torch.manual_seed(1)
    return TextTransformer(num_words=30, num_tokens=12, width=32, layers=2, heads=4, mlp_width=64)


def text_inputs() -> tuple[Tensor, Tensor]:
    """Tokens 8 to 12 see everything, the others what comes before; the second row does not see token 3."""
    mask = torch.ones(2, 1, 12, 12, dtype=torch.bool).tril()
    mask[..., 8:, :] = True
    mask[1, ..., 3] = False
    return torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(2)), mask


def with_new_weights(module: nn.Module) -> nn.Module:
    """Every weight is random, also those of norms and biases, which begin as ones and zeros."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn_like(weight) * 0.3)
    return module


def gradients(output: Tensor, module: nn.Module) -> dict[str, Tensor]:
    (output * torch.linspace(-1, 1, output.shape[-1])).sum().backward()
    return {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}


def test_vision_is_siglip() -> None:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    options = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    theirs = SiglipVisionModel(SiglipVisionConfig(**options, image_size=32, patch_size=8, vision_use_head=False))
    with_new_weights(theirs)
    ours = make_vision()
    ours.load_state_dict(theirs.state_dict())
    pixels = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    one, two = ours(pixels), theirs(pixel_values=pixels).last_hidden_state
    torch.testing.assert_close(one, two)
    torch.testing.assert_close(gradients(one, ours), gradients(two, theirs))


def test_text_is_llama() -> None:
    from transformers import LlamaConfig, LlamaModel

    options = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    theirs = LlamaModel(LlamaConfig(**options, vocab_size=30, num_key_value_heads=4, use_cache=False))
    with_new_weights(theirs)
    ours = make_text()
    ours.load_state_dict(theirs.state_dict())
    hidden, mask = text_inputs()
    one, two = ours(hidden, mask), theirs(inputs_embeds=hidden, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients(one, ours), gradients(two, theirs), rtol=1e-4, atol=1e-4)


def test_a_rotation_by_hand() -> None:
    """Head size 2: the pair turns by one radian a position."""
    turned = rotate(torch.tensor([1.0, 0.0]).expand(1, 1, 3, 2), rotation_of(3, 2))
    expected = torch.tensor([[1.0, 0.0], [0.5403023, 0.8414710], [-0.4161468, 0.9092974]])
    torch.testing.assert_close(turned[0, 0], expected)


def test_what_a_token_must_not_see_changes_nothing() -> None:
    text = make_text()
    hidden, mask = text_inputs()
    other = hidden.clone()
    other[1, 3] += 1.0  # the row that does not see token 3
    one, two = text(hidden, mask), text(other, mask)
    assert torch.equal(one[1, 4:], two[1, 4:])
    assert not torch.equal(one[1, 3], two[1, 3])
    assert torch.equal(one[0], two[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_another_format_compute_in_it(dtype: torch.dtype) -> None:
    """As FSDP's mixed precision casts them; the angles stay float32."""
    text = make_text().to(dtype)
    hidden, mask = text_inputs()
    text.rotation = rotation_of(12, 8)
    assert text(hidden.to(dtype), mask).dtype == dtype
    assert make_vision().to(dtype)(torch.zeros(1, 3, 32, 32)).dtype == dtype  # images are float32


def test_new_weights_have_the_spread_of_the_originals() -> None:
    torch.manual_seed(4)
    vision = VisionTransformer(image_size=64, patch=8, width=96, layers=1, heads=4, mlp_width=192)
    text = TextTransformer(num_words=300, num_tokens=4, width=96, layers=1, heads=4, mlp_width=192)
    weights = dict(vision.named_parameters()) | dict(text.named_parameters())
    wanted = {
        "embeddings.patch_embedding.weight": 192**-0.5,  # LeCun
        "embeddings.position_embedding.weight": 96**-0.5,
        "encoder.layers.0.self_attn.q_proj.weight": (2 / 192) ** 0.5,  # Xavier
        "encoder.layers.0.mlp.fc1.weight": (2 / 288) ** 0.5,
        "embed_tokens.weight": 0.02,
        "layers.0.self_attn.q_proj.weight": 0.02,
        "layers.0.mlp.down_proj.weight": 0.02,
    }
    for name, std in wanted.items():
        assert weights[name].std().item() == pytest.approx(std, rel=0.05), name


def test_a_small_vla_is_used_without_transformers() -> None:
    code = "import sys; import understudy.policies.vla.policy; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
