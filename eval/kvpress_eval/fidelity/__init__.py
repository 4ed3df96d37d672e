"""How close a compressed cache stays to the full one, without labels."""
