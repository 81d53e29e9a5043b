"""Configs: they are imported without torch, and every field of them has a sentence of help."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import understudy

SRC = Path(understudy.__file__).parent
FILES = [
    "algorithms/offpolicy/config.py",
    "algorithms/onpolicy/config.py",
    "algorithms/sft/config.py",
    "policies/config.py",
    "policies/rlpd/gripper.py",
    "policies/openvla/config.py",
    "policies/flow/config.py",
    "policies/vla/config.py",
]


def test_no_config_imports_torch() -> None:
    modules = [f"understudy.{file.removesuffix('.py').replace('/', '.')}" for file in FILES]
    names = [
        "from understudy.policies import ActorConfig, EncoderConfig, ClassifierConfig, Gripper, LoraConfig, Sampling",
        "from understudy.algorithms import SACConfig, CloningConfig, ClassifierTrainingConfig, AlgorithmError",
        "from understudy.algorithms.sft import SFTUpdateConfig",
        "from understudy.policies.flow import FlowConfig",
        "from understudy.policies.vla import VLAConfig",
        "from understudy.policies.openvla import OpenVLAConfig",
    ]
    code = [*(f"import {module}" for module in modules), *names]
    check = "import sys; assert not {'torch', 'transformers', 'peft'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", "; ".join([*code, check])], check=True)


@pytest.mark.parametrize("file", FILES)
def test_every_field_has_a_sentence_of_help(file: str) -> None:
    """The string below a field, from which the command line takes its help."""
    for node in ast.parse((SRC / file).read_text()).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, below in zip(node.body, [*node.body[1:], None], strict=True):
            if not isinstance(field, ast.AnnAssign):
                continue
            if isinstance(field.annotation, ast.Name) and field.annotation.id.endswith("Config"):
                continue  # a group of options, which has the help of its class
            where = f"{node.name}.{ast.unparse(field.target)}"
            assert isinstance(below, ast.Expr), where
            assert isinstance(below.value, ast.Constant), where
            text = str(below.value.value)
            assert text[0].isupper(), where
            assert text.endswith((".", ").")), where


def test_the_lazy_names_are_all_there() -> None:
    import understudy.algorithms
    import understudy.policies
    import understudy.policies.vla

    for package in (understudy.policies, understudy.algorithms):
        for name in package.__all__:
            assert getattr(package, name).__name__ == name or name == "State"
        with pytest.raises(AttributeError, match="has no attribute 'Nobody'"):
            package.Nobody  # noqa: B018
