"""A demo small enough for a laptop: invented facts, a tiny model, and a warm start for it."""
