"""Commands that set up, watch and test."""
