"""RLDS in the contract of formats: all that is written comes back."""

from tests.contracts.formats.case import Case

CASES = [Case(format="rlds"), Case(format="rlds", options={"file_format": "array_record", "images": "bytes"})]
