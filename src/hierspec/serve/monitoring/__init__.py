"""What tells others how a server is doing."""
