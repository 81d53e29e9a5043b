"""Read: episodes, views and batches of rows, in any number of processes."""
