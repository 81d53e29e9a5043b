"""Parameters as messages: what is sent arrives, and what cannot be sent is refused."""

from __future__ import annotations

import numpy as np
import pytest

from understudy.core import StoreError, WireError
from understudy.core import tree as trees
from understudy.service import Remote
from understudy.service.wire.message import pieces, to_json
from understudy.service.wire.parameters import encode_parameters, encode_version, receive_parameters


def test_bfloat16_halves_the_bytes_of_floats_and_leaves_the_rest(remote: Remote) -> None:
    remote.publish({"w": np.float32([1.0, 1 / 3, -2.5e-8]), "n": np.arange(3)}, bfloat16=True)
    with remote.parameters() as subscription:
        found = subscription.wait(timeout_s=10)
    assert found is not None
    assert found.tree["w"].tolist() == [1.0, 0.333984375, -2.5029294192790985e-08]  # 1.6796875 * 2**-26
    assert found.tree["w"].dtype == np.float32
    assert found.tree["n"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(("tree", "text"), [({}, "at least one array"), (np.zeros(3), "give it a name")])
def test_what_is_no_tree_of_arrays_is_refused(remote: Remote, tree: object, text: str) -> None:
    with pytest.raises(StoreError, match=text):
        remote.publish(tree)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_version_comes_back_from_its_pieces(bfloat16: bool) -> None:
    tree = {"actor": {"w": np.float32([1.0, -0.5])}, "step": np.int64(7)}
    sent = [*pieces(encode_parameters(tree, {"update": "7"}, bfloat16=bfloat16)), encode_version(3, "store-1")]
    parameters, store_id = receive_parameters(iter(sent), max_bytes=1000)
    assert (parameters.version, parameters.metadata, store_id) == (3, {"update": "7"}, "store-1")
    assert trees.equal(parameters.tree, trees.map_leaves(np.asarray, tree))


def test_the_metadata_key_that_stores_hold_stays() -> None:
    header = b"".join(encode_parameters({"w": np.zeros(1)}, {"update": "7"}, bfloat16=False))
    assert b'{"__metadata__":{"said":' in header  # published versions of earlier stores are read with it


def test_a_version_without_its_number_is_refused() -> None:
    sent = [*pieces(encode_parameters({"w": np.zeros(1)}, {}, bfloat16=False)), to_json({"version": "3"})]
    with pytest.raises(WireError, match="expected the version of parameters and its store"):
        receive_parameters(iter(sent), max_bytes=1000)


def test_an_array_that_is_no_numbers_is_refused_with_its_path() -> None:
    with pytest.raises(StoreError, match="actor/name: expected an array of numbers, got"):
        encode_parameters({"actor": {"name": np.array(["a"])}}, {}, bfloat16=False)
