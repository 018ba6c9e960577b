"""How requests arrive: the server, its limits on connections and bodies, and who is calling."""
