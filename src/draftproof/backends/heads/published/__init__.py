"""Draft heads in the layouts in which others publish them: EAGLE, Medusa, P-EAGLE, DFlash and prediction layers."""
