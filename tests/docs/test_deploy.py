"""What is in deploy/: valid for KubeRay and Kubernetes, closed to strangers; the SLURM script does what it says."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tyro
from tests.waiting import wait_for

from understudy.cluster.config import ClusterConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SCRIPTS = Path(sysconfig.get_path("scripts"))
LIMIT_S = 120.0

yaml = pytest.importorskip("yaml")


@pytest.fixture(scope="module")
def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text()))


@pytest.fixture
def job(documents: list[dict[str, Any]]) -> dict[str, Any]:
    return copy.deepcopy(next(one for one in documents if one["kind"] == "RayJob"))


def groups(job: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


# ---- Kubernetes


def check_kuberay(job: dict[str, Any]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((ROOT / "tests" / "golden" / "kuberay_v1.json").read_text())
    try:
        jsonschema.Draft202012Validator(schema).validate(job)
    except jsonschema.ValidationError as error:
        raise AssertionError(f"{error.json_path}: {error.message}") from None


def test_the_job_fits_kuberays_types(job: dict[str, Any]) -> None:
    check_kuberay(job)


@pytest.mark.parametrize(
    ("where", "name", "value", "says"),
    [
        (("spec",), "retries", 3, "retries"),
        (("spec",), "backoffLimit", "3", "backoffLimit"),
        (("spec", "rayClusterSpec", "authOptions"), "mode", "on", "mode"),
        (("spec", "rayClusterSpec", "headGroupSpec", "rayStartParams"), "num-cpus", 0, "num-cpus"),
        (("spec", "rayClusterSpec", "workerGroupSpecs", 0), "minReplicas", None, "minReplicas"),
    ],
)
def test_a_mistake_would_be_found(
    job: dict[str, Any], where: tuple[Any, ...], name: str, value: Any, says: str
) -> None:
    at: Any = job
    for key in where:
        at = at[key]
    at[name] = value
    with pytest.raises(AssertionError, match=says):
        check_kuberay(job)


def test_pods_and_the_rest_fit_kubernetes(documents: list[dict[str, Any]], job: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    for one in documents:
        if one["kind"] != "RayJob":
            validate(one, "1.31", strict=True)
    for group in groups(job):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": group["template"]}
        validate(pod, "1.31", strict=True)
        group["template"]["spec"]["containers"][0]["livenessProbe"]["httpGet"]["pth"] = "/"
        with pytest.raises(Exception, match="pth"):  # its own class, whose name says nothing
            validate(pod, "1.31", strict=True)
        del group["template"]["spec"]["containers"][0]["livenessProbe"]["httpGet"]["pth"]


def test_what_pods_name_is_there(documents: list[dict[str, Any]], job: dict[str, Any]) -> None:
    there = {(one["kind"], one["metadata"]["name"]) for one in documents}
    claims: list[str] = []
    for group in groups(job):
        spec = group["template"]["spec"]
        mounted = {mount["name"] for container in spec["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}
        for volume in spec["volumes"]:
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert ("PersistentVolumeClaim", claim) in there
                claims.append(claim)
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in there
    assert {one["metadata"]["namespace"] for one in documents} == {"understudy"}
    once = [
        one["metadata"]["name"] for one in documents if one.get("spec", {}).get("accessModes") == ["ReadWriteOncePod"]
    ]
    assert once
    assert all(claims.count(name) == 1 for name in once)  # a shard's disk belongs to one pod


def test_nobody_else_reaches_ray(documents: list[dict[str, Any]], job: dict[str, Any]) -> None:
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert cluster["headGroupSpec"]["enableIngress"] is False
    assert not [one for one in documents if one["kind"] in ("Service", "Ingress", "Secret")]  # no secret in a file
    policy = next(one for one in documents if one["kind"] == "NetworkPolicy")["spec"]
    ours = policy["podSelector"]["matchLabels"]
    for group in groups(job):
        assert ours.items() <= group["template"]["metadata"]["labels"].items()
        spec = group["template"]["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["containers"][0]["securityContext"]["allowPrivilegeEscalation"] is False
    inside, operator = policy["ingress"]
    assert inside["from"] == [{"podSelector": {"matchLabels": ours}}]
    assert operator["ports"] == [{"port": 8265, "protocol": "TCP"}]
    for peer in operator["from"]:
        assert peer["podSelector"]["matchLabels"]  # not all pods of all namespaces


def test_the_command_places_what_the_pods_offer(documents: list[dict[str, Any]], job: dict[str, Any]) -> None:
    """The options are real, and there is room for all that must have room."""
    script = next(one for one in documents if one["kind"] == "ConfigMap")["data"]["run.sh"]
    options = shlex.split(script[script.index("set -- ") + len("set -- ") : script.index("if [")].replace("\\\n", " "))
    assert options[:2] == ["--cluster", "auto"]
    config = tyro.cli(
        ClusterConfig,
        args=[option.replace("--cluster.", "--") for option in options[2:]],
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    offered: list[dict[str, float]] = []
    for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]:
        params, requests = group["rayStartParams"], group["template"]["spec"]["containers"][0]["resources"]["requests"]
        named = (
            json.loads(shlex.split(params["resources"])[0]) if "resources" in params else {}
        )  # as its shell reads it
        cpus = float(params.get("num-cpus", requests["cpu"]))
        gpus = float(requests.get("nvidia.com/gpu", 0))
        offered += [{"CPU": cpus, "GPU": gpus, **named}] * group["replicas"]
    total = {name: sum(node.get(name, 0.0) for node in offered) for name in ("CPU", "GPU", "shard")}
    for role in (config.shards, config.learner):
        for name, amount in role.ray_resources().items():
            assert amount * role.num <= total[name], name
    assert config.cpus() <= total["CPU"]
    mounts = {
        mount["mountPath"]
        for group in groups(job)
        for mount in group["template"]["spec"]["containers"][0]["volumeMounts"]
    }
    assert config.shard_dir in mounts
    assert str(Path(config.token_file or "").parent) in mounts


def test_the_image_has_the_ray_that_the_job_names(job: dict[str, Any]) -> None:
    assert f"ray[default]=={job['spec']['rayClusterSpec']['rayVersion']}" in (DEPLOY / "Dockerfile").read_text()
    for source in ("pyproject.toml", "README.md", "LICENSE", "src"):
        assert (ROOT / source).exists()


def test_the_page_names_options_that_there_are() -> None:
    text = (ROOT / "docs" / "cluster.md").read_text()
    named = set(re.findall(r"--cluster\.([a-z.-]+)", text)) | set(
        re.findall(r"--cluster\.([a-z.-]+)", script_of("slurm.sh"))
    )
    assert len(named) >= 8
    for name in named:
        at: Any = ClusterConfig()
        for part in name.rstrip(".").split("."):
            assert hasattr(at, part.replace("-", "_")), name
            at = getattr(at, part.replace("-", "_"))
    for path in re.findall(r"`((?:deploy|tests)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path


def script_of(name: str) -> str:
    return (DEPLOY / name).read_text()


# ---- SLURM


def test_bash_and_shellcheck_have_nothing_to_say() -> None:
    subprocess.run(["bash", "-n", DEPLOY / "slurm.sh"], check=True)
    shellcheck = shutil.which("shellcheck") or shutil.which("shellcheck", path=SCRIPTS)
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    found = subprocess.run([shellcheck, DEPLOY / "slurm.sh"], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


SRUN = """#!/bin/bash
# What srun does with one machine: --ntasks copies of the command, which end with it.
n=1
while [[ $1 == --* ]]; do [[ $1 == --ntasks=* ]] && n=${1#*=}; shift; done
pids=()
trap 'kill -TERM "${pids[@]}" 2>/dev/null' TERM
for _ in $(seq "$n"); do "$@" & pids+=($!); done
for _ in 1 2; do wait "${pids[@]}"; done
"""
SCONTROL = """#!/bin/bash
for name in ${SLURM_JOB_NODELIST//,/ }; do echo "$name"; done
"""
RAY = """#!/bin/bash
trap 'echo "ray ended" >> "$SAID"; exit 0' TERM
echo "ray $RAY_AUTH_MODE ${#RAY_AUTH_TOKEN} $RAY_worker_niceness $*" >> "$SAID"
[[ $1 != health-check ]] || grep -q "start --head" "$SAID" || exit 1
while [[ $1 == start ]]; do sleep 0.05; done
"""
DRIVER = """#!/bin/bash
until grep -q "start --address" "$SAID"; do sleep 0.05; done # nodes may be late
[[ -z ${WAIT:-} ]] || trap 'echo "driver interrupted" >> "$SAID"; exit 7' INT
echo "driver $*" >> "$SAID"
while [[ -n ${WAIT:-} ]]; do sleep 0.05; done
exit "${CODE:-0}"
"""


@contextlib.contextmanager
def job_of(tmp_path: Path, arguments: list[str], tools: dict[str, str], **more: str) -> Iterator[Any]:
    """The script in the hands of a small SLURM with two nodes, which are both this machine."""
    tmp_path.joinpath("bin").mkdir()
    for name, text in tools.items():
        tool = tmp_path / "bin" / name
        tool.write_text(text)
        tool.chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{tmp_path / 'bin'}:{SCRIPTS}:{os.environ['PATH']}",
        "SAID": str(tmp_path / "said"),
        "SLURM_JOB_NODELIST": "one,two",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_CPUS_ON_NODE": "1",
        "SCRATCH": "/tmp",
        "HOME": str(tmp_path),
        **more,
    }
    process = subprocess.Popen(
        ["bash", DEPLOY / "slurm.sh", *arguments],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for pid in session_of(process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def session_of(leader: int) -> list[int]:
    """Who is left of a job, whatever process groups it made."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(path.read_text().rpartition(")")[2].split()[3]) == leader:
                found.append(int(path.parent.name))
    return found


def recorded(tmp_path: Path) -> list[str]:
    said = tmp_path / "said"
    return said.read_text().splitlines() if said.exists() else []


TOOLS = {"srun": SRUN, "scontrol": SCONTROL, "ray": RAY, "understudy": DRIVER}
TRAIN = [
    "train",
    "grpo",
    "RUN",
    "--policy",
    "p",
    "--cluster.rollout.num",
    "8",
    "--cluster.separate-nodes",
    "--seed",
    "3",
    "--cluster.max-lag=1",
]


def test_the_head_comes_first_then_the_others_then_the_command(tmp_path: Path) -> None:
    with job_of(tmp_path, TRAIN, TOOLS, CODE="3") as process:
        output = process.communicate(timeout=LIMIT_S)[0]
    assert process.returncode == 3, output  # the command's own
    said = recorded(tmp_path)
    head, check, driver = (
        next(line for line in said if word in line) for word in ("start --head", "health-check", "driver ")
    )
    assert head.startswith("ray token 64 0 start --head ")
    assert "--include-dashboard=false" in head
    address = check.split("--address ")[1]
    assert f"{20000 + os.getpid() % 10000}" == address.rpartition(":")[2]
    assert f"--node-ip-address {address.rpartition(':')[0]} " in head
    assert not address.startswith("127.")
    assert [line for line in said if f"start --address {address} " in line]
    assert driver == f"driver {' '.join(TRAIN)} --cluster {address}"
    assert said.count("ray ended") == 2  # nothing is left behind
    assert not Path(f"/tmp/ray-{os.getpid()}").exists()


def test_a_job_that_was_requeued_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "RUN"
    run.mkdir()
    given = [str(run) if word == "RUN" else word for word in TRAIN]
    with job_of(tmp_path, given, TOOLS, SLURM_RESTART_COUNT="1") as process:
        process.communicate(timeout=LIMIT_S)
    driver = next(line for line in recorded(tmp_path) if line.startswith("driver"))
    assert driver.startswith("driver train grpo ")  # it had not begun
    (run / "config.json").write_text("{}")
    shutil.rmtree(tmp_path / "bin")
    (tmp_path / "said").unlink()
    with job_of(tmp_path, given, TOOLS, SLURM_RESTART_COUNT="1") as process:
        process.communicate(timeout=LIMIT_S)
    driver = next(line for line in recorded(tmp_path) if line.startswith("driver"))
    assert driver.startswith(
        f"driver resume {run} --cluster.rollout.num 8 --cluster.separate-nodes --cluster.max-lag=1 --cluster "
    )


def test_slurms_warning_reaches_the_driver(tmp_path: Path) -> None:
    with job_of(tmp_path, TRAIN, TOOLS, WAIT="yes") as process:
        wait_for(lambda: any(line.startswith("driver") for line in recorded(tmp_path)))
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LIMIT_S)
    assert process.returncode == 143
    said = recorded(tmp_path)
    assert said.index("driver interrupted") < said.index("ray ended")  # it still had its workers when it ended


