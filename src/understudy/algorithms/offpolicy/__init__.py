"""Off-policy update rules: SAC as in RLPD, behaviour cloning, and the success classifier."""
