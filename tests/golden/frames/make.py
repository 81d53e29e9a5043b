"""Makes the encoded frames beside this file: python -m tests.golden.frames.make. They are kept for ever."""

import json
from pathlib import Path

import numpy as np
import xxhash
from tests.moving_camera import moving_frames

from understudy.codecs import decode_frames, encode_frames
from understudy.core import H264, Codec, Jpeg, Png

HERE = Path(__file__).parent


def make(codec: Codec, num_frames: int) -> None:
    frames = moving_frames(num_frames)
    group = encode_frames(codec, frames)
    found = decode_frames(
        codec, frames.shape[1:], frames.dtype, group.packets, group.checksums, list(range(num_frames))
    )
    (HERE / f"{codec.name}.bin").write_bytes(b"".join(group.packets))
    content = {
        "shape": list(frames.shape[1:]),
        "sizes": [len(packet) for packet in group.packets],
        "decoded_checksums": group.checksums,
        "pixels": [xxhash.xxh3_64_hexdigest(np.ascontiguousarray(frame).data) for frame in found],
    }
    (HERE / f"{codec.name}.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    make(H264(), 10)
    make(Jpeg(), 2)
    make(Png(), 1)
