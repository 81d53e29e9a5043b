"""Exports a store to LeRobot's formats, lets the real lerobot read and train from them, and reads them back.

    understudy record STORE --env toy:pick_red --successes 200
    python benchmarks/lerobot.py STORE --python V3/bin/python --python-v21 V21/bin/python --work DIR

V3 is a virtual environment with `lerobot[dataset]` (0.6.1 was used; it needs Python 3.12), V21 one with lerobot 0.3.3
and numpy < 2.3, the last that reads v2.1. Without one of them its part is left out. Their torchcodec needs libraries
of FFmpeg (on LD_LIBRARY_PATH if they are not the system's); without them lerobot decodes with PyAV.

For each way to write: every frame that lerobot gives out is held against the store (numbers must be equal, pixels
equal to what Understudy decodes), the import must give the store's episodes back, and lerobot's ACT takes one step of
training. With `keep`, on a store whose cameras are H.264 (`understudy record --codec h264`), an import with
`--codec keep` must give every packet, label and attribute back. Exit code 1 if anything differs. Times are CPU of one
process; lerobot is asked for one frame after the other.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

WAYS: Mapping[str, Mapping[str, str]] = {
    "v3, keep": {"video": "keep"},
    "v3, av1": {"video": "av1"},
    "v3, h264": {"video": "h264"},
    "v3, lossless": {"video": "lossless"},
    "v3, png": {"video": "png"},
    "v2.1, av1": {"version": "2.1", "video": "av1"},
}


def main(
    store: Path,
    work: Path,
    python: Path | None = None,
    python_v21: Path | None = None,
    seed: int = 0,
    ways: tuple[str, ...] = tuple(WAYS),
) -> int:
    """Write, read with lerobot, read back.

    Args:
        store: Of one spec, with cameras.
        work: A folder for the data sets; made, and left there.
        python: Of an environment with a lerobot that reads v3.
        python_v21: Of one with a lerobot that reads v2.1.
        seed: Of the order in which lerobot is asked for frames.
        ways: Names of the ways to write, such as "v3, keep"; all of them by default.
    """
    work.mkdir(parents=True, exist_ok=True)
    failures = 0
    for name, options in {name: WAYS[name] for name in ways}.items():
        place = work / name.replace(", ", "-")
        shutil.rmtree(place, ignore_errors=True)
        failures += export(store, place, options, name)
        with_lerobot = python_v21 if options.get("version") == "2.1" else python
        if with_lerobot is not None:
            failures += ask(with_lerobot, store, place, name, seed)
        print(flush=True)
    return 1 if failures else 0


def episodes_of(store: Path) -> Any:
    from understudy.replay.read.reader import Reader

    with Reader(store) as reader:
        for record in reader.episodes():
            yield reader.spec(record.spec), reader.read(record.id)


def export(store: Path, place: Path, options: Mapping[str, str], name: str) -> int:
    """Write and read back; the number of episodes that came back otherwise."""
    from understudy.core import tree as trees
    from understudy.formats import DatasetPath, find_format
    from understudy.training.data.dataset_io import export_episodes

    format, started = find_format("lerobot"), time.process_time()
    report = export_episodes(store, DatasetPath(format=format, path=place, options=options))
    num_steps, written_s = report.num_steps, time.process_time() - started
    size_mb = sum(path.stat().st_size for path in place.rglob("*") if path.is_file()) / 1e6
    print(f"{name}: {num_steps} steps written, {size_mb:.1f} MB, {1000 * written_s / num_steps:.2f} CPU ms a step")
    started, source = time.process_time(), format.read(place, {})
    for _ in source.episodes():
        pass
    source.close()
    read_s = time.process_time() - started
    bounds = json.loads((place / "meta/understudy/spec.json").read_text())["mean_error"]
    source, wrong, worst = format.read(place, {}), 0, {}
    for (_, wanted), (_, got) in zip(episodes_of(store), source.episodes(), strict=True):
        theirs = got.columns()
        exact = wanted.info == got.info
        for path, column in wanted.columns().items():
            error = 0.0
            if column.dtype == np.uint8 and column.ndim == 4:
                error = float(np.abs(column[:-1].astype(int) - theirs[path][:-1]).mean())
                exact &= bool((column[-1] == theirs[path][-1]).all())  # the last observation is kept exactly
                worst[path] = max(worst.get(path, 0.0), error)
            else:
                exact &= trees.equal_leaf(column, theirs[path])
        wrong += not exact
    source.close()
    within = all(worst.get(path, 0) <= max([*bounds.values(), 0]) + 1e-9 for path in worst)
    print(
        f"  read back by understudy: {1000 * read_s / num_steps:.3f} CPU ms a step; {wrong} episodes differ; "
        f"mean error of pixels {worst or 0}, stated {bounds or 0}"
    )
    return wrong + (not within) + (keep(store, place) if report.kept else 0)


def keep(store: Path, place: Path) -> int:
    """Import with `--codec keep`; the number of episodes of which a packet, a number or an attribute differs."""
    from understudy.core import tree as trees
    from understudy.formats import parse_dataset_path
    from understudy.replay import Reader, Store
    from understudy.training.data.dataset_io import StoreImportTarget, import_episodes

    copy = place.with_name(place.name + "-copy")
    shutil.rmtree(copy, ignore_errors=True)
    dataset, started = parse_dataset_path(f"lerobot:{place}"), time.process_time()
    source = dataset.format.read(place, {})
    with Store.open(copy) as target:
        report = import_episodes(source, StoreImportTarget(target), dataset, codec="keep")
    source.close()
    spent_s = time.process_time() - started
    wrong = num_packets = 0
    with Reader(store) as one, Reader(copy) as other:
        for old, new in zip(one.episodes(), other.episodes(), strict=True):
            (_, before), (_, after) = one.stored_rows(old.id), other.stored_rows(new.id)
            labels = {name: new.info.labels.get(name) for name in old.info.labels}
            same = labels == old.info.labels and old.info.success == new.info.success
            wrong += not (same and all(trees.equal_leaf(before[path], after[path]) for path in after))
            num_packets += sum(len(before[path]) for path in report.kept)
    print(
        f"  imported with --codec keep: {1000 * spent_s / report.num_steps:.3f} CPU ms a step; {num_packets} packets; "
        f"{wrong} of {report.num_imported} episodes differ in a packet, a number, a label or their success"
    )
    return wrong


def ask(python: Path, store: Path, place: Path, name: str, seed: int) -> int:
    """Let lerobot read all frames and train; the number of fields that are not the store's."""
    answers = place.with_name(place.name + "-answers")
    shutil.rmtree(answers, ignore_errors=True)
    shutil.rmtree(place.parent / "hf", ignore_errors=True)  # lerobot keeps copies of the tables it has read
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(place.parent / "hf"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [python, __file__, "inside", place, answers, str(seed)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    print("".join(f"  {line}\n" for line in done.stdout.splitlines() if line.startswith("lerobot")), end="")
    if done.returncode:
        print(f"  {name}: lerobot failed:\n{done.stdout}{done.stderr[-3000:]}")
        return 1
    return sum(compare(answer, store, place) for answer in sorted(answers.iterdir()))


def compare(answer: Path, store: Path, place: Path) -> int:
    """Hold what lerobot read against the store, and its frames against those that Understudy decodes."""
    from understudy.formats import find_format

    said = json.loads((place / "meta/understudy/spec.json").read_text())
    frames, wrong, at = np.load(answer), set(), 0
    given = {key: frames[key] for key in said["columns"].values()}
    errors, apart = dict.fromkeys(said["mean_error"], 0.0), dict.fromkeys(said["mean_error"], 0)
    for path in said.get("codecs", {}):
        errors[said["columns"][path]], apart[said["columns"][path]] = 0.0, 0
    # The pixels of stored packets are the store's own; without the sidecar they are converted as lerobot does it.
    source = find_format("lerobot").read(place, {"rest": "ignore", "last": "step"} if said.get("codecs") else {})
    for (_, wanted), (_, ours) in zip(episodes_of(store), source.episodes(), strict=True):
        end = at + len(wanted)
        for path, key in said["columns"].items():
            theirs, column = given[key][at:end], wanted.columns()[path][: len(wanted)]
            if key in errors:
                errors[key] = max(errors[key], float(np.abs(theirs.astype(int) - column).mean()))
                decoded = ours.columns()[path][: len(wanted)]
                apart[key] = max(apart[key], int(np.abs(theirs.astype(int) - decoded).max()))
            elif not (column.reshape(theirs.shape) == theirs).all():
                wrong.add(key)
        at = end
    source.close()
    for key in errors:
        print(
            f"  {answer.stem}: {key}: mean error up to {errors[key]:.2f}, stated {said['mean_error'].get(key, 0):.2f}; "
            f"no pixel further than {apart[key]} from what understudy decodes"
        )
        if apart[key] > 2:  # another build of FFmpeg may round colours otherwise; another frame is further away
            wrong.add(key)
    print(f"  {answer.stem}: {len(given)} features, {len(wrong)} wrong {sorted(wrong) or ''}")
    return len(wrong)


# --- inside lerobot's environment, where there is no understudy ----------------------------------------------------


def inside(place: Path, answers: Path, seed: int) -> None:
    import logging

    import torch

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    try:
        from lerobot.datasets.lerobot_dataset import LeRobotDataset
    except ImportError:
        from lerobot.common.datasets.lerobot_dataset import LeRobotDataset

    answers.mkdir()
    works, data = "", None
    for backend in ("torchcodec", "pyav"):
        try:
            data = LeRobotDataset("someone/toy", root=place, video_backend=backend)
            data[0]
        except RuntimeError:
            print(f"lerobot cannot use {backend} here: it finds no FFmpeg libraries")
            continue
        works, frames = works or backend, {}
        started = time.process_time()
        for index in range(len(data)):
            for key, value in data[index].items():
                if isinstance(value, torch.Tensor):
                    frames.setdefault(key, []).append(value)
        spent = time.process_time() - started
        print(f"lerobot reads {len(data)} frames in order ({backend}): {1000 * spent / len(data):.3f} CPU ms a step")
        arrays = {key: np.stack([as_array(key, value) for value in column]) for key, column in frames.items()}
        np.savez(answers / f"{backend}.npz", **arrays)
        if not data.meta.video_keys:
            break
    assert data is not None
    train(data, place, works, seed)


def as_array(key: str, value: Any) -> np.ndarray[Any, Any]:
    if value.ndim == 3 and key.startswith("observation.image"):
        return (value * 255).round().byte().permute(1, 2, 0).numpy()
    return value.numpy()


def train(data: Any, place: Path, backend: str, seed: int) -> None:
    """One step of ACT, without pretrained weights."""
    import torch

    try:
        from lerobot.configs.types import FeatureType
        from lerobot.policies.act.configuration_act import ACTConfig
        from lerobot.policies.act.modeling_act import ACTPolicy
    except ImportError:
        from lerobot.common.policies.act.configuration_act import ACTConfig
        from lerobot.common.policies.act.modeling_act import ACTPolicy
        from lerobot.configs.types import FeatureType
    try:
        from lerobot.utils.feature_utils import dataset_to_policy_features
    except ImportError:
        from lerobot.datasets.utils import dataset_to_policy_features

    torch.manual_seed(seed)
    features = dataset_to_policy_features(data.meta.features)
    outputs = {key: feature for key, feature in features.items() if feature.type is FeatureType.ACTION}
    inputs = {key: feature for key, feature in features.items() if key.startswith("observation")}
    config = ACTConfig(
        input_features=inputs,
        output_features=outputs,
        chunk_size=8,
        n_action_steps=8,
        dim_model=64,
        n_heads=4,
        dim_feedforward=128,
        n_encoder_layers=1,
        n_vae_encoder_layers=1,
        pretrained_backbone_weights=None,
        device="cpu",
    )
    chunks = {"action": [step / data.fps for step in range(8)]}
    again = type(data)("someone/toy", root=place, delta_timestamps=chunks, video_backend=backend)
    batch = next(iter(torch.utils.data.DataLoader(again, batch_size=16, shuffle=True)))
    try:
        policy = ACTPolicy(config, dataset_stats=data.meta.stats)
    except TypeError:
        policy = ACTPolicy(config)
        for key in (*inputs, *outputs):  # newer ones normalise outside of the policy
            of = {name: torch.as_tensor(data.meta.stats[key][name]).float() for name in ("mean", "std")}
            batch[key] = (batch[key].float() - of["mean"]) / (of["std"] + 1e-8)
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-3)
    losses = []
    for _ in range(2):  # the second shows that the first one moved
        loss, _ = policy.forward(dict(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"lerobot trains ACT on a batch of 16: loss {losses[0]:.3f}, after one step {losses[1]:.3f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["inside"]:
        sys.path.pop(0)  # this folder has a file called lerobot.py
        inside(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    else:
        import tyro

        sys.exit(tyro.cli(main))
