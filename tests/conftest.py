"""Shared pieces: a byte codec, a small loop, and scripted policies."""
