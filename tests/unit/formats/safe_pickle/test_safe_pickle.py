"""Pickles as data: everything that a file of transitions holds comes through, and nothing that runs."""

from __future__ import annotations

import codecs
import collections
import os
import pickle
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.formats import FormatError
from understudy.formats.safe_pickle import dump_item, load_items
from understudy.formats.safe_pickle.write import BEGIN, END, END_BATCH

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)


def loaded(path: Path, data: bytes) -> list[Any]:
    path.write_bytes(data)
    return list(load_items(path))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and np.shape(a) == np.shape(b) and np.asarray(a).tobytes() == np.asarray(b).tobytes()
    return type(a) is type(b) and bool(a == b)


def item(number: int) -> dict[str, Any]:
    rng = np.random.default_rng(number)
    return {
        "observations": {"state": rng.random((1, 3)), "image": rng.integers(0, 256, (1, 4, 4, 3), np.uint8)},
        "scalars": (np.float32(0.5), np.int64(-3), np.bool_(True)),
        "plain": [1, -(2**40), 2**200, 0.1, True, False, None, "tęxt", b"bytes"],
        "fortran": np.asfortranarray(rng.random((3, 4))),
        "empty": np.empty((0, 3), np.float32),
        "big_endian": np.arange(3, dtype=">i4"),
        "text": np.array(["a", "bcd"]),
        "flags": np.array([True, False]),
    }


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_items_come_back_as_pickle_gives_them(tmp_path: Path, protocol: int) -> None:
    items = [item(number) for number in range(1100)]  # pickle writes lists in batches of 1,000
    got = loaded(tmp_path / "a.pkl", pickle.dumps(items, protocol))
    assert len(got) == len(items)
    assert all(same(a, b) for a, b in zip(items, got, strict=True))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_objects_that_are_used_twice_and_ordered_dicts(tmp_path: Path, protocol: int) -> None:
    shared = {"state": np.arange(3.0)}
    items = [{"a": shared, "b": collections.OrderedDict(x=1)}, {"a": shared, "b": shared}]
    first, second = loaded(tmp_path / "a.pkl", pickle.dumps(items, protocol))
    assert same(first, {"a": shared, "b": {"x": 1}})
    assert same(second, {"a": shared, "b": shared})


def test_what_is_written_is_read_by_pickle_and_here(tmp_path: Path) -> None:
    value = {key: leaf for key, leaf in item(3).items() if key not in ("text", "scalars", "fortran", "big_endian")}
    data = BEGIN + dump_item(value) * 2 + END_BATCH + END
    for got in (pickle.loads(data), loaded(tmp_path / "a.pkl", data)):
        assert len(got) == 2
        assert same(got[1], value)
    with pytest.raises(FormatError, match="holds arrays of numbers"):
        dump_item(np.array(["text"]))


def test_a_file_larger_than_memory_is_read_item_by_item(tmp_path: Path) -> None:
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps([{"x": np.full(100_000, number % 256, np.uint8)} for number in range(300)]))
    tracemalloc.start()
    try:
        assert sum(int(got["x"][0]) for got in load_items(path)) == sum(number % 256 for number in range(300))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3_000_000, "of a file of 30 MB"


# ---- what would run


class Runs:
    def __init__(self, function: Any, *arguments: Any):
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


class HasState:
    def __setstate__(self, state: Any) -> None:
        raise AssertionError("ran")

    def __getstate__(self) -> Any:
        return {"a": 1}


