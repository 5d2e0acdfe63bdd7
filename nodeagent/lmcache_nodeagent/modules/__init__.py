"""What the operations do."""
