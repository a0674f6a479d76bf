"""Adapters over experts: PEFT's, multiplied beside a weight's codes, in high precision."""
