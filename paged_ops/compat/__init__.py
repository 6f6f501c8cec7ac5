"""Other libraries' interfaces on top of the public ops, for engines that were written against those."""
