"""Splitting a model into stages: layer lists, layer descriptions, and models made of them."""

from stretto.models.gpt import gpt_layers
from stretto.models.partition import by_class, by_starts, by_weights
from stretto.models.specs import LayerSpec, SharedSpec
from stretto.models.split import Partition, build, describe_split, partition, split
from stretto.models.stage import Stage
from stretto.models.whole import LayerRange, whole_model

__all__ = [
    "LayerRange",
    "LayerSpec",
    "Partition",
    "SharedSpec",
    "Stage",
    "build",
    "by_class",
    "by_starts",
    "by_weights",
    "describe_split",
    "gpt_layers",
    "partition",
    "split",
    "whole_model",
]
