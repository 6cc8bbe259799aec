"""The decode loop, its requests and their scheduling, statistics, and the registry of parts."""
