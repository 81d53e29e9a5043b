"""Format: the files of a store: segments of rows, the catalog, and what is checked in them."""
