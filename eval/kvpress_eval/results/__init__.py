"""What was measured: on disk, read back, and summarised."""
