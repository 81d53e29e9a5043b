"""Wire: what client and server send each other."""
