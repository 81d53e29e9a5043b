"""Collection: runs the episodes that a plan asks for, whatever crashes, and filters their groups."""
