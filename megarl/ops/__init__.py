"""The operations that megarl owns."""
