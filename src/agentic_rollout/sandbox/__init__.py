"""Running programs that nobody has read: an embedded sandbox without Docker and without root."""