def test_a_head_that_dies_is_said(tmp_path: Path) -> None:
    broken = "#!/bin/bash\n[[ $1 == start ]] && echo 'no such port' >&2\nexit 1\n"
    with job_of(tmp_path, TRAIN, {**TOOLS, "ray": broken}) as process:
        output = process.communicate(timeout=LIMIT_S)[0]
    assert process.returncode == 1
    assert "Ray's head ended; see above" in output
    assert not any(line.startswith("driver") for line in recorded(tmp_path))


COUNT = f"""#!{sys.executable}
import sys, time, ray
ray.init(sys.argv[-1], log_to_driver=False)
start = time.monotonic()
while sum(node["Alive"] for node in ray.nodes()) < 2 and time.monotonic() - start < 90:
    time.sleep(0.2)
nice = ray.remote(lambda: __import__("os").nice(0))
print("nodes", len(ray.nodes()), "nice", ray.get(nice.remote()), flush=True)
"""


@pytest.mark.nightly
def test_with_a_real_ray(tmp_path: Path) -> None:
    """Two Ray nodes on this machine, a token that only the job has, a driver that finds both."""
    pytest.importorskip("ray")
    tools = {"srun": SRUN, "scontrol": SCONTROL, "understudy": COUNT}
    with job_of(tmp_path, TRAIN, tools, RAY_raylet_start_wait_time_s="120") as process:  # the machine may be busy
        output = process.communicate(timeout=400)[0]
    assert process.returncode == 0, output
    assert "nodes 2 nice 0" in output
