"""LoRA by peft, with peft's files: small trainable matrices are added to the frozen ones of a network.

    add_lora(policy.model, LoraConfig(rank=32))            # before an engine wraps or shards the model
    save_adapter(policy.model, "adapter")                  # adapter_config.json, adapter_model.safetensors
    load_adapter(policy.model, "adapter")                  # into a model with or without one
    merged_state(policy.model)                             # plain weights under their plain names

The layers are changed in place: the model keeps its class, its `forward` and the names of all other weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from understudy.core.suggestion import did_you_mean
from understudy.policies import policy_file
from understudy.policies.config import LoraConfig
from understudy.policies.protocol import PolicyError

ADAPTER = "default"  # peft's name for the only one
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."
WHOLE_HEADS = ("value_head", "value", "scale_head", "noise")  # small heads that are new, and therefore trained whole
_HEADS = ("lm_head", *WHOLE_HEADS)  # linear layers that `all-linear` leaves alone


def add_lora(module: nn.Module, config: LoraConfig, *, seed: int = 0, keep: tuple[str, ...] = WHOLE_HEADS) -> None:
    """Give the module an adapter that changes nothing yet; it and the parts named in `keep` are all that trains."""
    peft = _peft()
    if has_lora(module):
        raise PolicyError("add_lora: the module has an adapter already; make one from its plain checkpoint")
    chosen = _targets(module, config.targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(
            peft.LoraConfig(
                r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, target_modules=chosen, bias="none"
            ),
            module,
            adapter_name=ADAPTER,
        )
    _freeze(module, keep)


def has_lora(module: nn.Module) -> bool:
    return any("lora_A" in name.split(".") for name, _ in module.named_modules())


@contextmanager
def adapter_off(module: nn.Module) -> Iterator[None]:
    """Within, the module computes as if it had no adapter. Whether weights require gradients does not change."""
    layers: list[Any] = [layer for layer in module.modules() if hasattr(layer, "lora_A")]
    for layer in layers:
        layer._disable_adapters = True  # peft's own method also changes what requires gradients
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def trained_whole(module: nn.Module) -> list[nn.Parameter]:
    """What is trained beside the adapter."""
    return [value for name, value in module.named_parameters() if value.requires_grad and not _is_adapter(name)]


def adapter_state(module: nn.Module, weights: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The adapter's weights by peft's names; `weights` are the module's, where it does not hold them whole."""
    state = module.state_dict() if weights is None else weights
    found = {
        _PEFT_PREFIX + name.replace(f".{ADAPTER}.", "."): weight.detach().cpu().contiguous()
        for name, weight in state.items()
        if _is_adapter(name)
    }
    if not found:
        raise PolicyError("adapter: the module has none; call add_lora first")
    return found


