"""Asynchronous search: one protocol for an index in this process, a server, and an online service."""
