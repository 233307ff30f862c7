"""Layers whose KV lies on the host: storage there, slots on the device, copies between them."""
