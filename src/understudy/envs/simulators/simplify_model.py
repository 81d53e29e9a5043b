"""Simplifier: reduces textures and meshes of a MuJoCo model before it is compiled, so that it renders faster.

Physics is not changed: a mesh is reduced only if no geom that uses it can collide or has mass, so that masses, contacts
and every bit of the motion stay the same. The compiled model is also smaller and loads faster.

Needs mujoco, opencv, scipy and fast-simplification.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np

MAX_SIDE = 256  # pixels of a texture
MAX_FACES = 1000  # of a mesh


@dataclass(frozen=True, kw_only=True, eq=False)
class Mesh:
    """A row per corner of a face, three per face."""

    positions: np.ndarray[Any, Any]  # [corners, 3]
    normals: np.ndarray[Any, Any]  # [corners, 3]
    texture: np.ndarray[Any, Any]  # texture coordinates, [corners, 2]; [corners, 0] without a texture


class Simplifier:
    """Compiles models; simplified files are cached for later models that use them."""

    def __init__(self) -> None:
        self._mujoco = importlib.import_module("mujoco")
        self._made: dict[str, tuple[str, bytes] | None] = {}  # by path: new name and content; None: unchanged

    def compile(self, xml: str) -> Any:
        """A mujoco.MjModel of a scene whose files have absolute paths."""
        root = ET.fromstring(xml)
        textures = [texture for texture in root.iter("texture") if texture.get("file")]
        drawn = visual_meshes(root)
        meshes = [mesh for mesh in root.iter("mesh") if mesh.get("file") and mesh.get("name") in drawn]
        for texture in textures:
            path = texture.attrib["file"]
            if path not in self._made:
                self._made[path] = self._named(path, ".png", smaller_image(path))
        new = sorted({mesh.attrib["file"] for mesh in meshes} - set(self._made))
        for path, mesh in zip(new, self._load_meshes(new), strict=True):
            self._made[path] = self._named(path, ".msh", fewer_faces(mesh))
        files: dict[str, bytes] = {}
        for element in (*textures, *meshes):
            made = self._made[element.attrib["file"]]
            if made is not None:
                element.set("file", made[0])
                files[made[0]] = made[1]
                if element.tag == "mesh":
                    element.set("inertia", "shell")  # never used; a reduced mesh need not enclose a volume
        return self._mujoco.MjModel.from_xml_string(ET.tostring(root, encoding="unicode"), files)

    def _named(self, path: str, suffix: str, file: bytes | None) -> tuple[str, bytes] | None:
        """A unique file name, because MuJoCo distinguishes files by their base name only."""
        return None if file is None else (f"{len(self._made)}_{Path(path).stem}{suffix}", file)

    def _load_meshes(self, paths: list[str]) -> list[Mesh]:
        if not paths:
            return []
        root = ET.Element("mujoco")
        asset, body = (ET.SubElement(root, tag) for tag in ("asset", "worldbody"))
        for index, path in enumerate(paths):
            ET.SubElement(asset, "mesh", name=str(index), file=path, inertia="shell")
            ET.SubElement(body, "geom", type="mesh", mesh=str(index), contype="0", conaffinity="0")
        model = self._mujoco.MjModel.from_xml_string(ET.tostring(root, encoding="unicode"))
        return [self._corners(model, index) for index in range(len(paths))]

    def _corners(self, model: Any, mesh: int) -> Mesh:
        faces = slice(model.mesh_faceadr[mesh], model.mesh_faceadr[mesh] + model.mesh_facenum[mesh])
        turn = np.empty(9)
        self._mujoco.mju_quat2Mat(turn, model.mesh_quat[mesh])
        back = turn.reshape(3, 3).T  # the compiler rotated the mesh and moved it to its centre
        corners = model.mesh_vertadr[mesh] + model.mesh_face[faces].reshape(-1)
        positions = model.mesh_vert[corners] @ back + model.mesh_pos[mesh]
        normals = model.mesh_normal[model.mesh_normaladr[mesh] + model.mesh_facenormal[faces].reshape(-1)] @ back
        texture = np.empty((len(positions), 0))
        if model.mesh_texcoordnum[mesh]:
            texture = model.mesh_texcoord[model.mesh_texcoordadr[mesh] + model.mesh_facetexcoord[faces].reshape(-1)]
        return Mesh(positions=positions, normals=normals, texture=texture)


def visual_meshes(root: ET.Element) -> set[str]:
    """Names of meshes whose geoms cannot collide and have no mass."""
    compiler = root.find("compiler")
    mass_groups = (compiler.get("inertiagrouprange", "0 5") if compiler is not None else "0 5").split()
    names = {mesh.attrib["name"] for mesh in root.iter("mesh") if mesh.get("name")}
    for geom in root.iter("geom"):
        massless = not int(mass_groups[0]) <= int(geom.get("group", "0")) <= int(mass_groups[1])
        if not (massless and geom.get("contype") == "0" and geom.get("conaffinity") == "0"):
            names.discard(geom.get("mesh", ""))
    return names


def smaller_image(path: str, max_side: int = MAX_SIDE) -> bytes | None:
    """The image as a PNG with sides of at most `max_side`; None if it is small already."""
    cv2 = importlib.import_module("cv2")
    image = cv2.imread(path, cv2.IMREAD_COLOR)
    factor = 1 if image is None else -(-max(image.shape[:2]) // max_side)
    if factor == 1:
        return None
    height, width = image.shape[0] // factor, image.shape[1] // factor
    small = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)
    return bytes(cv2.imencode(".png", small)[1])


def fewer_faces(mesh: Mesh, max_faces: int = MAX_FACES) -> bytes | None:
    """Reduce a mesh to about `max_faces` faces, in MuJoCo's file format; None if it is small enough or cannot be."""
    if len(mesh.positions) <= 3 * max_faces:
        return None
    fast_simplification = importlib.import_module("fast_simplification")
    # Merge equal points, also across texture seams: otherwise the reduced mesh gets holes.
    points, point_of_corner = _merged(mesh.positions)
    faces = point_of_corner.reshape(-1, 3).astype(np.int32)
    _, few, collapses = fast_simplification.simplify(points, faces, target_count=max_faces, return_collapses=True)
    if len(few) > 1.2 * max_faces:  # it got stuck and tore the mesh: stop much earlier
        if 2 * len(few) >= len(faces):
            return None
        *_, collapses = fast_simplification.simplify(points, faces, target_count=2 * len(few), return_collapses=True)
    points, _, became = fast_simplification.replay_simplification(points, faces, collapses)
    # A remaining face keeps its patch of the texture; a point on a seam becomes one vertex per patch.
    corner = became[point_of_corner]
    kept = corner.reshape(-1, 3)
    alive = (kept >= 0).all(axis=1) & (kept != np.roll(kept, 1, axis=1)).all(axis=1)
    pairs, vertex = np.unique(np.stack([corner, _patches(mesh)], axis=1), axis=0, return_inverse=True)
    vertex = vertex.reshape(-1)
    normal = _means(mesh.normals, vertex, len(pairs))
    normal /= np.maximum(np.linalg.norm(normal, axis=1, keepdims=True), 1e-9)
    texture = _means(mesh.texture, vertex, len(pairs))
    used, drawn = np.unique(vertex.reshape(-1, 3)[alive], return_inverse=True)
    counts = np.array([len(used), len(used), len(used) if mesh.texture.shape[1] else 0, alive.sum()], np.int32)
    columns = [points[pairs[used, 0]], normal[used], texture[used]]
    return b"".join(
        [
            counts.tobytes(),
            *(np.ascontiguousarray(column, np.float32).tobytes() for column in columns),
            np.ascontiguousarray(drawn, np.int32).tobytes(),
        ]
    )


