"""Where drafted tokens come from; each comes with the distribution it was drawn from."""
