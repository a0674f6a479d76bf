"""Layers that stay in high precision by default: output heads, routers, adapters, and what is too small to gain."""
