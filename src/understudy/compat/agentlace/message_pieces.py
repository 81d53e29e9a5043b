"""Requests and answers that are larger than one message: sent in pieces, and put together on the other side."""

from __future__ import annotations

import base64
import json
import threading
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from understudy.core import RefusedError, StoreError

PIECE = "understudy/piece"  # the request that carries a piece of a larger one, or asks for one of an answer
WHOLE_BYTES = 512 * 2**10  # what is sent in one message
MAX_BYTES = 64 * 2**20  # of a request or an answer, as JSON
MAX_OPEN = 16  # requests and answers of which not all pieces have been sent

Send = Callable[[str, Any], Any]


def send_in_pieces(send: Send, kind: str, payload: Any) -> Any:
    """Send a request of any size up to MAX_BYTES and return its answer; `send(kind, payload)` sends one message."""
    pieces = _split(payload)
    if len(pieces) == 1:
        answer = send(kind, payload)
    else:
        head = {"name": uuid.uuid4().hex, "of": len(pieces), "type": kind}
        answer = [send(PIECE, {**head, "number": n, "data": piece}) for n, piece in enumerate(pieces)][-1]
    if isinstance(answer, dict) and answer.keys() == {PIECE}:
        told = answer[PIECE]
        rest = [send(PIECE, {"name": told["name"], "number": number}) for number in range(told["of"])]
        return _join(rest)
    return answer


class PieceServer:
    """Puts requests together, and keeps the pieces of large answers until they were asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: OrderedDict[str, dict[int, str]] = OrderedDict()
        self._answers: OrderedDict[str, list[str]] = OrderedDict()

    def answer(self, kind: str, payload: Any, respond: Send) -> Any:
        """The answer to a message: of `respond(kind, payload)` once a request is whole."""
        if kind != PIECE:
            return self._shorten(respond(kind, payload))
        name, number = str(payload["name"]), int(payload["number"])
        if "data" not in payload:
            return self._piece_of_answer(name, number)
        with self._lock:
            pieces = self._requests.setdefault(name, {})
            pieces[number] = str(payload["data"])
            self._keep_newest(self._requests)
            if len(pieces) * WHOLE_BYTES > 2 * MAX_BYTES:
                del self._requests[name]
                raise RefusedError(
                    f"request {payload['type']!r}: expected at most {MAX_BYTES} bytes; send less at once"
                )
            if len(pieces) < int(payload["of"]):
                return None
            del self._requests[name]
        asked = _join([pieces[n] for n in sorted(pieces)])
        return self._shorten(respond(str(payload["type"]), asked))

    def _shorten(self, answer: Any) -> Any:
        pieces = _split(answer)
        if len(pieces) == 1:
            return answer
        name = uuid.uuid4().hex
        with self._lock:
            self._answers[name] = pieces
            self._keep_newest(self._answers)
        return {PIECE: {"name": name, "of": len(pieces)}}

    def _piece_of_answer(self, name: str, number: int) -> str:
        with self._lock:
            pieces = self._answers.get(name)
            if pieces is None or not 0 <= number < len(pieces):
                raise RefusedError("the rest of this answer is no longer kept; ask again")
            if number == len(pieces) - 1:
                del self._answers[name]
            return pieces[number]

    def _keep_newest(self, kept: OrderedDict[str, Any]) -> None:
        while len(kept) > MAX_OPEN:
            kept.popitem(last=False)


def _split(value: Any) -> list[str]:
    text = json.dumps(value)
    if len(text) <= WHOLE_BYTES:
        return [text]
    if len(text) > MAX_BYTES:
        raise StoreError(f"expected at most {MAX_BYTES} bytes of JSON, got {len(text)}; send less at once")
    data = base64.b64encode(zlib.compress(text.encode(), 1)).decode()
    pieces = [data[start : start + WHOLE_BYTES] for start in range(0, len(data), WHOLE_BYTES)]
    return pieces if len(pieces) > 1 else [*pieces, ""]  # two at least: one would be taken for the value itself


def _join(pieces: list[str]) -> Any:
    decoder = zlib.decompressobj()
    text = decoder.decompress(base64.b64decode("".join(pieces)), MAX_BYTES)
    return json.loads(text)
