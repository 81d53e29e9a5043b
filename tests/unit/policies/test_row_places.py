"""A row of a matrix product does not depend on its place in the batch: what acts together may come in any order."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
from understudy.policies.mlp import new_linear

torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
wrong = 0
for rows in (2, 3, 4, 7, 8, 16, 30, 32):
    for outputs in (1, 2, 3, 4, 8, 12):
        for inputs in (16, 64, 128):
            layer = new_linear(inputs, outputs) if sys.argv[1] == "ours" else torch.nn.Linear(inputs, outputs)
            with torch.no_grad():
                for weights in layer.parameters():
                    weights.normal_(generator=generator)
                x = torch.randn(rows, inputs, generator=generator)
                y = layer(x)
                for _ in range(4):
                    order = torch.randperm(rows, generator=generator)
                    wrong += not torch.equal(layer(x[order]), y[order])
print(wrong)
"""


def count_wrong(choice: str | None, layers: str = "ours") -> int:
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    environment |= {} if choice is None else {"MKL_CBWR": choice}
    command = [sys.executable, "-c", PROGRAM, layers]
    return int(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def test_rows_do_not_depend_on_their_places() -> None:
    assert count_wrong(None) == 0


def test_the_choice_of_a_user_is_kept() -> None:
    """And without STRICT the rows of torch's own layers do depend, or these tests would prove nothing."""
    import torch

    if not torch.backends.mkl.is_available() or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("this torch multiplies without MKL, or not with AVX2")
    assert count_wrong("AVX2", "torch's") > 0
