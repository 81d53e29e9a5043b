"""robomimic in the contract of formats: all that is written comes back, but for names that HDF5 cannot have."""

from tests.contracts.formats.case import Case

from understudy.core import Episode, StepSpec


def with_names_of_hdf5(spec: StepSpec, episode: Episode) -> tuple[StepSpec, Episode] | None:
    odd = any("\0" in path or "." in path.split("/") for path in spec.columns)
    return None if odd else (spec, episode)


CASES = [Case(format="robomimic", file="demos.hdf5", carried=with_names_of_hdf5)]
