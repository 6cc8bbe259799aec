"""What a composition costs on this machine: memory, and the time of rounds, forward passes and rules."""
