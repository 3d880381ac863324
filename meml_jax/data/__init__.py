"""Images, their splits, and the cache of what was decoded."""
