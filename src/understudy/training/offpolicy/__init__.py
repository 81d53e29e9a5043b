"""Off-policy training: RLPD and behaviour cloning, in one process or as actor and learner."""
