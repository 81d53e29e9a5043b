"""Cheap images of MuJoCo models: drawn for real in the virtual environment of Metaworld, if that is set up."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.envs.registry import WORLD_REGISTRY
from understudy.envs.simulators.camera import fewer_faces

SOURCES = Path(__file__).resolve().parents[4] / "src"
METAWORLD = WORLD_REGISTRY["metaworld"]

# A ball of fine mesh that falls on a plane: green above, a red site, a blue box in another group.
SCRIPT = """
import json, sys
import mujoco, numpy as np
from understudy.envs.simulators.camera import Cameras
from understudy.envs.world import WorldError

points = np.random.default_rng(0).normal(size=(3000, 3))
points *= 0.3 / np.linalg.norm(points, axis=1, keepdims=True)
vertices = " ".join(f"{number:.4f}" for number in points.ravel())
XML = '''<mujoco><asset><mesh name="ball" vertex="VERTICES"/></asset><worldbody>
<light pos="0 0 3"/><geom type="plane" size="2 2 0.1" rgba="0.5 0.5 0.5 1"/>
<body pos="0.1 0 0.5"><freejoint/><geom type="mesh" mesh="ball" rgba="0 1 0 1"/></body>
<geom type="box" size="0.1 0.1 0.1" pos="-0.7 0.7 0.1" rgba="0 0 1 1" group="3" contype="0" conaffinity="0"/>
<site type="sphere" size="0.1" pos="0.7 -0.7 0.1" rgba="1 0 0 1"/>
<camera name="top" pos="0 0 3"/><camera name="side" pos="0 -3 0.5" xyaxes="1 0 0 0 0 1"/>
</worldbody></mujoco>'''.replace("VERTICES", vertices)
model = mujoco.MjModel.from_xml_string(XML)
before = np.concatenate([model.mesh_face.ravel(), model.mesh_facenum, [
    model.vis.quality.offsamples, model.vis.quality.shadowsize, model.vis.global_.offwidth]])

def fall(look):
    data = mujoco.MjData(model)
    cameras = Cameras(model, ["top", "side"], 64)
    states, images = [], []
    for _ in range(50):
        mujoco.mj_step(model, data)
        states.append(np.concatenate([data.qpos, data.qvel, data.qacc_warmstart]).tobytes())
        if look:
            images.append(cameras.render(data))
    cameras.close()
    cameras.close()
    return states, images

def colours(image):
    named = {"green": [0, 1, 0], "red": [1, 0, 0], "blue": [0, 0, 1]}
    found = {}
    for name, wanted in named.items():
        others = [i for i in range(3) if not wanted[i]]
        mask = image[:, :, wanted.index(1)] > 2.0 * image[:, :, others].max(axis=2) + 10
        found[name] = [int(mask.sum()), *(np.argwhere(mask).mean(axis=0).tolist() if mask.any() else [])]
    return found

data = mujoco.MjData(model)
mujoco.mj_forward(model, data)
result = {"faces": model.mesh_facenum.tolist()}
blind, _ = fall(False)
seen, images = fall(True)
result["same physics"] = blind == seen
result["distinct"] = len({image["side"].tobytes() for image in images}) > 20
result["shape"] = [list(images[0]["top"].shape), str(images[0]["top"].dtype)]

one, two = Cameras(model, ["top", "side"], 64), Cameras(model, ["top"], 32)
first = one.render(data)
result["top"], result["side"] = colours(first["top"]), colours(first["side"])
result["own arrays"] = not np.shares_memory(first["top"], one.render(data)["top"])
two.render(data)
two.close()  # one must go on
result["survives another's end"] = np.array_equal(one.render(data)["top"], first["top"])
one.close()
try:
    one.render(data)
except WorldError as error:
    result["closed"] = str(error)
for name, options in (("no sites", {"sites": False}), ("group 3", {"geom_groups": (0, 3)})):
    cameras = Cameras(model, ["top"], 64, **options)
    result[name] = colours(cameras.render(data)["top"])
    cameras.close()
for name, arguments in (("unknown", (["tob"], 64)), ("size", (["top"], 4))):
    try:
        Cameras(model, *arguments)
    except WorldError as error:
        result[name] = str(error)

stock = mujoco.Renderer(model, 64, 64)  # with all faces, shadows and samples
stock.update_scene(data, "side")
images = [first["side"].astype(int), stock.render().astype(int)]
ours, theirs = (image[:, :, 1] > 1.5 * image[:, :, 0] for image in images)
result["overlap with stock"] = float((ours & theirs).sum() / (ours | theirs).sum())
result["shading as stock"] = float(np.corrcoef([image[:, :, 1][ours & theirs] for image in images])[0, 1])
stock.close()
result["model as it was"] = np.array_equal(before, np.concatenate([model.mesh_face.ravel(), model.mesh_facenum, [
    model.vis.quality.offsamples, model.vis.quality.shadowsize, model.vis.global_.offwidth]]))
