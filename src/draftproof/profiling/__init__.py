"""Memory of a composition on this machine, and the time of rounds, forward passes and rules."""
