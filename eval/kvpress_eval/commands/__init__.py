"""The commands of `kvpress` that measure, one module each."""
