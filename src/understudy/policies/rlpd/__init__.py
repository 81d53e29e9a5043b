"""The actor that RLPD and behaviour cloning train, with its gripper, and the classifier of success."""
