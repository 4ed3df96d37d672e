"""What stored rows receive from the attention of many queries."""
