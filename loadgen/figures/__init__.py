"""``evenstep figures``: the paper's experiments simulated: tables, pictures, one JSON."""
