"""The decode loop and what it conducts: sequences, statistics, and the composition of parts."""
