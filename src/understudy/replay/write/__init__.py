"""Write: from steps to durable rows, in the one process that writes a store."""
