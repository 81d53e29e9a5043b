"""Import and export: a store becomes a data set of LeRobot, RLDS, robomimic and HIL-SERL, and each becomes a store.

python examples/import_export.py
"""

from contextlib import closing
from pathlib import Path

import understudy as us
from understudy.envs.registry import open_world
from understudy.formats import parse_dataset_path
from understudy.training import record_script
from understudy.training.data.dataset_io import export_episodes, import_episodes, open_import_target

ENV = "toy:press_button?size=32"
DATASETS = (
    "lerobot:{}/lerobot?video=png&fps=10",
    "rlds:{}/rlds/1.0.0",
    "robomimic:{}/demos.hdf5",
    "hil_serl:{}/pickles",
)


def main(folder: str = "data", demos: int = 3) -> dict[str, int]:
    store = Path(folder) / "store"
    with open_world(ENV) as world:
        record_script(world, store, successes=demos)
    counts = {}
    for name in DATASETS:
        dataset = parse_dataset_path(name.format(folder))
        exported = export_episodes(store, dataset, where="success = 1")
        source = parse_dataset_path(f"{dataset.format.name}:{dataset.path}")  # without the options of writing
        again = Path(folder) / f"store-{dataset.format.name}"
        with closing(source.format.read(source.path, {})) as reader, open_import_target(str(again)) as target:
            imported = import_episodes(reader, target, source, kind="demonstration")
            twice = import_episodes(reader, target, source, kind="demonstration")  # adds nothing
        with us.Reader(again) as opened:
            task = opened.record(1).info.task
        print(f"{dataset.format.name}: {exported.num_episodes} episodes of {task} out, {imported.num_imported} in")
        assert twice.num_imported == 0
        counts[dataset.format.name] = imported.num_imported
    return counts


if __name__ == "__main__":
    main()
