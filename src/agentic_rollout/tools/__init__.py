"""Tools that a trajectory can call."""
