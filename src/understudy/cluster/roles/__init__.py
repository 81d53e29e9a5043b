"""Roles: what runs inside the Ray actors of a cluster."""
