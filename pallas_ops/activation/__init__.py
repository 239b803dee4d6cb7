"""Gated activation of the experts and of the dense MLP."""
