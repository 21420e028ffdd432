"""Megatron-DSV: dynamic sparse attention for pretraining video diffusion transformers on Megatron-Core."""

__version__ = "0.1.0"
