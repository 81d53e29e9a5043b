"""RTCConfig: the options of asynchronous acting, with the names of LeRobot's. Importing it does not import torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from understudy.policies.protocol import PolicyError

Method: TypeAlias = Literal["auto", "rtc", "inpaint", "blend", "switch"]
Schedule: TypeAlias = Literal["linear", "exp", "ones", "zeros"]


@dataclass(frozen=True, kw_only=True)
class RTCConfig:
    """How blocks follow each other when the next one is computed while the current one is executed."""

    method: Method = "auto"
    """How a block continues the one before: rtc guides a flow towards it and blends what is left, inpaint puts the
    steps that cannot change into the flow, blend averages the actions of both, switch only changes over; auto is rtc
    for a flow, else blend."""
    n_action_steps: int | None = None
    """Number of actions from one observation that is acted on to the next; by default half a block, rounded up."""
    inference_delay: int | None = None
    """Number of actions that are executed while a block is computed: the new block is used after exactly so many. By
    default it is used as soon as it is there, which needs a world in real time."""
    execution_horizon: int | None = None
    """Number of actions at the beginning of a block that are kept close to the block before; by default all that it
    has."""
    prefix_attention_schedule: Schedule = "exp"
    """How the closeness falls from the first action that can change to the execution horizon: linear, exp (faster),
    ones (not at all) or zeros (at once)."""
    max_guidance_weight: float = 5.0
    """Largest weight of the guidance, without unit; about the flow's number of inference steps is good."""

    def __post_init__(self) -> None:
        for name, least in (("n_action_steps", 1), ("inference_delay", 0), ("execution_horizon", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise PolicyError(f"rtc/{name}: expected {least} or more, got {value}; raise it, or leave it out")
        if not self.max_guidance_weight > 0:
            raise PolicyError(
                f"rtc/max_guidance_weight: expected more than 0, got {self.max_guidance_weight}; "
                f"method 'switch' guides nothing"
            )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
