"""The trainer of agentlace, through which HIL-SERL's actors and learners speak, over the delivery service."""
