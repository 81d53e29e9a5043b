"""VLA: a small vision-language-action policy, made of transformers' own parts. Needs torch and transformers."""

from understudy.policies.vla.config import VLAConfig
from understudy.policies.vla.model import VLAModel
from understudy.policies.vla.policy import VLAPolicy
from understudy.policies.vla.words import Words

__all__ = ["VLAConfig", "VLAModel", "VLAPolicy", "Words"]
