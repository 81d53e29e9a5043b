"""HIL-SERL in the contract of formats: all that is written comes back."""

from tests.contracts.formats.case import Case

CASES = [
    Case(format="hil_serl", file="demos.pkl"),
    Case(format="hil_serl", options={"stack": "add", "steps_per_file": "4"}),
]
