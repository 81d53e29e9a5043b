"""Simulators as worlds: Metaworld, LIBERO and any Gymnasium id. Each runs where its simulator is installed."""