def attacks() -> dict[str, bytes]:
    from numpy.lib import npyio

    objects: dict[str, Any] = {
        "os.system": Runs(os.system, "touch ran"),
        "eval": Runs(eval, "open('ran', 'w')"),
        "exec": Runs(exec, "open('ran', 'w')"),
        "getattr": Runs(getattr, "", "join"),
        "import": Runs(__import__, "os"),
        "subprocess": Runs(subprocess.check_output, ["touch", "ran"]),
        "numpy.load": Runs(np.load, "x.npy", None, True),
        "numpy.fromfile": Runs(np.fromfile, "/etc/passwd"),
        "numpy.memmap": Runs(np.memmap, "ran", "u1", "w+", 0, (4,)),
        "numpy.savetxt": Runs(npyio.NpzFile, "x"),
        "numpy.random": np.random.default_rng(0),
        "object array": np.array([Runs(os.system, "touch ran"), 1], object),
        "object array without code": np.array([None, {}], object),
        "record array": np.zeros(2, [("a", "f4"), ("b", "i4")]),
        "datetime": np.array(["2024-01-01"], "M8[D]"),
        "complex": np.zeros(2, complex),
        "setstate": HasState(),
        "defaultdict": collections.defaultdict(list),
        "deque": collections.deque([1]),
        "range": range(3),
        "set": {1, 2},
        "frozenset": frozenset({1}),
        "class": int,
        "function": len,
        "path": Path("x"),
    }
    found = {}
    for name, value in objects.items():
        for protocol in PROTOCOLS:
            found[f"{name}, protocol {protocol}"] = pickle.dumps([{"x": value}], protocol)
    wrap = b"\x80\x04](}X\x01\x00\x00\x00x"
    end = b"se."
    found |= {
        "persistent id": wrap + b"Pos\n" + end,
        "binary persistent id": wrap + b"X\x02\x00\x00\x00osQ" + end,
        "extension registry": wrap + b"\x82\x01" + end,
        "extension registry, two bytes": wrap + b"\x83\x01\x00" + end,
        "inst": wrap + b"(ios\nsystem\n" + end,
        "obj": wrap + b"(cos\nsystem\nX\x01\x00\x00\x00xo" + end,
        "newobj": wrap + b"cnumpy\nndarray\n)\x81" + end,
        "newobj_ex": wrap + b"cnumpy\nndarray\n)}\x92" + end,
        "copyreg": wrap + b"ccopyreg\n_reconstructor\ncos\nsystem\nNN\x87R" + end,
        "stack global with dots": wrap + b"\x8c\x05numpy\x8c\x0ecore.os.system\x93" + end,
        "stack global of what is no text": wrap + b"NN\x93" + end,
        "call of a dtype": wrap + b"cnumpy\ndtype\nX\x02\x00\x00\x00f4\x89\x88\x87RX\x01\x00\x00\x00x\x85R" + end,
        "dtype object": wrap + b"cnumpy\ndtype\nX\x02\x00\x00\x00O8\x89\x88\x87R" + end,
        "codecs with another codec": wrap + b"c_codecs\nencode\nX\x01\x00\x00\x00xX\x05\x00\x00\x00rot13\x86R" + end,
        "codecs.decode": wrap + b"c_codecs\ndecode\nX\x01\x00\x00\x00xX\x05\x00\x00\x00utf-8\x86R" + end,
        "state of a dict": wrap + b"}}b" + end,
        "state of a list": wrap + b"]}b" + end,
        "a name as a value": wrap + b"cnumpy\ndtype\n" + end,
        "an array without values": wrap + b"cnumpy.core.multiarray\n_reconstruct\n)R" + end,
        "out of band": wrap + b"\x97" + end,
    }
    return found


