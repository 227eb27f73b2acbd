"""Engines: whatever turns a prompt into sampled tokens."""
