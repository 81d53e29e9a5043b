"""Ranks: the processes that train one policy together, from one to a cluster; generic over torch modules."""
