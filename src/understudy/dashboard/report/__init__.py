"""Report: a run as one HTML file, and its figures."""
