"""The bridge to verl: the only modules that import it."""
