"""Routing plan: which row of the expert-sorted order belongs to which slot, without a sort."""
