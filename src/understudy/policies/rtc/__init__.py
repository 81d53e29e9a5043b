"""RTC: asynchronous acting with a block policy. The next block is computed while the current one is executed."""

from understudy.policies.rtc.async_blocks import AsyncBlocks, AsyncReport
from understudy.policies.rtc.config import RTCConfig
from understudy.policies.rtc.continuation import Continuation
from understudy.policies.rtc.guidance import Guidance, prefix_weights

__all__ = ["AsyncBlocks", "AsyncReport", "Continuation", "Guidance", "RTCConfig", "prefix_weights"]
