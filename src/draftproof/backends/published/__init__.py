"""Draft heads in the layouts in which others publish them: eagle3, eagle, medusa, P-EAGLE, DFlash, and prediction layers."""
