"""Large requests and answers go in pieces and are put together again."""

from typing import Any

import numpy as np
import pytest

from understudy.compat.agentlace import message_pieces
from understudy.compat.agentlace.message_pieces import PIECE, PieceServer, send_in_pieces
from understudy.core import RefusedError, StoreError


@pytest.mark.parametrize("size", [2, 700_000, 3_000_000])
def test_a_request_of_any_size_gets_its_answer(size: int) -> None:
    server, sent = PieceServer(), []

    def send(kind: str, payload: Any) -> Any:
        sent.append(kind)
        return server.answer(kind, payload, lambda kind, payload: {"kind": kind, "same": payload})

    asked = {"text": np.random.default_rng(0).bytes(size // 2).hex()}
    assert send_in_pieces(send, "stats", asked) == {"kind": "stats", "same": asked}
    assert (PIECE in sent) == (size > message_pieces.WHOLE_BYTES)
    assert not server._requests
    assert not server._answers


def test_what_is_too_large_is_refused_and_what_is_forgotten_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_pieces, "MAX_BYTES", 1000)
    monkeypatch.setattr(message_pieces, "WHOLE_BYTES", 100)
    with pytest.raises(StoreError, match="expected at most 1000 bytes of JSON, got 2002; send less at once"):
        send_in_pieces(lambda kind, payload: None, "stats", "x" * 2000)
    with pytest.raises(RefusedError, match="no longer kept; ask again"):
        PieceServer().answer(PIECE, {"name": "a", "number": 0}, lambda kind, payload: None)
