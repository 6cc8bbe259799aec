"""The decode loop, its requests and their scheduling, statistics, and the declarations of parts."""
