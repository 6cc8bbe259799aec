"""When a drafter stops drafting: stopping times that look at what was drafted and never take a token back."""
