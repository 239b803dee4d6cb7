"""norm_rope: RMSNorm of every head and rotary embedding in one pass over memory."""
