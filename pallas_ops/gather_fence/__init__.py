"""Values that are not there before given weights are gathered."""
