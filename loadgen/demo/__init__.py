"""``evenstep demo``: an emulated fleet behind a router, several policies side by side."""