print(json.dumps(result))
"""


def run(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The script in the virtual environment of Metaworld."""
    return subprocess.run(
        [str(METAWORLD.python), "-c", script],
        env={**os.environ, **METAWORLD.variables, "PYTHONPATH": str(SOURCES), **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


needs_mujoco = pytest.mark.skipif(not METAWORLD.ready, reason="run `understudy env setup metaworld` first")


@pytest.fixture(scope="module")
def drawn() -> dict[str, Any]:
    completed = run(SCRIPT)
    assert completed.returncode == 0, completed.stderr
    return dict(json.loads(completed.stdout))


@needs_mujoco
def test_looking_changes_no_bit_of_the_physics(drawn: dict[str, Any]) -> None:
    assert drawn["same physics"]
    assert drawn["distinct"], "the ball was to move in the images"
    assert drawn["model as it was"]


@needs_mujoco
def test_pictures_are_upright_and_of_the_right_place(drawn: dict[str, Any]) -> None:
    assert drawn["shape"] == [[64, 64, 3], "uint8"]
    assert drawn["faces"][0] > 5000, "the mesh was to be one that is thinned out"
    count, row, column = drawn["side"]["green"]
    assert count > 50
    assert abs(row - 31.5) < 2  # as high as the camera
    assert 32 < column < 37  # a little to the right
    _, row, column = drawn["top"]["red"]
    assert row > 40  # y points up
    assert column > 40
    assert drawn["overlap with stock"] > 0.93
    assert drawn["shading as stock"] > 0.9


@needs_mujoco
def test_sites_and_groups_can_be_chosen(drawn: dict[str, Any]) -> None:
    assert drawn["top"]["red"][0] > 0
    assert drawn["top"]["blue"][0] == 0
    assert drawn["no sites"]["red"][0] == 0
    assert drawn["no sites"]["green"][0] > 0
    assert drawn["group 3"]["blue"][0] > 0


@needs_mujoco
def test_contexts_do_not_disturb_each_other(drawn: dict[str, Any]) -> None:
    assert drawn["survives another's end"]
    assert drawn["own arrays"]
    assert drawn["closed"] == "cameras: render was called after close; create new ones"


@needs_mujoco
def test_mistakes_are_named(drawn: dict[str, Any]) -> None:
    assert drawn["unknown"] == "cameras: the model has no camera 'tob'; did you mean 'top'?"
    assert drawn["size"].startswith("size: expected 8 to 1024 pixels, got int 4")


@needs_mujoco
@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ("osmesa", "osmesa gives garbage once one of several renderers was freed; set MUJOCO_GL=egl instead"),
        ("off", "MUJOCO_GL: no images with 'off'"),
    ],
)
def test_other_ways_to_draw_are_refused(chosen: str, said: str) -> None:
    script = """
import mujoco
from understudy.envs.simulators.camera import Cameras
Cameras(mujoco.MjModel.from_xml_string("<mujoco/>"), [], 64)
"""
    if chosen == "osmesa":  # mujoco itself may lack the library, so it is told later
        script = "import os, mujoco\nos.environ['MUJOCO_GL'] = 'osmesa'\n" + script
        completed = run(script)
    else:
        completed = run(script, MUJOCO_GL=chosen)
    assert completed.returncode != 0
    assert said in completed.stderr


# --- meshes ---


def ball(num_rings: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A ball as points and faces."""
    turns = np.linspace(0, 2 * np.pi, num_rings, endpoint=False)
    heights = np.linspace(0.05, np.pi - 0.05, num_rings)
    points = [(np.sin(a) * np.cos(b), np.sin(a) * np.sin(b), np.cos(a)) for a in heights for b in turns]
    faces = []
    for i in range(num_rings - 1):
        for j in range(num_rings):
            a, b = i * num_rings + j, i * num_rings + (j + 1) % num_rings
            faces += [(a, b, a + num_rings), (b, b + num_rings, a + num_rings)]
    return np.array(points), np.array(faces)


@pytest.mark.parametrize("most", [1000, 200, 20])
def test_a_thinned_ball_is_still_a_ball(most: int) -> None:
    points, faces = ball(60)
    fewer, came_from = fewer_faces(points, faces, most)
    assert most / 8 < len(fewer) <= most
    assert len(came_from) == len(fewer)
    assert len({tuple(sorted(face)) for face in fewer.tolist()}) == len(fewer), "no face twice"
    assert all(len(set(face)) == 3 for face in fewer.tolist()), "no face without a surface"
    corners = points[fewer]
    assert np.allclose(np.linalg.norm(corners, axis=2), 1.0), "corners are points that were there"
    away = np.linalg.norm(corners.mean(axis=1) - points[faces[came_from]].mean(axis=1), axis=1)
    assert away.max() < 3.0 / most**0.5 * 2, "each face is near the one it came from"
    assert corners.reshape(-1, 3).min() < -0.7
    assert corners.reshape(-1, 3).max() > 0.7
