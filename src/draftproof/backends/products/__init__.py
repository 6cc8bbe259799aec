"""Linear layers by the form of their weights, and the calibration of weights that are rounded."""