@pytest.mark.parametrize("name", attacks())
def test_nothing_runs(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = attacks()[name]
    codecs.lookup("raw_unicode_escape")  # Python imports its own codecs when they are first used
    before = set(sys.modules)
    with pytest.raises(FormatError, match=r"a\.pkl: byte \d+: "):
        loaded(tmp_path / "a.pkl", made)
    assert [path.name for path in tmp_path.iterdir()] == ["a.pkl"]
    assert {module for module in sys.modules if module not in before} <= set(), "a name in the file was imported"


def test_it_says_what_to_do_about_arrays_of_other_libraries(tmp_path: Path) -> None:
    jax = b"\x80\x04](}X\x01\x00\x00\x00xcjax._src.array\n_reconstruct_array\n)Rse."
    with pytest.raises(FormatError, match=r"'jax._src.array._reconstruct_array', .*numpy.asarray\(it\), and dump it"):
        loaded(tmp_path / "a.pkl", jax)
    gym = b"\x80\x04](}X\x01\x00\x00\x00xcgymnasium.spaces.box\nBox\n)Rse."
    with pytest.raises(FormatError, match="take the spaces and environments out"):
        loaded(tmp_path / "a.pkl", gym)


# ---- what would take the machine down


def array(shape: tuple[int, ...], data: bytes = b"") -> bytes:
    """An array that says a shape, whatever its bytes are."""
    parts = dump_item({"x": np.zeros(3, np.uint8)})
    at = parts.index(dump_item((3,)))
    return BEGIN + parts[:at] + dump_item(shape) + parts[at + len(dump_item((3,))) :] + END_BATCH + END


BOMBS: dict[str, bytes] = {
    "text": b"\x80\x04](}X\xff\xff\xff\xff",
    "long text": b"\x80\x04](}\x8d" + struct.pack("<Q", 2**62),
    "bytes": b"\x80\x04](}B\xff\xff\xff\xff",
    "long bytes": b"\x80\x04](}\x8e" + struct.pack("<Q", 2**63 - 1),
    "bytearray": b"\x80\x05](}\x96" + struct.pack("<Q", 2**40),
    "number": b"\x80\x04](\x8b\xff\xff\xff\x7f",
    "digits": b"(lI" + b"9" * 100_000 + b"\na.",
    "memo": b"\x80\x04]r\xff\xff\xff\xff.",
    "huge shape": array((2**40, 2**40)),
    "negative shape": array((-1, -3)),
    "zeros in a huge shape": array((0, 2**62)),
    "many dimensions": array((1,) * 40 + (3,)),
    "nested lists": b"\x80\x04](" + b"](" * 5000,
    "nested tuples": b"\x80\x04]()" + b"\x85" * 30_000 + b"e.",
    "deep dicts": b"\x80\x04](" + b"}K\x01" * 50 + b"N" + b"s" * 50 + b"e.",
    "inside itself": b"\x80\x04](}\x94X\x01\x00\x00\x00xh\x00se.",
    "list inside itself": b"\x80\x04](}X\x01\x00\x00\x00x]\x94h\x00ase.",
    "doubled forty times": b"\x80\x04](}X\x01\x00\x00\x00x]\x94"
    + b"".join(b"](h" + bytes([n]) + b"h" + bytes([n]) + b"e\x94" for n in range(40))
    + b"se.",
    "many operations": b"\x80\x04](" + b"N0" * 40_000 + b"e.",
    "tuple as a key": b"\x80\x04](}" + b")" + b"\x85" * 1000 + b"Nse.",
    "pops what is not there": b"\x80\x040.",
    "ends what was not begun": b"\x80\x04]e.",
    "asks for what has not come": b"\x80\x04h\x05.",
    "no list": pickle.dumps({"a": 1}),
    "nothing": b"",
    "no pickle": b"PK\x03\x04 zip",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_and_damage_are_refused_at_once(tmp_path: Path, name: str) -> None:
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(FormatError, match=r"a\.pkl: byte \d+: "):
            loaded(tmp_path / "a.pkl", BOMBS[name])
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 20


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"a\.pkl: cannot be read"):
        list(load_items(tmp_path / "a.pkl"))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_every_truncation_is_refused(tmp_path: Path, protocol: int) -> None:
    data = pickle.dumps([{"a": np.arange(3.0), "b": "x"}], protocol)
    for length in range(len(data)):
        with pytest.raises(FormatError):
            loaded(tmp_path / "a.pkl", data[:length])
