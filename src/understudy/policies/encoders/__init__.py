"""Encoders: from an observation's images and state to one vector of features.

`image_encoder.py` chooses the image encoder: `small_cnn.py` (the default), `resnet10.py` or `pretrained.py`.
"""
