"""Damages data sets of every format in thousands of ways and reads them: refused or whole, never a crash or a hang.

    python benchmarks/mutate.py                             # 10,000 of each
    python benchmarks/mutate.py --only rlds --num 500 --seed 7

Exit code 1 if anything but a FormatError came of it; each such case is printed with its seed.
"""

from __future__ import annotations

import resource
import sys
import tarfile
import tempfile
from collections import Counter
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.contracts.formats.case import all_cases
from tests.unit.formats.mutation import survive, survive_in

from understudy.formats import DatasetReader, find_format, parse_dataset_path

MINARI = Path(__file__).parents[1] / "tests" / "golden" / "formats" / "minari" / "data.tar.xz"
MOST_BYTES = 8 * 2**30  # of addresses: what asks for more than this gets a MemoryError, which fails


def main(only: str = "", num: int = 10_000, seed: int = 0) -> int:
    """Damage and read.

    Args:
        only: The formats whose name begins so.
        num: How many times each.
        seed: Of the first; the others count on from it.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    failures = 0
    for case in [*all_cases(), *READ_ONLY]:
        if str(case).startswith(only):
            with tempfile.TemporaryDirectory() as folder:
                if isinstance(case, str):
                    outcomes = READ_ONLY[case](Path(folder), num, seed)
                else:
                    outcomes = survive(case, Path(folder), num=num, seed=seed)
            print(f"{case}: {', '.join(f'{count} {what}' for what, count in sorted(outcomes.items()))}", flush=True)
            failures += sum(count for what, count in outcomes.items() if what not in ("refused", "read"))
    return 1 if failures else 0


def minari(folder: Path, num: int, seed: int) -> Counter[str]:
    """Minari is read and not written here, so what its own library wrote is damaged."""
    with tarfile.open(MINARI) as archive:
        archive.extractall(folder / "golden", filter="data")
    places = []
    for found in sorted((folder / "golden").iterdir()):
        places.append(folder / found.name)
        places[-1].mkdir()
        found.rename(places[-1] / "data")
    read = find_format("minari").read
    return survive_in("minari", places, "data", lambda place: read(place / "data", {}), folder, num=num, seed=seed)


def bags(folder: Path, num: int, seed: int) -> Counter[str]:
    """Recordings of a robot, which are read and not written here: two ROS 2 bags and a directory of MCAP files."""
    from rosbags.rosbag2 import StoragePlugin
    from tests.unit.formats.bags.recordings import robot, write_bag, write_mcap

    sent = robot(0.2).sent
    places = [folder / name for name in ("db3", "mcap", "files")]
    for place in places:
        place.mkdir()
    write_bag(places[0] / "bag", sent)
    write_bag(places[1] / "bag", sent, StoragePlugin.MCAP)
    (places[2] / "bag").mkdir()
    write_mcap(places[2] / "bag" / "take.mcap", sent)

    def read(place: Path) -> DatasetReader:
        found = parse_dataset_path(str(place / "bag"))
        return found.format.read(found.path, {"action": "/leader/joint_states", "fps": "50"})

    return survive_in("bags", places, "bag", read, folder, num=num, seed=seed)


READ_ONLY = {"minari": minari, "bags": bags}

if __name__ == "__main__":
    sys.exit(tyro.cli(main))
