"""OpenVLA: published checkpoints of OpenVLA and OpenVLA-OFT as policies. Needs torch, transformers and tokenizers."""

from typing import TYPE_CHECKING, Any

from understudy.policies.openvla.config import OpenVLAConfig
from understudy.policies.protocol import PolicyError

if TYPE_CHECKING:
    from understudy.policies.openvla.network import OpenVLANetwork
    from understudy.policies.openvla.policy import OpenVLAPolicy

__all__ = ["OpenVLAConfig", "OpenVLANetwork", "OpenVLAPolicy"]


def __getattr__(name: str) -> Any:
    """Import what needs transformers when it is first used: a run's config does not need it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from understudy.policies.openvla import network, policy
    except ModuleNotFoundError as error:
        raise PolicyError(
            f"{error.name} is not installed, and OpenVLA needs it; run `pip install 'understudy-robotics[vla]'`"
        ) from None
    return getattr(policy if name == "OpenVLAPolicy" else network, name)
