"""Data: runs and records episodes, imports and exports data sets, and hands batches to torch's DataLoader."""
