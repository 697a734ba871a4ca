"""Chains of unequal servers in virtual time; "Serving Chain-structured Jobs …", section 4."""
