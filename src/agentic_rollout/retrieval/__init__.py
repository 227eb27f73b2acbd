"""Corpora and indexes."""
