"""What happens after a failure, and what is saved for it."""
