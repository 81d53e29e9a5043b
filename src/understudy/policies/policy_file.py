"""Policy file: a network in one safetensors file with its weights, statistics, Specs and config. No pickle.

| in the file | |
|---|---|
| tensors `weights/...`, `stats/mean/observation/...`, `stats/std/observation/...` | float32 |
| metadata `understudy` | JSON: format, kind, version, config, observation; action of a policy; encoder_digest; check |

`check` is a checksum of everything else in the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as to_bytes
from torch import nn

from understudy.core import ArraySpec, Spec, StepSpec, Tree
from understudy.core import tree as trees
from understudy.core.spec import canonical_json
from understudy.durable import files
from understudy.policies.protocol import Array, PolicyError
from understudy.policies.stats import Stats

AnyPolicy = TypeVar("AnyPolicy")

KEY = "understudy"  # one text, so that equal networks are equal files
FORMAT = 1
SAME_WORLD = "use the world it was trained in"
MAX_HEADER_BYTES = 100_000_000  # that safetensors reads


def write(path: str | Path, description: Mapping[str, Any], tree: Tree) -> None:
    """Write a description and arrays as `replace` does."""
    arrays = {name: np.ascontiguousarray(leaf) for name, leaf in trees.leaves(tree)}
    content = {"format": FORMAT, **description}
    content["check"] = _digest(content, arrays)
    replace(Path(path), to_bytes(arrays, {KEY: canonical_json(content)}))


def replace(path: Path, content: bytes) -> None:
    """Write a file durably; a crash leaves the old one or the new one, whole."""
    try:
        files.write_durably(path, content)
    except OSError as error:
        raise PolicyError(
            f"{path}: writing failed: {error.strerror}; choose another directory and save again"
        ) from error


def kind_of(path: str | Path) -> str:
    """The kind of network in a file, without reading its arrays."""
    return str(_described(Path(path), "policy", arrays=False)[0]["kind"])


def read(path: str | Path, kind: str) -> tuple[dict[str, Any], Tree]:
    """The description and the arrays of a file of this kind."""
    path = Path(path)
    description, arrays = _described(path, kind, arrays=True)
    if description["format"] != FORMAT:
        raise PolicyError(
            f"{path}: expected format {FORMAT}, got {description['format']}; a newer Understudy wrote it: update"
        )
    if description["kind"] != kind:
        raise PolicyError(f"{path}: expected a {kind}, got a {description['kind']}; load it as that")
    return description, trees.unflatten(arrays)


def _described(path: Path, kind: str, *, arrays: bool) -> tuple[dict[str, Any], dict[str, Array]]:
    if not path.is_file():
        raise PolicyError(f"{path}: expected a {kind}, got no such file; check the path")
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            found = {name: file.get_tensor(name) for name in file.keys()} if arrays else {}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        if isinstance(error, SafetensorError) and not _is_safetensors(path):
            raise PolicyError(
                f"{path}: is not a {kind} file: expected a {kind} in safetensors, got another format; give a file that "
                f"understudy wrote, such as RUN/policy.safetensors"
            ) from None
        raise PolicyError(f"{path}: expected a {kind} in safetensors, got {error}; copy the file again") from error
    try:
        description = json.loads(metadata[KEY])
        description["kind"], description["format"]
    except (KeyError, ValueError, TypeError) as error:
        raise PolicyError(f"{path}: expected a {kind} of Understudy, got a safetensors file of others") from error
    check = description.pop("check", None)  # older files have none
    if arrays and check is not None and check != _digest(description, found):
        raise PolicyError(f"{path}: does not match its checksum; it is damaged: copy the file again")
    return description, found


def _is_safetensors(path: Path) -> bool:
    """Whether a file begins as such a file does, whatever became of the rest: the header's length, and its JSON."""
    with path.open("rb") as file:
        begin = file.read(9)
    return len(begin) == 9 and begin[8:] == b"{" and int.from_bytes(begin[:8], "little") <= MAX_HEADER_BYTES


