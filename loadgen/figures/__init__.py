"""``evenstep figures``: simulations of the paper's experiments as tables, pictures, one JSON."""
