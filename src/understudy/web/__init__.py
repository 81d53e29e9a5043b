"""Web: the one way to let somebody in over the network: tokens, Host and Origin checks, and the listener.

access    who may reach a server: this machine only, or whoever has the token; under which names, from which pages
tokens    make, read, check and compare tokens
auth      the checks in front of an ASGI app: for programs, or for a page in a browser
listener  the socket of a server, and the URL to print
app_server  an ASGI app on a socket, in a thread
replies   texts for HTTP replies
"""
