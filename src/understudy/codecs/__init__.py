"""Camera frames as bytes, and back: JPEG, H.264 and PNG. `core.codec` has the values that a spec names them by."""

from understudy.codecs.frames import (
    EncodedColumn,
    EncodedFrames,
    FrameError,
    decode_frames,
    encode_frames,
    join_frames,
    measured,
)

__all__ = ["EncodedColumn", "EncodedFrames", "FrameError", "decode_frames", "encode_frames", "join_frames", "measured"]
