"""HTTP clients of a robot: RobotHttpClient for an arm's server or a simulated scene, HttpCamera for its images."""

from __future__ import annotations

import http.client
import json
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import numpy as np

from understudy.envs.world import WorldError

Array: TypeAlias = np.ndarray[Any, Any]

TIMEOUT_S = 5.0
MAX_IMAGE_SIDE = 4096  # pixels


class RobotHttpClient:
    """Sends requests over one persistent connection, which is reopened once if the server has closed it."""

    def __init__(self, url: str, *, token: str | None = None, client: str | None = None):
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise WorldError(f"url: expected http://HOST:PORT, got {url!r}; `understudy robot simulate` prints one")
        self.url = url
        self._path = parts.path.rstrip("/")
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=TIMEOUT_S)
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        if client is not None:
            self._headers["X-Client"] = client

    def post(self, path: str, body: Any = None) -> None:
        """POST a command; the answer is ignored."""
        self._request("POST", path, body)

    def post_json(self, path: str, body: Any = None) -> Any:
        """POST a query and return its JSON answer."""
        return self._parsed(path, self._request("POST", path, body))

    def get_json(self, path: str) -> Any:
        return self._parsed(path, self._request("GET", path))

    def get(self, path: str) -> bytes:
        return self._request("GET", path)

    def close(self) -> None:
        self._connection.close()

    def _request(self, method: str, path: str, body: Any = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        try:
            status, found = self._try_once(method, path, data)
        except (http.client.HTTPException, ConnectionError):  # the server closes idle connections
            try:
                status, found = self._try_once(method, path, data)
            except (http.client.HTTPException, OSError) as error:
                raise self._no_answer(path, error) from None
        except OSError as error:
            raise self._no_answer(path, error) from None
        if status != 200:
            raise WorldError(f"{self.url}{path}: {status}: {_sentence(found)}")
        return found

    def _try_once(self, method: str, path: str, data: bytes | None) -> tuple[int, bytes]:
        try:
            self._connection.request(method, self._path + path, data, self._headers)
            answer = self._connection.getresponse()
            return answer.status, answer.read()
        except BaseException:
            self._connection.close()
            raise

    def _no_answer(self, path: str, error: Exception) -> WorldError:
        return WorldError(f"{self.url}{path}: no answer ({error!r}); is `understudy robot` running there?")

    def _parsed(self, path: str, found: bytes) -> Any:
        try:
            return json.loads(found)
        except ValueError:
            raise WorldError(f"{self.url}{path}: expected JSON, got {found[:40]!r}; is this an arm's server?") from None


def _sentence(body: bytes) -> str:
    try:
        return str(json.loads(body)["detail"])[:500]
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("latin-1")


class HttpCamera:
    """A camera whose URL returns PPM images."""

    def __init__(self, url: str, *, token: str | None = None):
        self._client = RobotHttpClient(url, token=token)

    def read(self) -> Array:
        """The current image: uint8 [h, w, 3]."""
        data = self._client.get("")
        try:
            kind, width, height, most, pixels = _ppm(data)
            if (kind, most) != (b"P6", 255) or not (0 < width <= MAX_IMAGE_SIDE and 0 < height <= MAX_IMAGE_SIDE):
                raise ValueError(f"{kind!r}, {width}x{height}, {most}")
            return np.frombuffer(pixels, np.uint8).reshape(height, width, 3).copy()
        except ValueError as error:
            raise WorldError(f"{self._client.url}: expected a PPM image with 8 bits a colour, got {error}") from None

    def close(self) -> None:
        self._client.close()


def _ppm(data: bytes) -> tuple[bytes, int, int, int, bytes]:
    kind, size, most, pixels = data.split(b"\n", 3)
    width, height = size.split()
    return kind, int(width), int(height), int(most), pixels
