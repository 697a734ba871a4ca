"""``evenstep demo``: the parts put together, policies side by side."""
