"""The networks of the paper, in Flax: no batch norm, no dropout, a width factor for small forms.

`dtype` is what a network computes in, such as `jnp.bfloat16`; its parameters are float32, and so
are its outputs.
"""

from models.convolutional import LeNet, ResNet7, ResNet18
from models.dense import FullyConnected
from models.transformers import GPT, ViT

__all__ = ["GPT", "FullyConnected", "LeNet", "ResNet7", "ResNet18", "ViT"]
