"""Data: runs and records episodes, and imports and exports data sets."""
