"""API: the endpoints of the dashboard and what they answer."""
