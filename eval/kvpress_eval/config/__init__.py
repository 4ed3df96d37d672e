"""What is to be measured, validated before any work."""
