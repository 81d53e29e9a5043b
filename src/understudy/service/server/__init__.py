"""Server: a store over a socket."""