def save_adapter(module: nn.Module, directory: str | Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write the adapter in peft's format, so that peft and tools built on it can load it.

    After a crash there is the old adapter or the new one, whole; or none, if their configs differ.
    """
    state = adapter_state(module, weights)
    config = _peft_config(module)
    fields = {**config.to_dict(), "inference_mode": True}
    fields["target_modules"] = sorted(fields["target_modules"])
    text = json.dumps(fields, indent=2, sort_keys=True, default=str).encode() + b"\n"
    described, weighed = Path(directory, CONFIG_FILE), Path(directory, WEIGHTS_FILE)
    described.parent.mkdir(parents=True, exist_ok=True)
    if not described.is_file() or described.read_bytes() != text:
        weighed.unlink(missing_ok=True)  # else the new config would describe the old weights
        policy_file.replace(described, text)
    policy_file.replace(weighed, to_bytes(state, metadata={"format": "pt"}))


def load_adapter(module: nn.Module, directory: str | Path, *, keep: tuple[str, ...] = WHOLE_HEADS) -> None:
    """Fill the module's adapter from peft's files; a module without one gets it first."""
    peft = _peft()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not Path(directory, name).is_file():
            raise PolicyError(f"{Path(directory, name)}: expected a file of an adapter, got nothing; check the path")
    try:
        config = peft.LoraConfig.from_pretrained(str(directory))
        state = load_file(Path(directory, WEIGHTS_FILE))
    except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
        raise PolicyError(f"{directory}: expected an adapter of peft, got {error}; copy it again") from error
    if config.peft_type != "LORA" or config.use_dora or config.bias != "none" or config.modules_to_save:
        raise PolicyError(f"{directory}: expected plain LoRA, got another kind of adapter; it is not supported")
    if not has_lora(module):
        config.inference_mode = False
        peft.inject_adapter_in_model(config, module, adapter_name=ADAPTER)
        _freeze(module, keep)
    mine, own = (
        _peft_config(module),
        {name: weight for name, weight in module.state_dict().items() if _is_adapter(name)},
    )
    if (mine.r, mine.lora_alpha) != (config.r, config.lora_alpha):
        raise PolicyError(
            f"{directory}: expected rank {mine.r} and alpha {mine.lora_alpha}, got {config.r} and {config.lora_alpha}; "
            f"load it into a module without an adapter"
        )
    given = {_own_name(name): weight for name, weight in state.items()}
    for name in sorted(own.keys() | given.keys()):
        if name not in own or name not in given or own[name].shape != given[name].shape:
            raise PolicyError(
                f"{directory}: {name}: expected {_size(own.get(name))}, got {_size(given.get(name))}; "
                f"it is an adapter of another network"
            )
    module.load_state_dict(given, strict=False)


def merged_state(module: nn.Module, weights: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The state with the adapter merged into the weights, under the names they have without an adapter.

    The module stays as it is. In float32 the logits are those of the module to about 1e-5 of their size.
    """
    state = module.state_dict() if weights is None else weights
    scaling = {name: layer.scaling[ADAPTER] for name, layer in module.named_modules() if hasattr(layer, "lora_A")}
    merged: dict[str, Tensor] = {}
    for name, weight in state.items():
        if _is_adapter(name):
            continue
        layer, inside, rest = name.partition(".base_layer.")
        if not inside:
            merged[name] = weight
            continue
        if rest == "weight":
            a, b = (state[f"{layer}.lora_{x}.{ADAPTER}.weight"].float() for x in "AB")
            weight = (weight.float() + (b @ a) * scaling[layer]).to(weight.dtype)
        merged[f"{layer}.{rest}"] = weight
    return merged


def _targets(module: nn.Module, targets: str | tuple[str, ...]) -> list[str]:
    """The whole names of the layers."""
    linears = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    if isinstance(targets, str):
        return [name for name in linears if not set(name.split(".")) & set(_HEADS)]
    chosen = [name for name in linears if any(name == target or name.endswith(f".{target}") for target in targets)]
    last = sorted({name.rpartition(".")[2] for name in linears})
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in chosen):
            advice = did_you_mean(target, [*last, *linears], f"there are {', '.join(last)}")
            raise PolicyError(f"targets: the module has no linear layer {target!r}; {advice}")
    return chosen


def _freeze(module: nn.Module, keep: tuple[str, ...]) -> None:
    """What is trained is float32, also over a base of bfloat16, in which an update of a learning rate such as 5e-6
    rounds to nothing."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(_is_adapter(name) or bool(set(name.split(".")) & set(keep)))
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _own_name(name: str) -> str:
    """What peft calls a weight, as it is called in the module."""
    return name.removeprefix(_PEFT_PREFIX).removesuffix(".weight") + f".{ADAPTER}.weight"


def _size(weight: Tensor | None) -> str:
    return "nothing" if weight is None else str(list(weight.shape))


def _peft_config(module: nn.Module) -> Any:
    found: Any = getattr(module, "peft_config", None)
    if not isinstance(found, dict) or ADAPTER not in found:
        raise PolicyError("adapter: the module has none; call add_lora first")
    return found[ADAPTER]


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise PolicyError(f"LoRA needs peft ({error}); run: pip install 'understudy-robotics[vla]'") from error
    return peft
