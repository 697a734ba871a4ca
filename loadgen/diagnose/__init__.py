"""``evenstep diagnose``: does balancing matter on this cluster?"""
