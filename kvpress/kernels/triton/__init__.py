"""Decode attention in Triton: the operators of `kvpress.kernels` on CUDA tensors.

Every launcher takes what its operator takes, reads lengths on the device and launches a grid that depends on shapes only, so
a step can be captured in a CUDA graph. Importing this package does not import triton; its modules do.
"""
