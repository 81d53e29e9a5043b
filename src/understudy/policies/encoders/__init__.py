"""Encoders: from an observation's images and state to one vector of features.

`registry.py` lists the image encoders: `small.py`, `resnet10.py` and `pretrained.py`.
"""
