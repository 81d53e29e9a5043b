"""Data: episodes into stores: recorded, rolled out, imported and exported."""