def _digest(description: Mapping[str, Any], arrays: Mapping[str, Array]) -> str:
    digest = xxhash.xxh3_128(canonical_json(description).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def load(
    path: str | Path, kind: str, of: Callable[[Tree, dict[str, Any]], AnyPolicy], check: Callable[[AnyPolicy], None]
) -> AnyPolicy:
    """Build with `of` what a file of this kind describes, then `check` it; errors begin with the path."""
    description, parameters = read(path, kind)
    try:
        found = of(parameters, description)
        check(found)
    except PolicyError as error:
        raise PolicyError(f"{path}: {error}") from error
    return found


def check_world(made_for: StepSpec, given: StepSpec, *, where: str = "the world", advice: str = SAME_WORLD) -> None:
    """Refuse a world that a policy cannot act in, or a store (`where`) that it cannot learn from."""
    words = {"where": where, "advice": advice}
    check_fields(made_for.observation, given.observation, "observation", all_of_it=False, **words)
    check_fields(made_for.action, given.action, "action", all_of_it=True, **words)


def pack(weights: Mapping[str, torch.Tensor], stats: Stats) -> Tree:
    """Weights and statistics as one nested dict of float32 arrays, which share memory with them on the CPU."""
    flat = {f"weights/{name}": weight.detach().cpu().numpy() for name, weight in weights.items()}
    return trees.unflatten({**flat, **stats.flat()})


def unpack(tree: Tree) -> tuple[dict[str, torch.Tensor], Stats]:
    """The inverse of `pack`, into memory of its own."""
    weights = {name: torch.from_numpy(np.array(leaf)) for name, leaf in trees.leaves(tree["weights"])}
    return weights, Stats.of_flat(trees.flatten(tree))


def named_weights(network: nn.Module) -> dict[str, torch.Tensor]:
    """The weights of a network with an `ObservationEncoder`, named as in the file: encoder/front/conv_0/weight."""
    return {_name_in_file(network, key): tensor for key, tensor in network.state_dict().items()}


def load_weights(
    network: nn.Module, weights: Mapping[str, torch.Tensor], description: Mapping[str, Any] | None = None
) -> None:
    """Fill a network with the weights of a file; refuse those of another network or another frozen encoder."""
    if description is not None:
        check_digest(getattr(network.encoder, "digest", None), description.get("encoder_digest"))
    own = network.state_dict()
    check_weights(weights, named_weights(network))
    network.load_state_dict({key: weights[_name_in_file(network, key)] for key in own})


def check_digest(found: str | None, saved: str | None) -> None:
    """Refuse another frozen encoder than the one that a policy was trained with."""
    if saved != found:
        raise PolicyError(
            f"encoder/pretrained: the policy was trained with a frozen encoder of digest {saved}, this directory has "
            f"{found}; copy the same checkpoint to this path"
        )


def _name_in_file(network: nn.Module, key: str) -> str:
    """A key of a state_dict as a path, with a camera's own path in place of its number."""
    first, *rest = key.split(".")
    if first == "encoder" and rest[:2] == ["images", "cameras"]:
        encoder: Any = network.encoder
        return "/".join((first, encoder.inputs.cameras[int(rest[2])] or "camera", *rest[3:]))
    if first == "encoder" and rest[:1] == ["images"]:
        return "/".join((first, *rest[1:]))
    return key.replace(".", "/")


def check_weights(found: Mapping[str, Any], like: Mapping[str, torch.Tensor]) -> None:
    """Refuse weights that are not those of this network, whose own have these shapes."""
    for name, weight in like.items():
        got = list(np.shape(found[name])) if name in found else "nothing"
        if got != list(weight.shape):
            raise PolicyError(
                f"weights/{name}: expected shape {list(weight.shape)}, got {got}; they are of another network"
            )
    for name in found:
        if name not in like:
            raise PolicyError(f"weights/{name}: expected no such weights; they are of another network")


def check_fields(
    made_for: Spec,
    given: Spec,
    prefix: str,
    *,
    all_of_it: bool,
    what: str = "policy",
    where: str = "the world",
    advice: str = SAME_WORLD,
) -> None:
    """Refuse a world whose fields are not those the network was made for; with `all_of_it`, also bounds and surplus."""
    given_fields = given.flat
    for path, wanted in made_for.flat.items():
        got: ArraySpec | None = given_fields.get(path)
        name = trees.join(prefix, path)
        if got is None:
            raise PolicyError(
                f"{name}: the {what} was made for {wanted}, {where} has nothing of that name "
                f"(it has {', '.join(given_fields) or 'one field without a name'}); {advice}"
            )
        if (got.shape, got.dtype) != (wanted.shape, wanted.dtype):
            raise PolicyError(f"{name}: the {what} was made for {wanted}, {where} has {got}; {advice}")
        if all_of_it and (got.low, got.high) != (wanted.low, wanted.high):
            raise PolicyError(
                f"{name}: the {what} was made for bounds from {wanted.low} to {wanted.high}, "
                f"{where} has {got.low} to {got.high}; scale the action in the world"
            )
    surplus = [path for path in given_fields if path not in made_for.flat]
    if all_of_it and surplus:
        name = trees.join(prefix, surplus[0])
        raise PolicyError(f"{name}: the {what} gives no such field; {advice}")
