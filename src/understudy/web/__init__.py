"""Web: who may reach a page or a server over HTTP: tokens, Host and Origin checks, and the listener."""