def _merged(rows: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The distinct rows as float64, and the index of each row among them."""
    different, index = np.unique(rows.astype(np.float32), axis=0, return_inverse=True)
    return np.ascontiguousarray(different, np.float64), index.reshape(-1)


def _patches(mesh: Mesh) -> np.ndarray[Any, Any]:  # [corners]
    """The texture patch of each corner: connected faces that share points and texture coordinates."""
    sparse = importlib.import_module("scipy.sparse")
    graphs = importlib.import_module("scipy.sparse.csgraph")
    vertices, vertex = _merged(np.hstack([mesh.positions, mesh.texture]))
    next_corner = np.roll(vertex.reshape(-1, 3), 1, axis=1).reshape(-1)
    links = sparse.coo_matrix((np.ones(len(next_corner), np.int8), (vertex, next_corner)), shape=(len(vertices),) * 2)
    patch: np.ndarray[Any, Any] = graphs.connected_components(links, directed=False)[1][vertex]
    return patch


def _means(values: np.ndarray[Any, Any], group: np.ndarray[Any, Any], num_groups: int) -> np.ndarray[Any, Any]:
    """The mean of the rows of each group, [num_groups, columns]."""
    sums = np.zeros((num_groups, values.shape[1]))
    np.add.at(sums, group, values)
    return sums / np.maximum(np.bincount(group, minlength=num_groups), 1)[:, None]
